"""Takes a trained tutor out of its run folder, for other programs:

    python -m classroom_rl.export runs/mine --to merged     a model's folder, for transformers 4 and 5, vLLM, llama.cpp
    python -m classroom_rl.export runs/mine --to adapter    the LoRA adapter alone, if one was trained
    python -m classroom_rl.export runs/mine --to gguf       a GGUF file, for llama.cpp and LM Studio
    python -m classroom_rl.export runs/mine --to ollama     the same with a Modelfile, for ollama create
    python -m classroom_rl.export runs/mine --to hub --name me/tutor

It is written into RUN/export/FORMAT, or into --out, with a model card: what was measured, the data, the judge, what the
guards found, the licence. Runs of train_sft.py and train_preferences.py can be exported, too.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult, ModelCard

from classroom_rl.config.base import HuggingFaceConfig
from classroom_rl.config.load import TEACHER_PROMPT_NAME, read_keys
from classroom_rl.config.values import TRAINS_STUDENT
from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.evaluation.report.tables import comparison_table
from classroom_rl.models.gguf_file import (
    DTYPES,
    PRE_TOKENIZERS,
    convert,
    encoded_otherwise,
    plain_template,
    pre_tokenizer_of,
    write_gguf,
)
from classroom_rl.models.lora import is_adapter, read_adapter_config
from classroom_rl.models.policy_folder import write_whole
from classroom_rl.models.pretrained import load_tokenizer, save_tokenizer, why_unreachable
from classroom_rl.results.hub import check_push, hub_id, push_to_hub
from classroom_rl.results.learning import describe_learning, learning_of
from classroom_rl.results.run_folder import RunData, last_figures, load_run, look_up
from classroom_rl.rollout.chat_template import RAISED_BY_TEMPLATES, Message
from classroom_rl.rollout.prompts import render, variables_of
from classroom_rl.system.keys import print_error
from classroom_rl.system.run_lock import is_claimed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MERGED, ADAPTER, GGUF, OLLAMA, HUB = FORMATS = ("merged", "adapter", "gguf", "ollama", "hub")
_ONLY_FOR = {"dtype": (GGUF, OLLAMA), "llama_cpp": (GGUF, OLLAMA), "pre_tokenizer": (GGUF, OLLAMA), "name": (HUB,)}
_PROGRAMS = ("train_rl", "train_sft", "train_preferences")
RECORD_NAME = "export.json"
"""Says what a folder was exported from. Only folders with this file are overwritten."""
_USES = {
    MERGED: ("transformers", "transformers 4 and 5, vLLM and SGLang load this folder: `vllm serve FOLDER`."),
    ADAPTER: ("peft", "`peft.PeftModel.from_pretrained(base_model, FOLDER)`, or `--lora-modules` of vLLM."),
    GGUF: ("gguf", "`llama-server --jinja -m FILE.gguf`, or open the file in LM Studio."),
    OLLAMA: ("gguf", "In this folder: `ollama create NAME -f Modelfile`, then `ollama run NAME`."),
}
"""Format → the Hub's name of the library that loads it, and how to use it."""
_CHATML_IN_GO = """\
{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


@dataclass(frozen=True)
class FinishedRun:
    """A run folder with a trained model. `program` trained it, with `config` as it is recorded there."""

    folder: Path
    program: str
    config: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def base(self) -> str:
        """The model that was trained, a folder or a Hub name."""
        role = "teacher_model" if self.program == "train_rl" else "model"
        return self.config[role]["model_name_or_path"]

    @cached_property
    def data(self) -> RunData:
        return load_run(self.folder)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return load_tokenizer("RUN", str(self.model))


def finished_run(folder: Path) -> FinishedRun:
    """The run in a folder.

    Raises:
        ConfigError: if it is no run folder, or its training is not finished.
    """
    folder = folder.resolve()
    program = next((name for name in _PROGRAMS if (folder / "config" / f"{name}.yaml").is_file()), None)
    if program is None:
        raise ConfigError(
            f"{folder} is no run folder: there is no {'.yaml, '.join(_PROGRAMS)}.yaml in its config/. Name the folder "
            "that the training had as logging.save_dir."
        )
    if is_claimed("train_rl", folder):
        raise ConfigError(f"A training works in {folder}. Wait until it has ended: it writes model/ last.")
    if not (folder / "model" / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds no model/, which a training writes last: it was stopped, or still runs. Start it again "
            "with the same logging.save_dir; it goes on from its last checkpoint."
        )
    config = yaml.safe_load((folder / "config" / f"{program}.yaml").read_text("utf-8"))
    if look_up(config, "generation", "trained_role") == TRAINS_STUDENT:
        raise ConfigError(f"{folder} trained the student, and only tutors are exported: take {folder / 'model'}.")
    return FinishedRun(folder, program, config)


def export(arguments: argparse.Namespace) -> tuple[Path, list[str]]:
    """Export a run.

    Returns:
        The folder, and notes on what its users must know.

    Raises:
        ConfigError: if the run cannot be exported so, or the folder exists.
    """
    to = arguments.to
    for flag, formats in _ONLY_FOR.items():
        if getattr(arguments, flag) is not None and to not in formats:
            raise ConfigError(f"--{flag.replace('_', '-')} is for --to {' and '.join(formats)} only.")
    run = finished_run(arguments.run)
    target = HuggingFaceConfig(arguments.name or look_up(run.config, "huggingface", "name"), push_to_hub=to == HUB)
    if to == HUB and not target.name:
        raise ConfigError("--to hub needs the repository: --name user/name.")
    check_push(target)
    out = (arguments.out or run.folder / "export" / to).resolve()
    if out.exists() and not (arguments.overwrite and (out / RECORD_NAME).is_file()):
        raise ConfigError(f"{out} exists: name another --out, or replace an earlier export with --overwrite.")
    notes: list[str] = []

    def save(folder: Path) -> None:
        notes.extend(_SAVES[to](run, folder, arguments))
        if to == OLLAMA:
            (folder / "Modelfile").write_text(modelfile(run), encoding="utf-8")
        licence = arguments.license or licence_of(run.base)
        if licence is None:
            notes.append(f"The licence of the base model, {run.base}, is not known: state it with --license.")
        write_card(run, folder, MERGED if to == HUB else to, licence, notes)
        record = {"run": run.folder.name, "format": to, "notes": notes}
        (folder / RECORD_NAME).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    source = run.folder / "adapter" if to == ADAPTER else run.model
    write_whole(out, save, needed=sum(path.stat().st_size for path in source.glob("*.safetensors")))
    if to == HUB:
        push_to_hub(out, target)
    return out, notes


# Folders ----------------------------------------------------------------------------------------------------------


def _save_merged(run: FinishedRun, folder: Path, _: argparse.Namespace) -> list[str]:
    shutil.copytree(run.model, folder, dirs_exist_ok=True)
    _save_tokenizer(run, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    notes = add_older_names(config)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return notes


def add_older_names(config: dict[str, Any]) -> list[str]:
    """Add to a config.json of transformers 5 the names by which version 4 and llama.cpp know the same. Without them,
    they would take defaults, among these another speed at which positions are rotated. Version 5 reads both.

    Returns:
        A note if that cannot be done.
    """
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    rope = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        return ["Its layers differ in how they rotate positions: transformers 4 cannot read that here."]
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    return []


def _save_tokenizer(run: FinishedRun, folder: Path) -> None:
    """As `save_tokenizer`, with the chat template in tokenizer_config.json, too, where older programs look for it."""
    save_tokenizer(run.tokenizer, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": run.tokenizer.chat_template}
    for key in ("is_local", "local_files_only"):  # about where this program found it
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_prompt(run: FinishedRun, folder: Path) -> None:
    if (run.model / TEACHER_PROMPT_NAME).is_file():
        shutil.copy(run.model / TEACHER_PROMPT_NAME, folder)


def _save_adapter(run: FinishedRun, folder: Path, _: argparse.Namespace) -> list[str]:
    adapter = run.folder / "adapter"
    if not is_adapter(adapter):
        raise ConfigError(f"{run.folder} has no adapter/: it was trained without LoRA. Export it with --to merged.")
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    _save_tokenizer(run, folder)
    _copy_prompt(run, folder)
    base = str(read_adapter_config(adapter).get("base_model_name_or_path"))
    return [] if hub_id(base) else [f"Its base is a local folder, {base}: whoever loads the adapter needs that, too."]


def _save_gguf(run: FinishedRun, folder: Path, arguments: argparse.Namespace) -> list[str]:
    _copy_prompt(run, folder)
    file, rule = folder / f"{run.folder.name}.gguf", arguments.pre_tokenizer
    config = json.loads((run.model / "config.json").read_text(encoding="utf-8"))
    dtype = arguments.dtype or config.get("dtype") or config.get("torch_dtype")
    if dtype not in DTYPES:
        raise ConfigError(f"The weights are {dtype}: name a type for the file, --dtype {' or '.join(DTYPES)}.")
    if arguments.llama_cpp is not None:
        if rule is not None:
            raise ConfigError("--pre-tokenizer does not go with --llama-cpp: that converter chooses the rule itself.")
        with TemporaryDirectory(dir=folder) as temporary:
            notes = _save_merged(run, Path(temporary), arguments)
            for path in (Path(temporary) / name for name in ("chat_template.jinja", "tokenizer_config.json")):
                path.write_text(plain_template(path.read_text(encoding="utf-8")), encoding="utf-8")
            convert(arguments.llama_cpp, Path(temporary), file, dtype)
        return notes
    write_gguf(run.model, file, run.folder.name, dtype, rule or pre_tokenizer_of(run.model))
    if rule is None:
        return []
    records = [
        record
        for measurement in run.data.measurements.values()
        for records in measurement.records.values()
        for record in records
    ]
    texts = sorted({text for record in records for text in (record.problem, *(turn.text for turn in record.turns))})
    changed = f"{encoded_otherwise(run.model, rule, texts)} of {len(texts)} texts of the run's evaluations"
    return [f"Text is split by the rule {rule}: {changed} get other tokens than by the tokenizer's own."]


_SAVES = {MERGED: _save_merged, ADAPTER: _save_adapter, GGUF: _save_gguf, OLLAMA: _save_gguf, HUB: _save_merged}


# Ollama -----------------------------------------------------------------------------------------------------------


def modelfile(run: FinishedRun) -> str:
    """Ollama's Modelfile: the chat template in Go's syntax if it is ChatML, the sampling of the training, and the
    system message if it is the same in every lesson.

    Raises:
        ConfigError: if the system message cannot be quoted.
    """
    sampling = look_up(run.config, "teacher_model", "vllm") or {}
    system = chatml_system(run.tokenizer, sampling.get("chat_template_kwargs") or {})
    lines = [f"FROM ./{run.folder.name}.gguf"]
    if system is not None:
        lines += [f'TEMPLATE """{_CHATML_IN_GO}"""']
    else:
        lines += ["# The chat template is not ChatML, so there is no TEMPLATE. Ollama then takes one of its own, if"]
        lines += ["# the one in the GGUF file is like it: compare what `ollama show --template` shows."]
    generation = json.loads((run.model / "generation_config.json").read_text(encoding="utf-8"))
    eos_ids = generation.get("eos_token_id")
    for eos_id in dict.fromkeys([run.tokenizer.eos_token_id, *(eos_ids if isinstance(eos_ids, list) else [eos_ids])]):
        lines += [] if eos_id is None else [f'PARAMETER stop "{run.tokenizer.convert_ids_to_tokens(eos_id)}"']
    if sampling:  # min_p and repeat_penalty, which Ollama sets by itself, were not used in the training
        values = [("temperature", sampling["temperature"]), ("top_p", sampling["top_p"]), ("min_p", 0)]
        values += [("top_k", max(0, sampling["top_k"])), ("repeat_penalty", 1), ("num_ctx", sampling["max_length"])]
        lines += [f"PARAMETER {name} {value:g}" for name, value in values]
    prompt = run.model / TEACHER_PROMPT_NAME
    if prompt.is_file() and (variables := variables_of(str(prompt))):
        lines += [f"# The tutor's system message differs from lesson to lesson: render {TEACHER_PROMPT_NAME}, a Jinja"]
        lines += [f"# template of {', '.join(sorted(variables))}, and send it as the first message."]
    elif prompt.is_file():
        system = render(str(prompt))
    if system and '"""' in system:
        raise ConfigError('The system message holds """, which would end it in a Modelfile: use --to gguf.')
    return "\n".join([*lines, *([f'SYSTEM """{system}"""'] if system else [])]) + "\n"


