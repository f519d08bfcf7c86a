"""Files of a supervised run: `corrections.parquet` holds the supervisor's corrections as prompt and message, and
`correction_decisions.jsonl` what people decided about them at the teacher's desk.

Token ids have a meaning only with their tokenizer, so the Parquet file holds its fingerprint.

Each line of the JSON Lines file is one decision; the last line about a correction counts. If the process is killed
while it writes, the last line may be cut off: it is skipped when reading, and the next decision overwrites it.
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
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError, model_validator

from classroom_rl.errors import DataError
from classroom_rl.results.rollout_files import columns_of_dataclass, write_table
from classroom_rl.rollout.intervals import share_interval
from classroom_rl.rollout.rows import equal_tokens
from classroom_rl.system.storage import storage_errors

CORRECTIONS_NAME = "corrections.parquet"
TOKENIZER_KEY = b"tokenizer"
"""The key of the tokenizer's fingerprint in the metadata of the Parquet file."""


@dataclass(frozen=True)
class Correction:
    """A message of the teacher, and the message that the teacher should have written instead.

    Attributes:
        conversation: the conversation's id.
        step: the optimizer step whose batch the conversation belongs to.
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
        unchanged: the number of tokens at the start of the target that the policy wrote itself.
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


CORRECTION_SCHEMA = columns_of_dataclass(Correction)


class HasVocabulary(Protocol):
    """The part of a tokenizer that its fingerprint needs."""

    def get_vocab(self) -> Mapping[str, int]: ...


def tokenizer_fingerprint(tokenizer: HasVocabulary) -> str:
    """Return the SHA-256 of a tokenizer's vocabulary, in hexadecimal: that of its sorted (token, id) pairs as JSON."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


def write_corrections(path: Path, corrections: Sequence[Correction], tokenizer_fingerprint: str) -> None:
    """Write corrections, one per row, and the fingerprint of the tokenizer that their ids belong to. The file is
    replaced atomically. Raises `StorageError` if the disk is full or may not be written to."""
    write_token_rows(path, [asdict(correction) for correction in corrections], CORRECTION_SCHEMA, tokenizer_fingerprint)


def write_token_rows(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema, tokenizer_fingerprint: str) -> None:
    """Write rows with token ids as a Parquet file that names their tokenizer. Arguments and errors are as for
    `write_corrections`."""
    table = pa.Table.from_pylist(rows, schema=schema)
    write_table(path, table.replace_schema_metadata({TOKENIZER_KEY: tokenizer_fingerprint.encode()}))


def holds_corrections(path: Path) -> bool:
    """Whether the path is a Parquet file with the columns of corrections."""
    return _has_columns(path, CORRECTION_SCHEMA)


def _has_columns(path: Path, schema: pa.Schema) -> bool:
    if path.suffix != ".parquet" or not path.is_file():
        return False
    try:
        return set(pq.read_schema(path).names) == set(schema.names)
    except (pa.ArrowException, OSError):
        return False


def read_corrections(path: Path) -> tuple[list[Correction], str]:
    """Read a file of `write_corrections`. Returns the corrections in the order of the file, and the tokenizer's
    fingerprint. Raises `DataError` if there is no such file, or it is not one of corrections, or it does not name its
    tokenizer."""
    advice = f"A training with a supervisor writes {CORRECTIONS_NAME}."
    rows, fingerprint = read_token_rows(Path(path), CORRECTION_SCHEMA, "corrections", advice)
    return [Correction(**row) for row in rows], fingerprint


