"""The filters and the order of a list of conversations."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from classroom_rl.viewer.list_index import ConversationRow

LARGEST_PAGE = 200


class ListQuery(BaseModel):
    """The query of `GET /api/conversations`.

    Attributes:
        where: the set, as in `ConversationSets.files`, or `now`.
        low, high: inclusive bounds of the reward. With a bound, conversations without a reward are left out.
        problem: a part of the problem's text, or its id.
        persona: keeps the conversations in which this persona spoke.
        judge: "failed" keeps conversations with a judge attempt without a verdict, "unrewarded" those without a reward,
            "rejected" those that the judge rejected.
        review: "invalid" keeps conversations with a message or draft that the supervisor called invalid, "none" those
            with one that it gave no verdict on.
        category: keeps the conversations with an invalid message or draft of this category.
    """

    where: str
    low: float | None = None
    high: float | None = None
    problem: str = Field("", max_length=1000)
    persona: str = ""
    judge: Literal["", "failed", "unrewarded", "rejected"] = ""
    review: Literal["", "invalid", "none"] = ""
    category: str = Field("", max_length=200)
    sampling: str = ""
    sort: Literal["played", "best", "worst", "longest"] = "played"
    offset: int = Field(0, ge=0)
    limit: int = Field(100, ge=1, le=LARGEST_PAGE)

    def keeps(self, row: ConversationRow) -> bool:
        """Whether a row passes all filters except `problem`."""
        if self.low is not None and (row.reward is None or row.reward < self.low):
            return False
        if self.high is not None and (row.reward is None or row.reward > self.high):
            return False
        if self.persona and self.persona not in row.personas:
            return False
        if self.category and self.category not in row.categories:
            return False
        if (self.review == "invalid" and not row.categories) or (self.review == "none" and not row.without_review):
            return False
        if self.sampling and row.sampling != self.sampling:
            return False
        return {"": True, "failed": row.judge_failed, "unrewarded": row.reward is None, "rejected": row.rejected}[
            self.judge
        ]


def ordered(rows: Sequence[ConversationRow], sort: str) -> list[ConversationRow]:
    """Sort the rows. In orders by reward, rows without a reward come last."""
    if sort == "longest":
        return sorted(rows, key=lambda row: -row.messages)
    if sort == "played":
        return list(rows)
    sign = -1 if sort == "best" else 1
    return sorted(rows, key=lambda row: (row.reward is None, sign * (row.reward or 0.0)))
