"""Which conversations of a set a list shows: filters, order, one page of them as columns."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from src.viewer.list_index import ConversationRow

LARGEST_PAGE = 200


class ListQuery(BaseModel):
    """The query of `GET /api/conversations`.

    `low` and `high` bound the reward, both included, and leave out conversations without one. `problem` is part of
    the problem's text or its id. `persona` keeps those in which it spoke. `judge`: "failed" keeps those with an
    attempt that brought no verdict, "unrewarded" those without a reward, "rejected" those that were rejected.
    """

    where: str
    low: float | None = None
    high: float | None = None
    problem: str = Field("", max_length=1000)
    persona: str = ""
    judge: Literal["", "failed", "unrewarded", "rejected"] = ""
    sampling: str = ""
    sort: Literal["played", "best", "worst", "longest"] = "played"
    offset: int = Field(0, ge=0)
    limit: int = Field(100, ge=1, le=LARGEST_PAGE)

    def keeps(self, row: ConversationRow) -> bool:
        """Whether a row passes all filters but that of the problem's text."""
        if self.low is not None and (row.reward is None or row.reward < self.low):
            return False
        if self.high is not None and (row.reward is None or row.reward > self.high):
            return False
        if self.persona and self.persona not in row.personas:
            return False
        if self.sampling and row.sampling != self.sampling:
            return False
        return {"": True, "failed": row.judge_failed, "unrewarded": row.reward is None, "rejected": row.rejected}[
            self.judge
        ]


def ordered(rows: Sequence[ConversationRow], sort: str) -> list[ConversationRow]:
    """The rows in the wanted order; those without a reward come last in orders by reward."""
    if sort == "longest":
        return sorted(rows, key=lambda row: -row.messages)
    if sort == "played":
        return list(rows)
    sign = -1 if sort == "best" else 1
    return sorted(rows, key=lambda row: (row.reward is None, sign * (row.reward or 0.0)))
