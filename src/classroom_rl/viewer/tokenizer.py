"""Decodes token ids with the teacher's tokenizer in the run folder, without loading a model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

_FILE = "tokenizer.json"


class UnknownTokenIds(Exception):
    """The tokenizer does not have these ids: it is another model's."""


class RunTokenizer:
    """Finds `tokenizer.json` in the trained model, in the published weights, or in the teacher's own folder."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder
        self._found: tuple[Path, Callable[[Sequence[int]], str]] | None = None
        self.why = (
            f"The tokens cannot be shown as text: {run_folder} holds no {_FILE} (in policy/… or model/), and the "
            "teacher's model is no local folder that does."
        )

    def decoder(self) -> Callable[[Sequence[int]], str] | None:
        """A function that decodes ids, special tokens included; None if there is no tokenizer, and `why` says so."""
        path = next((path for path in self._places() if path.is_file()), None)
        if path is None:
            return None
        if self._found is None or self._found[0] != path:
            self._found = (path, _load(path))
        return self._found[1]

    def _places(self) -> list[Path]:
        folders = [self._folder / "model", *sorted(self._folder.glob("policy/v*"), reverse=True)]
        for name in ("vllm_server", "train_rl", "eval"):
            config = self._folder / "config" / f"{name}.yaml"
            if config.is_file():
                read = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
                named = (read.get("teacher_model") or {}).get("model_name_or_path")
                folders += [Path(named)] if named else []
        return [folder / _FILE for folder in folders]


def _load(path: Path) -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()

    def decode(ids: Sequence[int]) -> str:
        if any(not 0 <= each < size for each in ids):
            raise UnknownTokenIds(f"The tokens cannot be shown as text: {path} does not have all of them.")
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode
