"""A finished conversation, whole: the trajectory of the classroom."""

from src.classroom.conversation import ClassroomRules, Conversation, Solution, State
from src.classroom.setup import ConversationType, Setup
from src.classroom.verdicts import Verdict
from src.rollout.datasets import Problem
from src.rollout.requests import SampleRequest
from src.rollout.tokens import Turn
from src.rollout.trajectory import Trajectory


class ConversationRecord(Trajectory):
    """A finished conversation, whole: what the trainer learns from, the journal keeps and the reports show.

    `rewards` and `reward` are null for a conversation without a verdict. `max_turns` is that of the server that played
    it; null in records from before it was kept.
    """

    type: str
    student_name: str | None
    state: str
    turns: list[Turn]
    verdicts: list[Verdict]
    solutions: list[Solution]
    rejected: bool
    max_turns: int | None = None

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
