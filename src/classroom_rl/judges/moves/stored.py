"""Saves trained move classifiers ("readers") in a folder and loads them. Loading runs no code and unpickles nothing.

    readers.json          n-grams, thresholds, measured agreement, and the training data
    readers.safetensors   the arrays: weights and inverse document frequencies
    README.md             the model card, for people

Loading validates both files: their sizes before reading them, types, shapes, finite numbers, and a digest over both.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.judges.moves.classifier import (
    FEATURES_VERSION,
    TEXTS,
    Linear,
    Ngrams,
    Vectoriser,
    figure_names,
    require_sklearn,
    seen,
    texts_of,
)
from classroom_rl.judges.moves.cross_validation import BY_RULES, BY_RULES_WITH_TARGET, KINDS
from classroom_rl.judges.moves.rules import RULES
from classroom_rl.judges.readings import LABELS, Exchange, Trust
from classroom_rl.system.storage import storage_errors, write_whole

JSON_NAME, TENSORS_NAME, CARD_NAME = "readers.json", "readers.safetensors", "README.md"
FORMAT = 1
LARGEST_FILE = 256 * 2**20
"""In bytes. Classifiers trained on the three public data sets take less than a hundredth of it."""

_Share = Field(ge=0, le=1)
_Count = Field(ge=1)
_Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
_Text = Literal["words", "letters", "student"]


class _Stored(BaseModel):
    """A base class that refuses unknown keys, other types, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Figures(_Stored):
    """An `Agreement` as JSON."""

    kappa: float = Field(ge=-1, le=1)
    ci95: _Interval | None
    precision: float | None
    recall: float | None
    base_rate: float = _Share
    messages: int = _Count
    lessons: int = _Count


class DataFile(_Stored):
    """A file or Hub data set that was used for training; `sha256` is "" for a Hub data set."""

    name: str
    sha256: str
    source: str
    licence: str
    messages: int = _Count
    lessons: int = _Count


class Card(_Stored):
    """The training data, and the setup of the cross-validation."""

    data: list[DataFile] = Field(min_length=1)
    folds: int = Field(ge=2)
    inner_folds: int = Field(ge=2)
    scikit_learn: str


class StoredReader(_Stored):
    """The classifier of one label: its kind, its parameters, and the measured agreement of each of `KINDS` that was
    compared. `vocabularies` names its entry in `Stored.vocabularies`; None for rules."""

    source: str
    by: Literal["rules", "classifier", "rules_with_target"]
    vocabularies: str | None
    intercept: float
    threshold: float
    measured: dict[str, Figures]
    gain: float
    gain_ci95: _Interval | None


class Stored(_Stored):
    """The content of readers.json, without its digest."""

    format: int
    features_version: int
    figures: list[str]
    card: Card
    vocabularies: dict[str, dict[_Text, list[str]]]
    readers: dict[str, StoredReader] = Field(min_length=1)
    tensors_sha256: str


class TrainedReaders:
    """Trained move classifiers: for each label the rules or a linear classifier, whichever has the higher kappa.

    Attributes:
        stored: the content of readers.json.
        digest: the digest of both files.
    """

    def __init__(self, stored: Stored, tensors: Mapping[str, np.ndarray], digest: str):
        self.stored, self.digest = stored, digest
        self._vectorisers = {
            name: Vectoriser(
                {text: Ngrams(tuple(texts[text]), tensors[f"{name}.{text}.idf"]) for text in TEXTS if text in texts}
            )
            for name, texts in stored.vocabularies.items()
        }
        self._linear = {
            label: Linear(
                {text: tensors[f"{label}.{text}"] for text in texts_of(label)},
                tensors[f"{label}.figures"],
                reader.intercept,
            )
            for label, reader in stored.readers.items()
            if reader.by != BY_RULES
        }
        self._trust = {label: _trust(reader) for label, reader in stored.readers.items()}
        # One message is usually scored for several labels, which share these tables.
        self._tables = lru_cache(maxsize=256)(lambda name, exchange: self._vectorisers[name].tables([exchange]))

    @property
    def version(self) -> str:
        """The beginning of the digest."""
        return f"readers.{self.digest[:12]}"

    @property
    def trust(self) -> dict[str, Trust]:
        """The labels that can be predicted, each with the measured agreement with annotators."""
        return self._trust

    def was_trained_on(self, name: str) -> bool:
        """Whether the training data include a file with the same content, or the Hub data set of this name."""
        path = Path(name)
        if not path.is_file():
            return any(name == source.name and not source.sha256 for source in self.stored.card.data)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return any(digest == source.sha256 for source in self.stored.card.data)

    def reads(self, label: str, exchange: Exchange) -> bool:
        """Whether the label, which must be a key of `trust`, holds for the message."""
        reader, visible = self.stored.readers[label], seen(label, exchange)
        if reader.by == BY_RULES or (reader.by == BY_RULES_WITH_TARGET and visible.target):
            return RULES[label](visible)
        return self.score(label, exchange) >= reader.threshold

    def score(self, label: str, exchange: Exchange) -> float:
        """The linear classifier's score of the message, for a label that is not predicted by rules alone."""
        tables = self._tables(self.stored.readers[label].vocabularies, seen(label, exchange))
        return float(self._linear[label].scores(tables)[0])


def _trust(reader: StoredReader) -> Trust:
    result = reader.measured[reader.by]
    interval = result.ci95 and (result.ci95[0], result.ci95[1])
    return Trust(result.kappa, interval, result.base_rate, result.messages, result.lessons, reader.source, reader.by)