def chatml_system(tokenizer: "PreTrainedTokenizerBase", variables: dict[str, Any]) -> str | None:
    """The system message that a ChatML template adds to a chat without one, "" if it adds none; None if the template
    renders some chat otherwise than ChatML.

    Args:
        variables: further ones of the template.
    """
    chat: list[Message] = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "<think>\nI?\n</think>\n\nMe."},
        {"role": "user", "content": " Why? "},
    ]
    with_system: list[Message] = [{"role": "system", "content": "Be kind."}, *chat]
    try:
        full, bare = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
            for messages in (with_system, chat)
        )
    except RAISED_BY_TEMPLATES:
        return None
    added = re.fullmatch(r"(?:<\|im_start\|>system\n(.*)<\|im_end\|>\n)?", bare.removesuffix(_chatml(chat)), re.DOTALL)
    return None if full != _chatml(with_system) or added is None else added[1] or ""


def _chatml(chat: Sequence[Message]) -> str:
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat]
    return "".join(turns) + "<|im_start|>assistant\n"


# The card ---------------------------------------------------------------------------------------------------------


def licence_of(base: str) -> str | None:
    """The licence in a model's card; None if it has none, or cannot be read."""
    card = Path(base) / "README.md"
    if not card.is_file() and (hub_id(base) is None or why_unreachable()):
        return None
    try:
        return ModelCard.load(card if card.is_file() else base, ignore_metadata_errors=True).data.license
    except (OSError, ValueError):
        return None


