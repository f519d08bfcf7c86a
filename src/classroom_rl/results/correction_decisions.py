"""What people decided about a supervisor's corrections: `<run folder>/correction_decisions.jsonl`.

Each line is one decision; the last line about a correction counts. A line is written whole or not at all. Readers skip
a last line that a kill cut off, and the next decision takes its place.
"""

import fcntl
import os
from collections import defaultdict
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from classroom_rl.errors import DataError
from classroom_rl.rollout.intervals import share_interval
from classroom_rl.system.storage import storage_errors

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
