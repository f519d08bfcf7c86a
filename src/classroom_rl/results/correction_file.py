"""Writes and reads `corrections.parquet`: what a supervisor corrected, as prompt and target token ids.

The ids mean something with one tokenizer only, so the file names it by its fingerprint.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from classroom_rl.errors import DataError
from classroom_rl.results.rollout_files import write_table

CORRECTIONS_NAME = "corrections.parquet"
TOKENIZER_KEY = b"tokenizer"
"""The key of the tokenizer's fingerprint in the file's metadata."""

_IDS = pa.list_(pa.int32())
CORRECTION_SCHEMA = pa.schema(
    [
        ("conversation", pa.string()),
        ("step", pa.int64()),
        ("turn", pa.int64()),
        ("draft", pa.int64()),
        ("policy", pa.string()),
        ("prompt_ids", _IDS),
        ("draft_ids", _IDS),
        ("draft_logprobs", pa.list_(pa.float32())),
        ("target_text", pa.string()),
        ("target_ids", _IDS),
        ("category", pa.string()),
        ("critique", pa.string()),
        ("source", pa.string()),
        ("unchanged", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Correction:
    """A message of the teacher, and the message that would have been right in its place.

    Attributes:
        conversation: the conversation's id.
        step: the optimizer step whose batch it is of.
        turn: the message's position among the conversation's messages.
        draft: its position among the drafts of that message; -1 for the message itself.
        policy: the policy version that wrote the message, as text.
        prompt_ids: all tokens before the message, as the policy saw them.
        draft_ids, draft_logprobs: the message's tokens as sampled, and the engine's log-prob of each, in nats.
        target_text, target_ids: the corrected message. The ids are trained on as they are, so they end with the end
            token.
        category: what was wrong with the message.
        critique: the same in words, for people; never trained on.
        source: `rules`, `model` or `human`.
        unchanged: the number of the target's first tokens that the policy wrote itself.
    """

    conversation: str
    step: int
    turn: int
    draft: int
    policy: str
    prompt_ids: list[int]
    draft_ids: list[int]
    draft_logprobs: list[float]
    target_text: str
    target_ids: list[int]
    category: str
    critique: str
    source: str
    unchanged: int = 0


class HasVocabulary(Protocol):
    """A tokenizer, as far as its fingerprint needs it."""

    def get_vocab(self) -> Mapping[str, int]: ...


def tokenizer_fingerprint(tokenizer: HasVocabulary) -> str:
    """The SHA-256 of a tokenizer's vocabulary, in hexadecimal: of the JSON text of its (token, id) pairs, sorted."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


def write_corrections(path: Path, corrections: Sequence[Correction], tokenizer_fingerprint: str) -> None:
    """Write corrections, one a row; the file is replaced atomically.

    Args:
        tokenizer_fingerprint: that of the tokenizer whose ids they hold.

    Raises:
        StorageError: if the disk is full or may not be written to.
    """
    table = pa.Table.from_pylist([asdict(each) for each in corrections], schema=CORRECTION_SCHEMA)
    write_table(path, table.replace_schema_metadata({TOKENIZER_KEY: tokenizer_fingerprint.encode()}))


def holds_corrections(path: Path) -> bool:
    """Whether this is a Parquet file with the columns of corrections."""
    if path.suffix != ".parquet" or not path.is_file():
        return False
    try:
        return set(pq.read_schema(path).names) == set(CORRECTION_SCHEMA.names)
    except (pa.ArrowException, OSError):
        return False


def read_corrections(path: Path) -> tuple[list[Correction], str]:
    """Read a file of `write_corrections`: the corrections in its order, and the tokenizer's fingerprint.

    Raises:
        DataError: if there is no such file, or it is not one of corrections, or it does not name its tokenizer.
    """
    path = Path(path)
    if not holds_corrections(path):
        reason = "is not a Parquet file with the columns of corrections" if path.exists() else "does not exist"
        raise DataError(f"{path} {reason}. A training with a supervisor writes {CORRECTIONS_NAME}.")
    table = pq.read_table(path)
    fingerprint = (table.schema.metadata or {}).get(TOKENIZER_KEY)
    if not fingerprint:
        raise DataError(
            f"{path} does not say which tokenizer its ids are of: its Parquet metadata lacks the key "
            f"{TOKENIZER_KEY.decode()!r}. Write it with classroom_rl.results.correction_file.write_corrections."
        )
    try:
        rows = table.select(CORRECTION_SCHEMA.names).cast(CORRECTION_SCHEMA).to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{path} has a column of another type than a file of corrections: {error}") from error
    return [Correction(**row) for row in rows], fingerprint.decode()
