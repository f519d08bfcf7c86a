"""`corrections.parquet`: what a supervisor corrected, as prompt and message; and what people decided about it at the
teacher's desk (`correction_decisions.jsonl`).

The ids mean something with one tokenizer only, so the file names it by its fingerprint.

Each line is one decision; the last line about a correction counts. A line is written whole or not at all. Readers skip
a last line that a kill cut off, and the next decision takes its place.
"""

import fcntl
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError, model_validator

from classroom_rl.errors import DataError
from classroom_rl.results.rollout_files import write_table
from classroom_rl.rollout.intervals import share_interval
from classroom_rl.rollout.rows import equal_tokens
from classroom_rl.system.storage import storage_errors

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
            f"{TOKENIZER_KEY.decode()!r}. Write it with classroom_rl.results.corrections.write_corrections."
        )
    try:
        rows = table.select(CORRECTION_SCHEMA.names).cast(CORRECTION_SCHEMA).to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{path} has a column of another type than a file of corrections: {error}") from error
    return [Correction(**row) for row in rows], fingerprint.decode()


DECISIONS_NAME = "correction_decisions.jsonl"
LONGEST_TEXT = 20_000
ITSELF = -1
"""In the place of a draft's position: the message that entered the conversation."""

Place = tuple[str, int, int]
"""Which correction it is: the conversation's id, the message's position among its messages, and the draft's position
among the message's drafts, or `ITSELF`."""


def refuse_contradictions(decision: str, text: str, message_was_fine: bool) -> None:
    """Raise a ValueError if these parts of a decision do not go together."""
    if decision == "edit" and not text.strip():
        raise ValueError("an edit needs a text: it is the new target")
    if decision != "edit" and text:
        raise ValueError(f"only an edit has a text, and this is {decision}")
    if decision != "reject" and message_was_fine:
        raise ValueError(f"message_was_fine rejects a correction, and this is {decision}")


class CorrectionDecision(BaseModel):
    """A person's decision about one correction.

    Attributes:
        time: when it was made, in seconds since 1970.
        conversation, turn, draft: which correction, as in `Place`.
        decision: `accept`; `edit`, with the new target in `text`; or `reject`.
        category: what the supervisor called wrong with the message.
        message_was_fine: of a rejected correction, whether the message needed none: the supervisor was wrong about it.
        correction: the supervisor's text that was decided about. A run that plays a conversation again may have another
            one in the same place, which nobody has decided about. None if it is not known.
    """

    time: float = Field(allow_inf_nan=False)
    conversation: str = Field(min_length=1)
    turn: int = Field(ge=0)
    draft: int = Field(ITSELF, ge=ITSELF)
    decision: Literal["accept", "edit", "reject"]
    text: str = Field("", max_length=LONGEST_TEXT)
    category: str = ""
    message_was_fine: bool = False
    correction: str | None = Field(None, max_length=LONGEST_TEXT)

    @model_validator(mode="after")
    def _parts_agree(self) -> "CorrectionDecision":
        refuse_contradictions(self.decision, self.text, self.message_was_fine)
        return self

    @property
    def place(self) -> Place:
        return self.conversation, self.turn, self.draft


def append_decision(run_folder: Path, decision: CorrectionDecision) -> None:
    """Append a decision to the run's file. It has reached the operating system when this returns. Processes may append
    at the same time.

    Raises:
        StorageError: if the disk is full or may not be written to; the file is as before.
    """
    path = run_folder / DECISIONS_NAME
    line = decision.model_dump_json().encode() + b"\n"
    with storage_errors(path), path.open("ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        end = _end_of_whole_lines(file)
        file.truncate(end)
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


def _end_of_whole_lines(file: FileIO) -> int:
    """The position after the last line end: what follows it was cut off by a kill."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_decisions(run_folder: Path) -> dict[Place, CorrectionDecision]:
    """The last decision about each correction, in the order of the first; {} without a file.

    Raises:
        DataError: if a line is no decision; a last line that was cut off is skipped.
    """
    path = run_folder / DECISIONS_NAME
    if not path.is_file():
        return {}
    found: dict[Place, CorrectionDecision] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                decision = CorrectionDecision.model_validate_json(line)
            except ValidationError as error:
                why = error.errors(include_input=False, include_url=False)[0]
                raise DataError(
                    f"{path}, line {number}, is no decision about a correction: {'.'.join(map(str, why['loc']))} "
                    f"{why['msg']}. Take the line out, or put it right."
                ) from None
            found[decision.place] = decision
    return found


class CategoryPrecision(BaseModel):
    """How often a supervisor was right, by people's decisions, when it named this category.

    `precision` is the share of accepted and edited corrections among all decided ones, null without a decision, and
    [`low`, `high`] its 95 % interval, null for fewer than six. `fine` counts the rejected ones whose message was fine.
    """

    category: str
    decided: int
    accepted: int
    edited: int
    rejected: int
    fine: int
    precision: float | None
    low: float | None
    high: float | None


def precision_of(category: str, decisions: Iterable[CorrectionDecision]) -> CategoryPrecision:
    """The precision by these decisions, which all count as of one category."""
    found = list(decisions)
    accepted, edited = (sum(each.decision == name for each in found) for name in ("accept", "edit"))
    low, high = share_interval(accepted + edited, len(found)) or (None, None)
    return CategoryPrecision(
        category=category,
        decided=len(found),
        accepted=accepted,
        edited=edited,
        rejected=len(found) - accepted - edited,
        fine=sum(each.message_was_fine for each in found),
        precision=(accepted + edited) / len(found) if found else None,
        low=low,
        high=high,
    )


def precision_by_category(decisions: Iterable[CorrectionDecision]) -> dict[str, CategoryPrecision]:
    """Category → precision, for categories with a decision, in order of name."""
    by_category: dict[str, list[CorrectionDecision]] = defaultdict(list)
    for each in decisions:
        by_category[each.category].append(each)
    return {name: precision_of(name, by_category[name]) for name in sorted(by_category)}


HUMAN = "human"


def decided(
    corrections: Sequence[Correction],
    decisions: Mapping[Place, CorrectionDecision],
    encode: Callable[[str], list[int]],
) -> list[Correction]:
    """The corrections without those that were rejected, and with edited texts in place of the supervisor's. A decision
    about other words in the same place (the conversation was played again) does not count.

    Args:
        encode: the ids of a text and of the end of a message.
    """
    found = (_decided(each, decisions.get((each.conversation, each.turn, each.draft)), encode) for each in corrections)
    return [each for each in found if each is not None]


def _decided(
    correction: Correction, decision: CorrectionDecision | None, encode: Callable[[str], list[int]]
) -> Correction | None:
    if decision is None or decision.correction not in (None, correction.target_text):
        return correction
    if decision.decision == "reject":
        return None
    if decision.decision == "accept":
        return correction
    ids = encode(decision.text)
    unchanged = min(equal_tokens(correction.target_ids[: correction.unchanged], ids), len(ids) - 1)
    return replace(correction, target_text=decision.text, target_ids=ids, source=HUMAN, unchanged=unchanged)
