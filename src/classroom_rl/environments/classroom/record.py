"""The record of a finished conversation: the classroom's trajectory."""

from typing import Any

from pydantic import Field

from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation, Solution, State
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.judges.verdicts import Verdict, sum_up
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.post_test import PostTest
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.trajectory import Trajectory


class ConversationRecord(Trajectory):
    """A finished conversation, as the trainer, the journal and the reports use it.

    `rewards` and `reward` are null for a conversation without a verdict. `max_turns` is that of the server that played
    it; null in records of older versions. `supervised` says whether a supervisor read the teacher's messages.
    `post_test` is null without a post-test.
    """

    type: str = ""
    student_name: str | None = None
    verdicts: list[Verdict] = Field(default_factory=list)
    solutions: list[Solution] = Field(default_factory=list)
    post_test: PostTest | None = None
    max_turns: int | None = None
    supervised: bool = False

    @classmethod
    def of(
        cls, play: Play[Conversation, Any], reward: float | None, turn_rewards: dict[str, list[float | None]]
    ) -> "ConversationRecord":
        """The record of a finished conversation; `reward` is the weighted sum of its rewards."""
        conversation = play.episode
        return cls(
            **play.common_fields(reward),
            turn_rewards=turn_rewards,
            type=conversation.setup.type.value,
            student_name=conversation.setup.student_name,
            verdicts=conversation.verdicts,
            solutions=conversation.solutions,
            post_test=conversation.post_test,
            max_turns=conversation.rules.max_turns,
            supervised=conversation.supervised,
        )

    @property
    def refused(self) -> bool:
        """Whether the conversation counts as rejected because the judge refused to judge its content."""
        judgement = sum_up(self.verdicts, dict.fromkeys(verdict.rule for verdict in self.verdicts))
        return judgement is not None and bool(judgement.refusing_rules)

    @property
    def judge_error(self) -> str | None:
        """The first error of a judge attempt that counts."""
        return next((verdict.error for verdict in self.verdicts if verdict.error and not verdict.anchor), None)

    def conversation(self, rules: ClassroomRules) -> Conversation:
        """The finished conversation without its tokens, for computing rewards."""
        return Conversation(
            id=self.id,
            problem=Problem(self.problem_id, self.problem, self.answer),
            setup=Setup(ConversationType(self.type), self.student_name, ()),
            rules=rules,
            turns=self.turns,
            verdicts=self.verdicts,
            solutions=self.solutions,
            post_test=self.post_test,
            rewards=self.rewards,
            failure=self.failure,
            overflow=self.overflow,
            state=State(self.state),
        )