def write_card(run: FinishedRun, folder: Path, to: str, licence: str | None, notes: Sequence[str]) -> None:
    """Write README.md: the card that the training wrote, with what is known of the run by now."""
    path = run.model / "README.md"
    card = ModelCard.load(path) if path.is_file() else ModelCard(f"---\n{{}}\n---\n\n# {run.folder.name}\n")
    library, usage = _USES[to]
    card.data.license, card.data.library_name = licence, library
    after = run.data.after
    results = card.data.eval_results or []
    for name in after.samplings if after is not None else ():
        reward, metric_name = look_up(after.metrics[name], "reward", "mean"), f"reward ({name})"
        if reward is not None:
            arguments = ("text-generation", "dialogue", "held-out lessons", "reward", reward)
            results.append(EvalResult(*arguments, dataset_split="held-out", metric_name=metric_name))
    if results:
        card.data.model_name, card.data.eval_results = card.data.model_name or run.folder.name, results
    measured = comparison_table(run.data)
    measured = f"```\n{measured}\n```" if measured else "Nothing was measured on held-out lessons."
    if run.program == "train_rl":
        measured += f"\n\n```\n{describe_learning(learning_of(run.data)[0])}\n```"
    sections = {
        "Use": "\n\n".join([usage, *notes]),
        "Measured": measured,
        "Data": _data_lines(run),
        **({"Judge and guards": _judge_lines(run)} if run.program == "train_rl" else {}),
        "Licence": licence or f"That of the base model, `{Path(run.base).name}`; which one it is was not stated.",
    }
    head, separator, rest = card.text.partition("\n## ")
    added = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    card.text = f"{head.rstrip()}\n\n{added}\n{separator}{rest}"
    card.save(folder / "README.md")


