"""The teacher's desk: the supervisor's corrections in a run, and the decisions of people about them."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from classroom_rl.rollout.thoughts import split_thoughts
from classroom_rl.viewer.list_index import NOW, TRAINING, ConversationRow
from classroom_rl.viewer.reader import RunReader
from classroom_rl.viewer.schemas import CorrectionView, Decided, DecisionBody, Desk
from classroom_rl.viewer.turn_views import review_view, turn_view, turns_of

LARGEST_DESK = 50


class DeskQuery(BaseModel):
    """The query of `GET /api/corrections`. `decision` keeps the corrections whose last decision is this one; `open`
    keeps those without a decision, `fine` those that were rejected because the message was fine."""

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
    """A correction in a conversation, without its text."""

    row: ConversationRow
    turn: int
    draft: int
    category: str

    @property
    def place(self) -> Place:
        return self.row.id, self.turn, self.draft


class TeachersDesk:
    """Shows the corrections in the conversations of a training, and records decisions about them."""

    def __init__(self, reader: RunReader):
        self._reader = reader

    def page(self, query: DeskQuery) -> Desk:
        """Return one page of corrections, the latest step first."""
        decisions = read_decisions(self._reader.folder)
        corrections = list(self._corrections())
        matching = [
            correction
            for correction in corrections
            if query.keeps(correction.category, decisions.get(correction.place))
        ]
        page = matching[query.offset : query.offset + query.limit]
        return Desk(
            total=len(corrections),
            undecided=_count_undecided(corrections, decisions),
            matching=len(matching),
            offset=query.offset,
            categories=dict(sorted(Counter(correction.category for correction in corrections).items())),
            precision=list(precision_by_category(decisions.values()).values()),
            overall=precision_of("", decisions.values()),
            corrections=list(self._views(page, decisions)),
        )

    def decide(self, body: DecisionBody) -> Decided:
        """Record a decision.

        Raises:
            UnknownConversation: if no conversation of the training has this id.
            DataError: if the conversation has no correction of this message or draft.
            StorageError: if the decision cannot be written.
        """
        row = next((row for row in self._rows() if row.id == body.conversation), None)
        if row is None:
            raise UnknownConversation(f"This run has no conversation {body.conversation!r} with corrections.")
        category = {(turn, draft): category for turn, draft, category in row.corrections}.get((body.turn, body.draft))
        if category is None:
            raise DataError(_no_correction_message(row, body))
        decision = CorrectionDecision(time=round(time.time(), 3), category=category, **body.model_dump())
        append_decision(self._reader.folder, decision)
        decisions = read_decisions(self._reader.folder)
        return Decided(
            decision=decision,
            undecided=_count_undecided(self._corrections(), decisions),
            precision=list(precision_by_category(decisions.values()).values()),
            overall=precision_of("", decisions.values()),
        )

    def _rows(self) -> list[ConversationRow]:
        """Return the training's conversations: first those that are not in a file yet, then the latest step first."""
        in_files = self._reader.rows(TRAINING)
        ids_in_files = {row.id for row in in_files}
        playing = [row for row in self._reader.rows(NOW) if row.id not in ids_in_files]
        return [*playing, *sorted(in_files, key=lambda row: -(row.step or 0))]

    def _corrections(self) -> Iterable[Correction]:
        return (Correction(row, *correction) for row in self._rows() for correction in row.corrections)

    def _views(
        self, corrections: Sequence[Correction], decisions: Mapping[Place, CorrectionDecision]
    ) -> Iterable[CorrectionView]:
        rows = {correction.row.id: correction.row for correction in corrections}
        records = dict(zip(rows, self._reader.records(list(rows.values())), strict=True))
        return (
            _view(correction, records[correction.row.id], decisions.get(correction.place)) for correction in corrections
        )


def _count_undecided(corrections: Iterable[Correction], decisions: Mapping[Place, CorrectionDecision]) -> int:
    return sum(correction.place not in decisions for correction in corrections)


def _no_correction_message(row: ConversationRow, body: DecisionBody) -> str:
    """Return the message that says why there is nothing to decide on."""
    requested = f"message {body.turn}" if body.draft == ITSELF else f"draft {body.draft} of message {body.turn}"
    corrections = [
        f"message {turn}" + ("" if draft == ITSELF else f", draft {draft}") for turn, draft, _ in row.corrections
    ]
    listed = "; ".join(corrections[:10]) or "none"
    return f"Conversation {row.id} has no correction of {requested} (both are counted from 0). It has: {listed}."


def _view(correction: Correction, record: Mapping[str, Any], decision: CorrectionDecision | None) -> CorrectionView:
    row, turns = correction.row, turns_of(record)
    turn = turns[correction.turn]
    message = turn if correction.draft == ITSELF else turn.drafts[correction.draft]
    return CorrectionView(
        where=NOW if row.file is None else f"step-{row.step}",
        conversation=row.id,
        step=row.step,
        index=row.index,
        turn=correction.turn,
        draft=correction.draft,
        student_name=row.student_name,
        problem=record["problem"],
        before=[turn_view(replace(earlier, review=None, drafts=())) for earlier in turns[: correction.turn]],
        message=split_thoughts(message.text),
        review=review_view(message.review),
        heard=None if message is turn else split_thoughts(turn.text),
        replaced=turn.replaced,
        decision=decision,
    )
