"""The request for a batch of episodes, and its response."""

import asyncio
import hashlib
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, field_validator, model_validator

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.problem import PostTestMaterial, Problem
from classroom_rl.rollout.text import nests_deeper
from classroom_rl.rollout.trajectory import Trajectory

_LEVELS_OF_META = 20

T = TypeVar("T", bound=Trajectory)


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SampleRequest(StrictModel):
    """Body of `POST /sample_conversations`: one entry of `problems` per conversation, repeated for each in a group.

    `request_id` makes the request idempotent: sent again with the same body, it returns the same answer and is not run
    again. With `run_id` and `policy_version` null, any loaded weights are accepted (evaluation). `greedy` samples the
    policy at temperature 0. `fixed_seeds` derives every sampling seed from (seed, problem, step, sample index, number
    of answers so far), so that tutors can be compared; training leaves it off. `supervised` turns the supervisor on, as
    in training; without it, no message is reviewed. `meta` (one mapping per conversation, nested at most 20 levels
    deep) is stored with the record. `post_test_material` (one entry per conversation) is what post-tests on maths
    problems need; it is the same for all conversations on a problem. `judge_again` repeats judge attempts without a
    verdict in a request that was answered before.
    """

    problems: list[str] = Field(min_length=1)
    answers: list[str]
    meta: list[dict[str, Any]] | None = None
    post_test_material: list[PostTestMaterial] | None = None
    request_id: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int
    step: int
    run_id: str | None = None
    policy_version: int | None = None
    greedy: bool = False
    fixed_seeds: bool = False
    supervised: bool = False
    judge_again: bool = False

    @field_validator("meta")
    @classmethod
    def _meta_is_flat_enough(cls, meta: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for index, entry in enumerate(meta or ()):
            if nests_deeper(entry, _LEVELS_OF_META):
                raise ValueError(f"entry {index} holds values within values on more than {_LEVELS_OF_META} levels")
        return meta

    @model_validator(mode="after")
    def _lengths_agree(self) -> "SampleRequest":
        counts = {"problems": len(self.problems), "answers": len(self.answers)}
        for name in ("meta", "post_test_material"):
            if (entries := getattr(self, name)) is not None:
                counts[name] = len(entries)
        if len(set(counts.values())) > 1:
            raise ValueError(f"{', '.join(counts)} must have one entry per conversation each, but hold {counts}")
        if (self.run_id is None) != (self.policy_version is None):
            raise ValueError("run_id and policy_version come together: give both, or neither")
        return self

    @property
    def digest(self) -> str:
        """A hash of the body without `judge_again`: requests with the same digest ask for the same work."""
        # Newer fields count only where they are used: a request from before they existed keeps its digest.
        excluded = {"judge_again"} if self.supervised else {"judge_again", "supervised"}
        excluded |= set() if self.post_test_material is not None else {"post_test_material"}
        return hashlib.sha256(self.model_dump_json(exclude=excluded).encode()).hexdigest()

    def all_problems(self) -> list[Problem]:
        """The problem of each conversation; conversations on the same problem share one object."""
        material = self.post_test_material or [None] * len(self.problems)
        pairs = list(zip(self.problems, self.answers, strict=True))
        # Reversed, so that the first entry for a pair is the one that stays in the dict.
        material_of = dict(reversed(list(zip(pairs, material, strict=True))))
        problems = {pair: Problem.of(*pair, entry) for pair, entry in material_of.items()}
        return [problems[pair] for pair in pairs]

    @property
    def wanted_policy(self) -> PolicyVersion | None:
        if self.run_id is None or self.policy_version is None:
            return None
        return PolicyVersion(self.run_id, self.policy_version)


class SampleResponse(BaseModel, Generic[T]):
    """Answer of `/sample_conversations` and `/wait_batch`: one trajectory per entry of the request, in its order.

    `reward_weights` are the weights in each trajectory's `reward`. `usage` maps each role behind an API to what the
    batch used of it. `plays` is a fingerprint of the server's configuration; empty if it gives none.
    `seconds_after_policy` passed after the last message of the policy, with judging and other scoring alone.
    """

    request_id: str
    policy: PolicyVersion
    conversations: list[SerializeAsAny[T]]
    reward_weights: dict[str, float]
    usage: dict[str, Usage] = Field(default_factory=dict)
    plays: str = ""
    seconds_after_policy: float = 0.0

    async def as_json(self) -> bytes:
        """The response as JSON. Between two conversations it yields to the event loop, since a large batch takes long
        to serialise."""
        envelope = self.model_copy(update={"conversations": []}).model_dump_json().encode()
        before, empty, after = envelope.rpartition(b'"conversations":[]')
        parts = []
        for conversation in self.conversations:
            parts.append(conversation.model_dump_json().encode())
            await asyncio.sleep(0)
        return before + empty[:-1] + b",".join(parts) + b"]" + after