def _data_lines(run: FinishedRun) -> str:
    dataset = run.config.get("dataset") or {}
    sources = [source for name in ("train_datasets", "val_datasets") for source in dataset.get(name) or ()]
    lines = [f"- `{source['name_or_path']}`, split {source['split']}, share {source['ratio']:g}" for source in sources]
    lines += [f"- pairs: `{dataset['pairs']}`"] if dataset.get("pairs") else []
    return "\n".join(lines) or f"None is named: the environment `{run.config.get('environment')}` makes its own."


def _judge_lines(run: FinishedRun) -> str:
    checks, figures = run.data.judge_checks, last_figures(run.data.lines)
    judge, held_out = (
        look_up(run.config, *path, "model_name_or_path")
        for path in (("judge_model",), ("guards", "held_out_judge_model"))
    )
    lines = [f"The judge was `{judge}`, the held-out judge {f'`{held_out}`' if held_out else 'none'}."]
    warned = [check for check in checks if check["warnings"]]
    summary = f"Of {len(checks)} checks whether it can be fooled, {len(warned)} warned."
    lines += [summary if checks else "It was never checked whether it can be fooled."]
    warnings = dict.fromkeys(f"- {warning}" for check in warned for warning in check["warnings"])
    guard_lines = [f"- {name}: {value:.3g}" for name, value in figures.items() if name.startswith("guard/")]
    lines += ["\n".join(warnings)] if warnings else []
    return "\n\n".join([*lines, *(["What the guards measured last:", "\n".join(guard_lines)] if guard_lines else [])])


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom_rl.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run folder (logging.save_dir of its training)")
    parser.add_argument("--to", choices=FORMATS, required=True)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="(default: RUN/export/FORMAT)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--license", metavar="ID", help="such as apache-2.0 (default: that in the base model's card)")
    parser.add_argument("--name", metavar="USER/NAME", help="of hub: the repository (default: huggingface.name)")
    parser.add_argument("--dtype", choices=DTYPES, help="of gguf and ollama (default: that of the weights)")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="of gguf and ollama: convert with this clone")
    parser.add_argument("--pre-tokenizer", choices=PRE_TOKENIZERS, help="of gguf and ollama: how text is split")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, or 2 after an error."""
    arguments = parser().parse_args(argv)
    read_keys()
    try:
        folder, notes = export(arguments)
    except ClassroomError as error:
        print_error(error)
        return 2
    print(f"{folder} holds {', '.join(sorted(path.name for path in folder.iterdir()))}.", *notes, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