def save_readers(folder: Path, content: Mapping[str, Any], tensors: Mapping[str, np.ndarray], card: str) -> None:
    """Write trained classifiers into a folder: the content of readers.json (without its two digests), the arrays that
    `load_readers` expects, and the text of README.md.

    Raises:
        StorageError: if the disk is full or not writable.
    """
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(tensor, dtype=np.float64) for name, tensor in sorted(tensors.items())})
    stored = Stored.model_validate(dict(content) | {"tensors_sha256": hashlib.sha256(data).hexdigest()})
    values = stored.model_dump()
    path = folder / TENSORS_NAME
    with storage_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        unfinished.write_bytes(data)
        unfinished.replace(path)  # an atomic rename, so a crash leaves no half-written file
    write_whole(folder / CARD_NAME, card)
    text = json.dumps(values | {"digest": digest_of(values)}, ensure_ascii=False, allow_nan=False, indent=1)
    write_whole(folder / JSON_NAME, text + "\n")  # last: it holds the digest of everything else


def digest_of(values: Mapping[str, Any]) -> str:
    """The SHA-256 of the content of readers.json without `digest`. It also covers the tensors, through their own
    digest in `tensors_sha256`."""
    canonical = json.dumps(values, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def load_readers(folder: Path) -> TrainedReaders:
    """Load trained classifiers from a folder.

    Raises:
        DataError: if a file is missing, too large, changed or damaged, or has another format or features version.
        ConfigError: if scikit-learn is not installed.
    """
    require_sklearn()
    try:
        values = json.loads(_read(folder / JSON_NAME))
        digest = values.pop("digest")
        stored = Stored.model_validate(values)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise _damaged(folder, f"{JSON_NAME} cannot be read: {_short(error)}") from error
    if stored.format != FORMAT or stored.features_version != FEATURES_VERSION or stored.figures != [*figure_names()]:
        raise DataError(
            f"{folder} holds readers of another version (format {stored.format}, features {stored.features_version}; "
            f"here {FORMAT} and {FEATURES_VERSION}): train them again with python -m classroom_rl.judges.moves.train."
        )
    data = _read(folder / TENSORS_NAME)
    if hashlib.sha256(data).hexdigest() != stored.tensors_sha256 or digest_of(stored.model_dump()) != digest:
        raise _damaged(folder, "its files do not match their digest")
    return TrainedReaders(stored, _checked_tensors(folder, stored, data), digest)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise _damaged(path.parent, f"{path.name} is larger than {LARGEST_FILE // 2**20} MiB")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"There is no {path}: name the folder that python -m classroom_rl.judges.moves.train wrote (--out)."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _checked_tensors(folder: Path, stored: Stored, data: bytes) -> dict[str, np.ndarray]:
    """The tensors of readers.safetensors, after a check against readers.json."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    expected = _expected_sizes(folder, stored)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _damaged(folder, f"{TENSORS_NAME} cannot be read: {_short(error)}") from error
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise _damaged(folder, f"the tensor {name!r} is {'missing' if name in expected else 'not asked for'}")
    for name, size in expected.items():
        tensor = tensors[name]
        if tensor.dtype != np.float64 or tensor.shape != (size,) or not np.isfinite(tensor).all():
            raise _damaged(folder, f"the tensor {name!r} does not hold {size} finite numbers of type float64")
        if name.endswith(".idf") and not (tensor > 0).all():
            raise _damaged(folder, f"the tensor {name!r} holds a weight that is not above 0")
    return tensors


def _expected_sizes(folder: Path, stored: Stored) -> dict[str, int]:
    """The length of each tensor that readers.json requires."""
    sizes: dict[str, int] = {}
    for name, texts in stored.vocabularies.items():
        for text, ngrams in texts.items():
            if not ngrams or len(set(ngrams)) < len(ngrams) or not all(ngrams):
                raise _damaged(folder, f"the n-grams {name}.{text} are empty, or one occurs twice")
            sizes[f"{name}.{text}.idf"] = len(ngrams)
    for label, reader in stored.readers.items():
        _check_reader(folder, label, reader)
        if reader.by == BY_RULES:
            continue
        texts = stored.vocabularies.get(reader.vocabularies or "", {})
        if set(texts) != set(texts_of(label)):
            raise _damaged(folder, f"the reader {label} has no n-grams of {', '.join(texts_of(label))}")
        sizes |= {f"{label}.{text}": len(texts[text]) for text in texts}
        sizes[f"{label}.figures"] = len(stored.figures)
    return sizes


def _check_reader(folder: Path, label: str, reader: StoredReader) -> None:
    if label not in LABELS:
        raise _damaged(folder, f"it has a reader for {label!r}; there are {', '.join(LABELS)}")
    if reader.by not in reader.measured or not set(reader.measured) <= set(KINDS):
        raise _damaged(folder, f"the reader {label} is {reader.by}, of which nothing was measured")
    for figures in reader.measured.values():
        if figures.ci95 and not -1 <= figures.ci95[0] <= figures.ci95[1] <= 1:
            raise _damaged(folder, f"the interval of {label} is {figures.ci95}")


def _damaged(folder: Path, reason: str) -> DataError:
    return DataError(
        f"The readers in {folder} are damaged or were changed: {reason}. Train them again with python -m "
        "classroom_rl.judges.moves.train, or copy the folder again."
    )


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:200]