def read_token_rows(path: Path, schema: pa.Schema, what: str, advice: str) -> tuple[list[dict[str, Any]], str]:
    """Read a file of `write_token_rows`. Returns its rows, and the tokenizer's fingerprint. Raises `DataError` as
    `read_corrections`; it says `what` the rows should be and, as `advice`, where such a file comes from."""
    if not _has_columns(path, schema):
        reason = f"is not a Parquet file with the columns of {what}" if path.exists() else "does not exist"
        raise DataError(f"{path} {reason}. {advice}")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}. {advice}") from error
    fingerprint = (table.schema.metadata or {}).get(TOKENIZER_KEY)
    if not fingerprint:
        raise DataError(
            f"{path} does not say which tokenizer its ids are of: its Parquet metadata lacks the key "
            f"{TOKENIZER_KEY.decode()!r}. Write it with classroom_rl.results.corrections.write_token_rows."
        )
    try:
        return table.select(schema.names).cast(schema).to_pylist(), fingerprint.decode()
    except pa.ArrowException as error:
        raise DataError(f"{path} has a column of another type than a file of {what}: {error}") from error


def refuse_other_tokenizer(name: str, fingerprint: str, tokenizer: HasVocabulary) -> None:
    """Refuse a file whose ids are not those of a model's tokenizer. Raises `DataError`, with both fingerprints."""
    expected = tokenizer_fingerprint(tokenizer)
    if fingerprint != expected:
        raise DataError(
            f"{name} holds token ids of another tokenizer than the model's (fingerprint {fingerprint[:12]}, and the "
            f"model's is {expected[:12]}): train the model whose training wrote it, or one with the same tokenizer."
        )


DECISIONS_NAME = "correction_decisions.jsonl"
LONGEST_TEXT = 20_000
ITSELF = -1
"""Instead of a draft's position: the message itself, which entered the conversation."""

Place = tuple[str, int, int]
"""Identifies a correction: the conversation's id, the message's position among the messages, and the draft's position
among the drafts of the message, or `ITSELF`."""


class Decision(BaseModel):
    """What a person decided about one correction.

    Attributes:
        conversation, turn, draft: the correction, as in `Place`.
        decision: `accept`; `edit`, with the new target in `text`; or `reject`.
        message_was_fine: for a rejected correction, whether the message needed no correction: the supervisor was wrong.
        correction: the supervisor's text that the decision is about; None if it is not known. A run that plays the
            conversation again may have another text at the same position, about which nobody has decided.
    """

    conversation: str = Field(min_length=1)
    turn: int = Field(ge=0)
    draft: int = Field(ITSELF, ge=ITSELF)
    decision: Literal["accept", "edit", "reject"]
    text: str = Field("", max_length=LONGEST_TEXT)
    message_was_fine: bool = False
    correction: str | None = Field(None, max_length=LONGEST_TEXT)

    @model_validator(mode="after")
    def _parts_agree(self) -> "Decision":
        if self.decision == "edit" and not self.text.strip():
            raise ValueError("an edit needs a text: it is the new target")
        if self.decision != "edit" and self.text:
            raise ValueError(f"only an edit has a text, and this is {self.decision}")
        if self.decision != "reject" and self.message_was_fine:
            raise ValueError(f"message_was_fine rejects a correction, and this is {self.decision}")
        return self


class CorrectionDecision(Decision):
    """A decision as it is recorded: with the `time` when it was made, in seconds since 1970, and the `category` of what
    was wrong with the message, in the supervisor's view."""

    time: float = Field(allow_inf_nan=False)
    category: str = ""

    @property
    def place(self) -> Place:
        return self.conversation, self.turn, self.draft


