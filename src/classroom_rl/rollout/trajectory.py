"""The record of a finished episode, for training, the journal and the web page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from classroom_rl.rollout.tokens import AuxSample, Turn

TOKEN_FIELDS = frozenset({"prompt_ids", "completion_ids", "mask", "logprobs", "branches"})
"""The largest fields of a trajectory; the journal stores them with the turns instead."""

NEVER_SPOKE = "it ended before the model under training spoke"
"""The `failure` of an episode that holds nothing to train on, which is no fault of a judge."""


@dataclass(frozen=True)
class PlayerOutcome:
    """The outcome for one of several players, in an episode in which the policy played them all (self-play).

    Attributes:
        role: its role; players of the same role share a baseline, players of different roles do not.
        reward: the weighted sum of the player's rewards; None if it could not be scored.
        messages: the indices of its messages among all of the policy's messages.
    """

    role: str
    reward: float | None
    messages: tuple[int, ...]


class Trajectory(BaseModel):
    """A finished episode; environments add fields of their own. The fields are the columns of the Parquet files, and
    the web page reads them.

    `turns` are its messages, each with the role that wrote it; `state` is its final state. `prompt_ids` is the policy's
    first prompt. `completion_ids`, `mask` and `logprobs` have equal lengths; mask 1 marks tokens that the policy
    sampled. All four are empty for a policy without tokens. `branches` holds its auxiliary samples: further tokens
    to train on, which are not part of this context. `turn_rewards` holds, by name, a value for each of the policy's
    messages, in order; null for one that was not scored. `rewards` holds the value of each reward, and `reward` their
    weighted sum; both are null for an episode that could not be scored. This includes every episode with a `failure`:
    the reason why it could not go on, a model's refusal or a full context. `overflow` says which context was full, also
    for an episode that ended early for it and was scored all the same. `meta` is the request's entry for the episode.
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
    branches: list[AuxSample] = Field(default_factory=list)
    turn_rewards: dict[str, list[float | None]] = Field(default_factory=dict)
    meta: dict[str, Any]

    figure_labels: ClassVar[dict[str, str]] = {}
    """What `figures` are called in tables, where not by their names."""

    @property
    def figures(self) -> dict[str, float]:
        """What `classroom_rl.evaluation.episodes` measures: the rewards, unless an environment overrides it; {} for an
        episode that counts in no figure."""
        rewards = {name: value for name, value in self.rewards.items() if value is not None}
        return {} if self.reward is None else {"reward": self.reward, **rewards}

    def criteria(self, weights: Mapping[str, float]) -> dict[str, float]:
        """What `train.normalise_per_criterion` compares one by one: the rewards, unless an environment divides them
        further; {} for an episode that could not be scored.

        Args:
            weights: the environment's `criterion_weights`, whose names are those of the criteria.
        """
        rewards = {} if self.reward is None else self.rewards
        return {name: value for name, value in rewards.items() if value is not None and name in weights}

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut before its end, so that it might have gone on."""
        return self.overflow is not None

    @property
    def unrewarded(self) -> bool:
        """Whether nothing in the episode could be scored, so that it cannot be trained on."""
        return self.reward is None and all(player.reward is None for player in self.players)

    @property
    def players(self) -> list[PlayerOutcome]:
        """The players, if the policy played several (self-play); [] if it played only one, whose reward is the
        episode's."""
        return []

    @property
    def refused(self) -> bool:
        """Whether the episode counts as rejected because its judge refused the policy's content."""
        return False

    @property
    def judge_error(self) -> str | None:
        """The error of a failed judge attempt; None if no attempt failed."""
        return None
