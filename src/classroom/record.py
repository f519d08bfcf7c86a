"""A finished conversation, whole, and the answer that holds a batch of them."""

from typing import Any

from pydantic import BaseModel

from src.classroom.conversation import ClassroomRules, Conversation, Solution, State
from src.classroom.setup import ConversationType, Setup
from src.classroom.verdicts import Verdict
from src.models.policy_version import PolicyVersion
from src.rollout.datasets import Problem
from src.rollout.requests import SampleRequest
from src.rollout.tokens import Turn
from src.rollout.usage import Usage

TOKEN_FIELDS = frozenset({"prompt_ids", "completion_ids", "mask", "logprobs"})
"""What makes up most of a record; the journal keeps them with the turns."""


class ConversationRecord(BaseModel):
    """A finished conversation, whole: what the trainer learns from, the journal keeps and the reports show.

    `prompt_ids` is the teacher's first prompt; `completion_ids`, `mask` and `logprobs` have equal lengths, mask 1
    marking what the policy sampled; all four are empty for a teacher behind an API. `rewards` holds each reward's
    value, `reward` their weighted sum; both are null for a conversation without a verdict, and for one with a
    `failure`: it could not go on because a model refused to answer, or because a context was full. `overflow` says
    which, also of a conversation whose dialogue ended for that and was judged as it was. `max_turns` is that of the
    server that played it; null in records from before it was kept.
    """

    id: str
    request_id: str
    step: int
    index: int
    problem_id: str
    problem: str
    answer: str
    type: str
    student_name: str | None
    state: str
    turns: list[Turn]
    verdicts: list[Verdict]
    solutions: list[Solution]
    rewards: dict[str, float | None]
    reward: float | None
    rejected: bool
    failure: str | None = None
    overflow: str | None = None
    max_turns: int | None = None
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    meta: dict[str, Any]

    @classmethod
    def of(
        cls, conversation: Conversation, request: SampleRequest, index: int, reward: float | None
    ) -> "ConversationRecord":
        buffer = conversation.buffer
        return cls(
            id=conversation.id,
            request_id=request.request_id,
            step=request.step,
            index=index,
            problem_id=conversation.problem.id,
            problem=conversation.problem.text,
            answer=conversation.problem.answer,
            type=conversation.setup.type.value,
            student_name=conversation.setup.student_name,
            state=conversation.state.value,
            turns=conversation.turns,
            verdicts=conversation.verdicts,
            solutions=conversation.solutions,
            rewards=conversation.rewards,
            reward=reward,
            rejected=conversation.rejected,
            failure=conversation.failure,
            overflow=conversation.overflow,
            max_turns=conversation.rules.max_turns,
            prompt_ids=buffer.prompt_ids if buffer else [],
            completion_ids=buffer.completion_ids if buffer else [],
            mask=buffer.mask if buffer else [],
            logprobs=buffer.logprobs if buffer else [],
            meta=request.meta[index] if request.meta is not None else {},
        )

    def conversation(self, rules: ClassroomRules) -> Conversation:
        """The finished conversation itself, its tokens left out: what rewards are computed from."""
        return Conversation(
            id=self.id,
            problem=Problem(self.problem_id, self.problem, self.answer),
            setup=Setup(ConversationType(self.type), self.student_name, ()),
            rules=rules,
            turns=self.turns,
            verdicts=self.verdicts,
            solutions=self.solutions,
            rewards=self.rewards,
            failure=self.failure,
            overflow=self.overflow,
            state=State(self.state),
        )


class SampleResponse(BaseModel):
    """Answer of `/sample_conversations` and `/wait_batch`: one record per entry of the request, in its order.

    `reward_weights` are those by which each record's `reward` was summed up. `judge`, `student` and `teacher` are what
    it took of those seats that are behind an API.
    """

    request_id: str
    policy: PolicyVersion
    conversations: list[ConversationRecord]
    reward_weights: dict[str, float]
    judge: Usage | None = None
    student: Usage | None = None
    teacher: Usage | None = None
