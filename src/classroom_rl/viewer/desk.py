"""The teacher's desk: a supervisor's corrections of a run, and what people decide about them."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from classroom_rl.errors import DataError, UnknownConversation
from classroom_rl.results.corrections import (
    ITSELF,
    CorrectionDecision,
    Place,
    append_decision,
    precision_by_category,
    precision_of,
    read_decisions,
)
from classroom_rl.viewer.list_index import NOW, TRAINING, ConversationRow, reviews_of
from classroom_rl.viewer.reader import RunReader
from classroom_rl.viewer.schemas import CorrectionView, Decided, DecisionBody, Desk
from classroom_rl.viewer.turn_views import review_view, split_thoughts, turn_view

LARGEST_DESK = 50


class DeskQuery(BaseModel):
    """The query of `GET /api/corrections`. `decision` keeps corrections whose last decision is this one; `open` those
    without a decision, `fine` those that were rejected because the message was fine."""

    category: str = Field("", max_length=200)
    decision: Literal["", "open", "accept", "edit", "reject", "fine"] = ""
    offset: int = Field(0, ge=0)
    limit: int = Field(10, ge=1, le=LARGEST_DESK)

    def keeps(self, category: str, decision: CorrectionDecision | None) -> bool:
        """Whether a correction passes the filters."""
        if self.category and self.category != category:
            return False
        if decision is None or self.decision == "open":
            return self.decision in ("", "open") and decision is None
        return self.decision in ("", decision.decision) or (self.decision == "fine" and decision.message_was_fine)


@dataclass(frozen=True)
class Correction:
    """A correction that a conversation's row names."""

    row: ConversationRow
    turn: int
    draft: int
    category: str

    @property
    def place(self) -> Place:
        return self.row.id, self.turn, self.draft


class TeachersDesk:
    """Shows the corrections in the training's conversations, and writes down decisions about them."""

    def __init__(self, reader: RunReader):
        self._reader = reader

    def page(self, query: DeskQuery) -> Desk:
        """One page of corrections, the latest step first."""
        decisions = read_decisions(self._reader.folder)
        found = list(self._corrections())
        wanted = [each for each in found if query.keeps(each.category, decisions.get(each.place))]
        shown = wanted[query.offset : query.offset + query.limit]
        return Desk(
            total=len(found),
            undecided=_undecided(found, decisions),
            matching=len(wanted),
            offset=query.offset,
            categories=dict(sorted(Counter(each.category for each in found).items())),
            precision=list(precision_by_category(decisions.values()).values()),
            overall=precision_of("", decisions.values()),
            corrections=list(self._views(shown, decisions)),
        )

    def decide(self, body: DecisionBody) -> Decided:
        """Write down a decision.

        Raises:
            UnknownConversation: if no conversation of the training has this id.
            DataError: if it has no correction in this place.
            StorageError: if the decision cannot be written.
        """
        row = next((row for row in self._rows() if row.id == body.conversation), None)
        if row is None:
            raise UnknownConversation(f"This run has no conversation {body.conversation!r} with corrections.")
        category = {(turn, draft): category for turn, draft, category in row.corrections}.get((body.turn, body.draft))
        if category is None:
            raise DataError(_no_correction(row, body))
        decision = CorrectionDecision(time=round(time.time(), 3), category=category, **body.model_dump())
        append_decision(self._reader.folder, decision)
        decisions = read_decisions(self._reader.folder)
        return Decided(
            decision=decision,
            undecided=_undecided(self._corrections(), decisions),
            precision=list(precision_by_category(decisions.values()).values()),
            overall=precision_of("", decisions.values()),
        )

    def _rows(self) -> list[ConversationRow]:
        """The training's conversations, the latest step first, those that are not in a file yet before all others."""
        in_files = self._reader.rows(TRAINING)
        known = {row.id for row in in_files}
        playing = [row for row in self._reader.rows(NOW) if row.id not in known]
        return [*playing, *sorted(in_files, key=lambda row: -(row.step or 0))]

    def _corrections(self) -> Iterable[Correction]:
        return (Correction(row, *found) for row in self._rows() for found in row.corrections)

    def _views(
        self, corrections: Sequence[Correction], decisions: Mapping[Place, CorrectionDecision]
    ) -> Iterable[CorrectionView]:
        rows = {each.row.id: each.row for each in corrections}
        records = dict(zip(rows, self._reader.records(list(rows.values())), strict=True))
        return (_view(each, records[each.row.id], decisions.get(each.place)) for each in corrections)


def _undecided(corrections: Iterable[Correction], decisions: Mapping[Place, CorrectionDecision]) -> int:
    return sum(each.place not in decisions for each in corrections)


def _no_correction(row: ConversationRow, body: DecisionBody) -> str:
    """Why there is nothing to decide on in this place."""
    named = f"message {body.turn}" if body.draft == ITSELF else f"draft {body.draft} of message {body.turn}"
    there = [f"message {turn}" + ("" if draft == ITSELF else f", draft {draft}") for turn, draft, _ in row.corrections]
    has = "; ".join(there[:10]) or "none"
    return f"Conversation {row.id} has no correction of {named} (both are counted from 0). It has: {has}."


def _view(correction: Correction, record: Mapping[str, Any], decision: CorrectionDecision | None) -> CorrectionView:
    row, turns = correction.row, record["turns"]
    turn = turns[correction.turn]
    itself = correction.draft == ITSELF
    message = turn["text"] if itself else turn["drafts"][correction.draft]["text"]
    return CorrectionView(
        where=NOW if row.file is None else f"step-{row.step}",
        conversation=row.id,
        step=row.step,
        index=row.index,
        turn=correction.turn,
        draft=correction.draft,
        student_name=row.student_name,
        problem=record["problem"],
        before=[turn_view({**each, "review": None, "drafts": ()}) for each in turns[: correction.turn]],
        message=split_thoughts(message),
        review=review_view(dict(reviews_of(turn))[correction.draft]),
        heard=None if itself else split_thoughts(turn["text"]),
        replaced=turn.get("replaced", False),
        decision=decision,
    )
