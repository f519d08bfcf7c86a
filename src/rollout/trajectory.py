"""One episode that was played to its end, as it is trained on, kept and shown; whatever the environment."""

from typing import Any

from pydantic import BaseModel, Field

from src.rollout.tokens import Turn

TOKEN_FIELDS = frozenset({"prompt_ids", "completion_ids", "mask", "logprobs"})
"""What makes up most of a trajectory; the journal keeps them with the turns."""


class Trajectory(BaseModel):
    """A finished episode; each environment adds what its episodes have besides. These fields are the columns of the
    Parquet files, and what the page reads.

    `turns` are its messages, each with the seat that it came from; `state` is the one that it ended in.
    `prompt_ids` is the policy's first prompt; `completion_ids`, `mask` and `logprobs` have equal lengths, mask 1
    marking what the policy sampled; all four are empty for a policy that gives no tokens. `rewards` holds each reward's
    value, `reward` their weighted sum; both are null for an episode that could not be scored, and for one with a
    `failure`: it could not go on because a model refused to answer, or because a context was full. `overflow` says
    which, also of an episode that ended early for that and was scored as it was. `meta` is what the request gave for
    it.
    """

    id: str
    request_id: str
    step: int
    index: int
    problem_id: str
    problem: str
    answer: str
    rewards: dict[str, float | None]
    reward: float | None
    turns: list[Turn] = Field(default_factory=list)
    state: str = "END"
    rejected: bool = False
    failure: str | None = None
    overflow: str | None = None
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    meta: dict[str, Any]

    @property
    def refused(self) -> bool:
        """Whether it counts as rejected because its judge would not have what the policy wrote."""
        return False

    @property
    def judge_error(self) -> str | None:
        """Why a judge gave no verdict; None if none failed."""
        return None
