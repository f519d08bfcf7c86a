"""The record of a finished conversation, and `replay`, which restores a conversation from the journal.

After a restart, whatever the journal holds is neither sampled nor judged again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field, TypeAdapter

from classroom_rl.environments.classroom.conversation import ClassroomRules, Conversation, Solution, State
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.judges.post_test.records import PostTest
from classroom_rl.judges.verdicts import Verdict, criterion_of, sum_up
from classroom_rl.rollout.environment import Play
from classroom_rl.rollout.policy_turn import replay_event
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.trajectory import Trajectory

PEDAGOGICAL = "pedagogical"
"""The reward that is made of the judge's scores."""


class ConversationRecord(Trajectory):
    """A finished conversation, as the trainer, the journal and the reports use it.

    Attributes:
        rewards, reward: null for a conversation without a verdict.
        post_test: null without a post-test.
        max_turns: the limit on the server that played it; null in records of older versions.
        supervised: whether a supervisor reviewed the teacher's messages.
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

    def criteria(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The rewards; in place of the pedagogical one the criteria of the judge's scores, as shares of their scales.
        What a rejection or a cap has taken from the reward is taken from each of them: a penalty comes closer to 1."""
        criteria, reward = super().criteria(weights), self.rewards.get(PEDAGOGICAL)
        if self.reward is None or reward is None:
            return criteria
        judgement = sum_up(self.verdicts, dict.fromkeys(verdict.rule for verdict in self.verdicts))
        scores = None if judgement is None or judgement.refusing_rules else judgement.scores
        if scores is not None and scores.final_reward > 0:
            remaining = reward / scores.final_reward
        else:  # penalties may have cut a sum at 0, from which nothing was taken
            remaining = float(scores is not None and not self.rejected)
        for name, weight in weights.items():
            key = name.removeprefix(f"{PEDAGOGICAL}/")
            if key != name:
                share = 0.0 if scores is None else scores.values[key] / criterion_of(key).top
                criteria[name] = remaining * share if weight > 0 else 1.0 - remaining * (1.0 - share)
        return criteria

    @property
    def refused(self) -> bool:
        """Whether the conversation counts as rejected because the judge refused to judge its content."""
        judgement = sum_up(self.verdicts, dict.fromkeys(verdict.rule for verdict in self.verdicts))
        return judgement is not None and bool(judgement.refusing_rules)

    @property
    def judge_error(self) -> str | None:
        """The first error of a judge attempt, anchors left out; None without errors."""
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


_VERDICT, _SOLUTIONS, _POST_TEST = TypeAdapter(Verdict), TypeAdapter(list[Solution]), TypeAdapter(PostTest)


@dataclass
class ReplayedState:
    """What the journal contains of a conversation, apart from its turns.

    Attributes:
        verdicts: by (rule, attempt).
        solutions: None if the student has not written them yet.
        post_test: None if it has not been taken yet.
        rewarded: whether the rewards are in the journal.
        finished: whether the record is in the journal.
        failure: the event that says why the conversation could not go on; None if there is none.
    """

    verdicts: dict[tuple[str, int], Verdict] = field(default_factory=dict)
    solutions: list[Solution] | None = None
    post_test: PostTest | None = None
    rewarded: bool = False
    finished: bool = False
    failure: dict[str, Any] | None = None

    def of_rule(self, rule: str) -> list[Verdict]:
        """The verdicts of all attempts at a rule, without anchors."""
        return [verdict for verdict in self.verdicts.values() if verdict.rule == rule and not verdict.anchor]


def replay(conversation: Conversation, events: Iterable[dict[str, Any]], judge_again: bool) -> ReplayedState:
    """Add the turns among `events` to a conversation that has just started, and return the rest of the events.

    Args:
        judge_again: drop failures and judge attempts without a verdict, so that they are tried again.
    """
    replayed = ReplayedState()
    for event in events:
        # Any other event after a failure shows that the conversation was resumed: the failure no longer counts.
        if replayed.failure is not None and event["event"] not in ("failure", "rewards", "conversation"):
            replayed.failure, replayed.rewarded, replayed.finished = None, False, False
        match event["event"]:
            case "draft" | "review" | "turn":
                _replay_dialogue(conversation, event)
            case "verdict":
                verdict = _VERDICT.validate_python(event["verdict"])
                replayed.verdicts[verdict.rule, verdict.attempt] = verdict
            case "solutions":
                replayed.solutions = _SOLUTIONS.validate_python(event["solutions"])
            case "grades":
                replayed.solutions = graded(replayed.solutions, event["grades"])
            case "post_test":
                replayed.post_test = _POST_TEST.validate_python(event["post_test"])
            case "cut_short":
                conversation.cut_short(event["reason"])
            case "failure":
                replayed.failure = event
            case "rewards":
                replayed.rewarded = True
            case "conversation":
                replayed.finished = True
    failed_keys = [key for key, verdict in replayed.verdicts.items() if not verdict.valid]
    if judge_again and failed_keys:
        for key in failed_keys:
            del replayed.verdicts[key]
        replayed.rewarded = replayed.finished = False
    if replayed.failure is not None and judge_again:
        replayed.failure, replayed.rewarded, replayed.finished = None, False, False
    if replayed.failure is not None:
        # A conversation that failed is not judged any more, but its record keeps the verdicts that it got.
        rule_index = conversation.rules.judge_rules.index
        conversation.verdicts = sorted(
            replayed.verdicts.values(), key=lambda verdict: (rule_index(verdict.rule), verdict.attempt)
        )
        reason_and_ids = (replayed.failure[name] for name in ("reason", "prompt_ids", "end_ids"))
        conversation.give_up(*reason_and_ids, overflow=replayed.failure.get("overflow", False))
    return replayed


def graded(solutions: Sequence[Solution], grades: Sequence[float]) -> list[Solution]:
    """The solutions with these grades."""
    return [replace(solution, grade=grade) for solution, grade in zip(solutions, grades, strict=True)]


def _replay_dialogue(conversation: Conversation, event: dict[str, Any]) -> None:
    if "prompt_estimate" in event and conversation.prompt_estimate is None:
        conversation.open_estimated(event["prompt_estimate"])
    turn = replay_event(conversation, event)
    if turn is not None and turn.role == "student":
        conversation.add_student_turn(turn)  # its tokens are in the context already
    elif turn is not None:
        conversation.add_teacher_turn(turn)