def append_decision(run_folder: Path, decision: CorrectionDecision) -> None:
    """Append a decision to the run's file. When this returns, the decision has been passed to the operating system.
    Several processes may append at the same time. Raises `StorageError` if the disk is full or may not be written to;
    the file is as before."""
    path = run_folder / DECISIONS_NAME
    line = decision.model_dump_json().encode() + b"\n"
    with storage_errors(path), path.open("ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held until the file is closed
        end = _end_of_whole_lines(file)
        file.truncate(end)  # remove a line that a kill cut off
        remaining = memoryview(line)
        try:
            while remaining:  # an unbuffered write may take only a part
                remaining = remaining[file.write(remaining) :]
        except OSError:
            file.truncate(end)
            raise


def _end_of_whole_lines(file: FileIO) -> int:
    """Return the position after the last newline. Anything after it is a line that was cut off."""
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
    """Read the last decision about each correction, in the order of their first decisions; {} without a file. Raises
    `DataError` if a line is no decision; a last line that was cut off is skipped."""
    path = run_folder / DECISIONS_NAME
    if not path.is_file():
        return {}
    decisions: dict[Place, CorrectionDecision] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                decision = CorrectionDecision.model_validate_json(line)
            except ValidationError as error:
                problem = error.errors(include_input=False, include_url=False)[0]
                raise DataError(
                    f"{path}, line {number}, is no decision about a correction: {'.'.join(map(str, problem['loc']))} "
                    f"{problem['msg']}. Take the line out, or put it right."
                ) from None
            decisions[decision.place] = decision
    return decisions


class CategoryPrecision(BaseModel):
    """How often the supervisor was right about a category, according to people's decisions.

    `precision` is the share of accepted and edited corrections among all decided ones, null without a decision.
    [`low`, `high`] is its 95 % interval, null for fewer than six decisions. `fine` counts the rejected corrections
    whose message was fine.
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
    """Compute the precision from these decisions, which all count towards one category."""
    decisions = list(decisions)
    accepted, edited = (sum(decision.decision == name for decision in decisions) for name in ("accept", "edit"))
    low, high = share_interval(accepted + edited, len(decisions)) or (None, None)
    return CategoryPrecision(
        category=category,
        decided=len(decisions),
        accepted=accepted,
        edited=edited,
        rejected=len(decisions) - accepted - edited,
        fine=sum(decision.message_was_fine for decision in decisions),
        precision=(accepted + edited) / len(decisions) if decisions else None,
        low=low,
        high=high,
    )


def precision_by_category(decisions: Iterable[CorrectionDecision]) -> dict[str, CategoryPrecision]:
    """Return category → precision, for the categories with a decision, sorted by name."""
    by_category: dict[str, list[CorrectionDecision]] = defaultdict(list)
    for decision in decisions:
        by_category[decision.category].append(decision)
    return {name: precision_of(name, by_category[name]) for name in sorted(by_category)}


HUMAN = "human"


def decided(
    corrections: Sequence[Correction],
    decisions: Mapping[Place, CorrectionDecision],
    encode: Callable[[str], list[int]],
) -> list[Correction]:
    """Apply people's decisions: leave out the rejected corrections, and replace the supervisor's text by edited ones. A
    decision about another text at the same position (the conversation was played again) does not count. `encode`
    returns the ids of a text and of the end of a message."""
    results = (
        _apply_decision(correction, decision_about(decisions, place, correction.target_text), encode)
        for correction in corrections
        for place in [(correction.conversation, correction.turn, correction.draft)]
    )
    return [result for result in results if result is not None]


def decision_about(
    decisions: Mapping[Place, CorrectionDecision], place: Place, target_text: str | None
) -> CorrectionDecision | None:
    """The decision about a correction; None without one, and if it is about another text at the same position."""
    decision = decisions.get(place)
    return None if decision is None or decision.correction not in (None, target_text) else decision


def _apply_decision(
    correction: Correction, decision: CorrectionDecision | None, encode: Callable[[str], list[int]]
) -> Correction | None:
    """Return the correction with the decision applied; None if it was rejected."""
    if decision is None:
        return correction
    if decision.decision == "reject":
        return None
    if decision.decision == "accept":
        return correction
    ids = encode(decision.text)
    # always train on at least the last token, the end of the message
    unchanged = min(equal_tokens(correction.target_ids[: correction.unchanged], ids), len(ids) - 1)
    return replace(correction, target_text=decision.text, target_ids=ids, source=HUMAN, unchanged=unchanged)
