"""Fingerprints of the data, templates and local models that a configuration names, as they were when a training began.
Each checkpoint keeps them, so that no training resumes on other content unnoticed."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from classroom_rl.rollout.problem import Problem
from classroom_rl.system.shipped import as_written

CONTENTS = "contents.json"
"""The file in a checkpoint's folder with the fingerprints of what it was made with."""
PROBLEMS = "problems"
"""The key of the fingerprint of the problems, as they were read from files or the Hub."""
WHOLE_UP_TO = 64 * 2**20
"""Larger files of weights are sampled."""
_EVERY, _SAMPLE = 2**20, 4096
_NAMES_PATH = re.compile(r"(path|paths|template|rubric|pairs|distillation\.model)(\.|$)")
_OF_MODELS = frozenset((".safetensors", ".json", ".jinja", ".model", ".txt"))
"""Files of a model that something is loaded from: weights, configurations, vocabularies, chat templates."""

Contents = dict[str, dict[str, dict[str, str]]]
"""Config key → path → name of a file there → its fingerprint. A path in the run folder begins with `…/`."""


def contents_of(config: dict[str, Any]) -> Contents:
    """The fingerprints of all files and folders that the keys of a configuration name.

    Args:
        config: the configuration as its YAML has it.
    """
    contents: Contents = {}
    run_prefix = str(config["logging"]["save_dir"]).rstrip("/") + "/"
    for key, name in _named(config):
        path = Path(name)
        if os.path.isfile(path):
            files = [path]
        elif os.path.isdir(path):
            files = _files_of(path, "model" in key)
        else:
            continue
        shown_path = "…/" + name.removeprefix(run_prefix) if name.startswith(run_prefix) else as_written(name)
        contents.setdefault(key, {})[shown_path] = {
            str(file.relative_to(path.parent)): fingerprint(file) for file in files
        }
    return contents


def write_contents(checkpoint: Path, contents: Contents) -> None:
    """Write fingerprints into a checkpoint's folder."""
    (checkpoint / CONTENTS).write_text(json.dumps(contents, indent=1, ensure_ascii=False), encoding="utf-8")


def read_contents(checkpoint: Path) -> Contents:
    """The fingerprints in a checkpoint's folder; empty if it has none."""
    path = checkpoint / CONTENTS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def fingerprint_of(problems: Sequence[Problem]) -> str:
    """A fingerprint of problems, their answers and material, in their order."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps([problem.id, asdict(problem.material)]).encode())
    return f"{len(problems)} problems, {digest.hexdigest()[:32]}"


def fingerprint(path: Path) -> str:
    """A fingerprint of a file's content.

    Of a large file of weights only the size, the header (names, types and shapes of the tensors) and 4 KiB of every MiB
    are read: 32 MiB of an 8 GiB model, while to read it all would delay every start. Training, merging and quantising
    change values everywhere, so the sample shows them; a change by hand of a few values may escape it. A stored digest
    of the whole file would have to trust the file's time.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix != ".safetensors" or size <= WHOLE_UP_TO:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
        digest = hashlib.sha256(str(size).encode())
        for piece in _samples(file, size):
            digest.update(piece)
        return f"sampled {digest.hexdigest()[:32]}"


def _samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    length = int.from_bytes(file.read(8), "little")
    yield file.read(min(length, WHOLE_UP_TO))
    for start in (*range(0, size - _SAMPLE, _EVERY), size - _SAMPLE):
        file.seek(start)
        yield file.read(_SAMPLE)


def differences(before: Contents, now: Contents) -> Iterator[tuple[str, str]]:
    """Yields key and path of every file that is no longer what it was. What another path or key names is not compared:
    that the configuration changed is said elsewhere."""
    for key, paths in now.items():
        for path, files in paths.items():
            files_before = before.get(key, {}).get(path, files)
            changed = sorted(name for name in {*files_before, *files} if files_before.get(name) != files.get(name))
            for name in changed:
                yield key, path if name == Path(path).name else str(Path(path).parent / name)


def unknown(checkpoint: Path) -> str:
    """What to say of a checkpoint without fingerprints."""
    return (
        f"{checkpoint} does not say what data, templates and models held ({CONTENTS}): what has changed in them "
        "since is not noticed"
    )


def refusal(checkpoint: Path, wrong: Sequence[str]) -> str:
    """Why a training cannot resume, and what to do about it."""
    return (
        f"The training cannot go on from {checkpoint}: {'; '.join(wrong)}. Set back what has changed, or give a new "
        "run another folder, logging.save_dir=…"
    )


def _named(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys that name files or folders, with these. Entries of a list have the key of the list:
    `dataset.train_datasets` names the data and the templates of its entries."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _named(item, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for item in value:
            yield from ((key, path) for _, path in _named(item, key))
    elif isinstance(value, str) and value and _NAMES_PATH.search(key) and not key.startswith("logging."):
        yield key, value


def _files_of(folder: Path, is_model: bool) -> list[Path]:
    if is_model:
        return sorted(path for path in folder.iterdir() if path.suffix in _OF_MODELS and path.is_file())
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
