"""The state machine of one conversation. Pure: no model, no clock, no I/O.

A conversation allows only valid transitions between states and refuses all others. `environment.py` reads its state,
calls the model of that state, and adds the result with one of the `add_…` methods.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import dropwhile

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.judges.difficulty import LevelRules
from classroom_rl.judges.post_test.records import PostTest
from classroom_rl.judges.verdicts import Judgement, Verdict, sum_up
from classroom_rl.rollout.engine import ConversationFacts
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.supervision import SampledDraft
from classroom_rl.rollout.thoughts import visible_messages, visible_text
from classroom_rl.rollout.tokens import TokenBuffer, Turn, approximate_tokens


class State(StrEnum):
    """The states of a conversation. States that a configuration does not need are skipped."""

    START = "START"
    TEACHER_TURN = "TEACHER_TURN"
    SUPERVISOR_TURN = "SUPERVISOR_TURN"
    STUDENT_TURN = "STUDENT_TURN"
    JUDGE_TURN = "JUDGE_TURN"
    POST_TEST = "POST_TEST"
    GENERATE_SOLUTION = "GENERATE_SOLUTION"
    REWARD_TURN = "REWARD_TURN"
    END = "END"


@dataclass(frozen=True)
class ClassroomRules:
    """The limits and judging rules of all conversations of a run; meanings as in `config.base.GenerationConfig`.

    Attributes:
        max_tokens_in_conversation: the limit of the teacher's context, in tokens.
        judge_rules: the rule names; () for no judging.
        solutions: the number of solutions that the student writes after the dialogue; 0 for none.
        post_test: whose answers to the post-test count in the reward, one of `POST_TEST_STUDENTS`; "" for no post-test.
        ledger_caps_pedagogical: whether the pedagogical reward is at most the share of items that were not given away.
        level: how the turn reward `level` measures.
    """

    max_turns: int = 15
    max_tokens_in_conversation: int = 8192
    max_tokens_per_turn: int = 1024
    judge_rules: tuple[str, ...] = ()
    solutions: int = 0
    ignore_rejected_judge: bool = False
    extra_penalty_for_rejected_judges: float = 0.25
    low_score_threshold: float = 0.3
    use_thinking: bool = False
    post_test: str = field(default="", repr=False)  # not in repr: the identity gets it from the configuration
    ledger_caps_pedagogical: bool = field(default=False, repr=False)
    level: LevelRules = field(default=LevelRules(), repr=False)


@dataclass(frozen=True)
class Solution:
    """A solution that the student wrote after the dialogue, and its grade: 1 or 0 for a boxed answer, unbounded from a
    reward model (None: not graded yet)."""

    text: str
    grade: float | None = None


class InvalidTransition(ValueError):
    """The conversation's state does not allow the operation."""


@dataclass
class Conversation:
    """One conversation on one problem: its turns, its tokens as the teacher saw them, and how it was judged.

    Attributes:
        buffer: the context of the model under training as tokens, in most trainings the teacher's; None before it is
            open, and if that model works on text.
        prompt_estimate: the approximate token count of the first prompt, for a teacher that works on text.
        failure: why the conversation could not go on; it then gets no reward.
        overflow: which model's context was full, if that ended the dialogue or the conversation.
        supervised: whether a supervisor reviews each message of the teacher before it enters the conversation.
        drafts: the drafts of the teacher's current message, if supervised.
    """

    id: str
    problem: Problem
    setup: Setup
    rules: ClassroomRules
    turns: list[Turn] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    solutions: list[Solution] = field(default_factory=list)
    post_test: PostTest | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    buffer: TokenBuffer | None = None
    prompt_estimate: int | None = None
    failure: str | None = None
    overflow: str | None = None
    supervised: bool = False
    drafts: list[SampledDraft] = field(default_factory=list)
    state: State = State.START

    @property
    def finished(self) -> bool:
        """Whether the conversation has ended."""
        return self.state is State.END

    @property
    def answers(self) -> int:
        """The number of model answers so far: turns, rejected drafts and solutions."""
        drafts = len(self.drafts) + sum(len(turn.drafts) for turn in self.turns)
        return len(self.turns) + drafts + len(self.solutions)

    def start(self, opening: Sequence[Turn] = ()) -> None:
        """Leave START for the first state of this conversation's type.

        Args:
            opening: the messages with which the teacher's prompt template begins; the student answers them first.
        """
        self._expect(State.START)
        self.turns = list(opening)
        self._advance()

    def open_buffer(self, prompt_ids: Sequence[int]) -> None:
        """Open the teacher's context with its first prompt: once, before its first turn."""
        self._expect(State.TEACHER_TURN)
        if self.buffer is not None:
            raise InvalidTransition(f"{self.id}: the teacher's context is open already")
        self.buffer = TokenBuffer(prompt_ids)

    def open_estimated(self, prompt_tokens: int) -> None:
        """Record the approximate token count of the first prompt, for a teacher without token ids."""
        self._expect(State.TEACHER_TURN)
        self.prompt_estimate = prompt_tokens

    def cut_short(self, reason: str) -> None:
        """Record that the student's context is full. The dialogue ends with the teacher's last message, and is judged
        and rewarded as it is."""
        self._expect(State.STUDENT_TURN)
        self.overflow = reason
        self._advance()

    def give_up(
        self, reason: str, prompt_ids: Sequence[int] = (), end_ids: Sequence[int] = (), overflow: bool = False
    ) -> None:
        """Record that the conversation cannot go on: it is neither judged nor rewarded.

        Args:
            prompt_ids, end_ids: the teacher's context, for a conversation that failed before its context was open:
                trainers need tokens of every conversation. None of these tokens were sampled.
            overflow: whether a full context is the reason.
        """
        self.failure = reason
        self.overflow = reason if overflow else None
        if prompt_ids:
            self.buffer = TokenBuffer(prompt_ids)
            self.buffer.append_given(end_ids)
        self.state = State.REWARD_TURN

    def add_draft(self, draft: SampledDraft) -> None:
        """Record a draft of a supervised teacher, to be reviewed."""
        self._expect(State.TEACHER_TURN)
        if not self.supervised:
            raise InvalidTransition(f"{self.id}: a draft came in a conversation without a supervisor")
        self.drafts.append(draft)
        self._advance()

    def reject_draft(self, review: Review) -> None:
        """Record that the teacher has to retry. A rejected draft never ends the dialogue, whatever it contains."""
        self._expect(State.SUPERVISOR_TURN)
        self.drafts[-1] = replace(self.drafts[-1], review=review)
        self._advance()

    def add_teacher_turn(self, turn: Turn) -> None:
        """Record a teacher turn whose tokens are already in the buffer; if supervised, after its review."""
        self._expect(State.SUPERVISOR_TURN if self.supervised else State.TEACHER_TURN)
        if turn.role != "teacher":
            raise InvalidTransition(f"{self.id}: a turn of the {turn.role} came in {self.state}")
        self.turns.append(turn)
        self.drafts.clear()
        self._advance()

    def add_student_turn(self, turn: Turn, framed_ids: Sequence[int] = ()) -> None:
        """Record a student turn.

        Args:
            framed_ids: the tokens that the turn adds to the teacher's context, with the chat template around it; empty
                for an opening attempt, which is part of the teacher's first prompt.
        """
        self._expect(State.STUDENT_TURN)
        if turn.role != "student":
            raise InvalidTransition(f"{self.id}: a turn of the {turn.role} came in {self.state}")
        self.turns.append(turn)
        if self.buffer is not None:
            self.buffer.append_given(framed_ids)
        self._advance()

    def add_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Record the verdicts of all judge attempts, failed ones included."""
        self._expect(State.JUDGE_TURN)
        self.verdicts = list(verdicts)
        self._advance()

    def add_post_test(self, post_test: PostTest) -> None:
        """Record the post-test."""
        self._expect(State.POST_TEST)
        self.post_test = post_test
        self._advance()

    def add_solutions(self, solutions: Sequence[Solution]) -> None:
        """Record the graded solutions."""
        self._expect(State.GENERATE_SOLUTION)
        if len(solutions) != self.rules.solutions:
            raise InvalidTransition(f"{self.id}: {len(solutions)} solutions came, {self.rules.solutions} were due")
        self.solutions = list(solutions)
        self._advance()

    def add_rewards(self, rewards: dict[str, float | None]) -> None:
        """Record the rewards and end the conversation."""
        self._expect(State.REWARD_TURN)
        self.rewards = dict(rewards)
        self._advance()

    # Derived values ----------------------------------------------------------------------------------------------

    @property
    def teacher_turns(self) -> list[Turn]:
        """The teacher's turns, without those from its prompt template."""
        return [turn for turn in self.turns if turn.role == "teacher" and not turn.given]

    @property
    def next_is_opening_attempt(self) -> bool:
        """True if the next turn is the student's attempt at the problem, before any teaching."""
        return self.state is State.STUDENT_TURN and not self.turns

    @property
    def next_persona(self) -> str:
        """The persona drawn for the student's next turn.

        Raises:
            InvalidTransition: for the opening attempt, which has none.
        """
        if self.next_is_opening_attempt:
            raise InvalidTransition(f"{self.id}: the opening attempt has no persona")
        # Opening attempts have no persona, so this counts the student's later turns.
        return self.setup.personas[sum(turn.persona is not None for turn in self.turns)]

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit into the teacher's context; approximate for a teacher that works on text."""
        is_estimated = self.buffer is None or self.prompt_estimate is not None  # the buffer may be the student's
        used = self._estimated_tokens() if is_estimated else len(self.buffer)
        return self.rules.max_tokens_in_conversation - used

    def _estimated_tokens(self) -> int:
        if self.prompt_estimate is None:
            return 0
        # The turns before the teacher's first sampled one are part of the prompt, and counted in its estimate.
        later_turns = dropwhile(lambda turn: turn.role == "student" or turn.given, self.turns)
        return self.prompt_estimate + sum(approximate_tokens(turn.text) for turn in later_turns)

    @property
    def teacher_turn_limit(self) -> int:
        """The most tokens of the teacher's next turn. One token is reserved for an end-of-turn token it may omit."""
        return self.turn_limit_after(0)

    def turn_limit_after(self, hint_tokens: int) -> int:
        """The most tokens of the teacher's next turn after a hint of `hint_tokens` tokens that only this turn sees."""
        return min(self.rules.max_tokens_per_turn, self.tokens_left - hint_tokens - 1)

    def transcript(self) -> list[dict[str, str]]:
        """The messages as the judge sees them: {"role": "teacher" | "student", "content": visible text}."""
        return visible_messages(self.turns)

    @property
    def facts(self) -> ConversationFacts:
        """What an embedded judge gets in addition to the transcript."""
        personas = tuple(turn.persona for turn in self.turns)
        return ConversationFacts(personas, self.rules.max_turns, self.problem.answer)

    @property
    def judgement(self) -> Judgement | None:
        """The summary of the verdicts; None before judging, without judge rules, and if a rule has no valid verdict."""
        return sum_up(self.verdicts, self.rules.judge_rules) if self.rules.judge_rules else None

    @property
    def lacks_verdict(self) -> bool:
        """True if the conversation failed, or should have a judgement and has none. It then gets no reward."""
        return self.failure is not None or bool(self.rules.judge_rules) and self.judgement is None

    @property
    def rejected(self) -> bool:
        """True if a decision rule rejected the conversation, the judge refused its content, or its scores are below
        the low-score threshold."""
        judgement = self.judgement
        if judgement is None:
            return False
        has_low_score = judgement.scores is not None and judgement.scores.final_reward < self.rules.low_score_threshold
        return has_low_score or bool(judgement.rejecting_rules or judgement.refusing_rules)

    # Transitions -------------------------------------------------------------------------------------------------

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise InvalidTransition(f"{self.id}: this belongs to {state}, but the conversation is in {self.state}")

    def _advance(self) -> None:
        self.state = next(target for condition, target in TRANSITIONS[self.state] if condition(self))


def _always(_: Conversation) -> bool:
    return True


def _student_opens(conversation: Conversation) -> bool:
    return conversation.setup.type is ConversationType.ATTEMPTED or bool(conversation.turns)


def _is_drafted(conversation: Conversation) -> bool:
    return bool(conversation.drafts)


def _dialogue_goes_on(conversation: Conversation) -> bool:
    """Whether the dialogue continues after a teacher turn: no goodbye, turn limit not reached, room in the context."""
    said_goodbye = END_OF_CONVERSATION in visible_text(conversation.turns[-1].text)
    return not said_goodbye and len(conversation.turns) < conversation.rules.max_turns and _has_room(conversation)


def _has_room(conversation: Conversation) -> bool:
    return conversation.overflow is None and conversation.teacher_turn_limit >= 1


def _is_judged(conversation: Conversation) -> bool:
    return bool(conversation.rules.judge_rules)


def _needs_solutions(conversation: Conversation) -> bool:
    return conversation.rules.solutions > 0 and _reward_depends_on_student(conversation)


def _needs_post_test(conversation: Conversation) -> bool:
    return bool(conversation.rules.post_test) and _reward_depends_on_student(conversation)


def _reward_depends_on_student(conversation: Conversation) -> bool:
    """Whether the student's post-test or solutions can change a reward. They cannot without a verdict, or if the
    conversation was rejected in hard mode."""
    if conversation.lacks_verdict:
        return False
    return conversation.rules.ignore_rejected_judge or not conversation.rejected


_Condition = Callable[[Conversation], bool]
_AFTER_DIALOGUE: tuple[tuple[_Condition, State], ...] = (
    (_is_judged, State.JUDGE_TURN),
    (_needs_post_test, State.POST_TEST),
    (_needs_solutions, State.GENERATE_SOLUTION),
    (_always, State.REWARD_TURN),
)
TRANSITIONS: dict[State, tuple[tuple[_Condition, State], ...]] = {
    State.START: ((_student_opens, State.STUDENT_TURN), (_always, State.TEACHER_TURN)),
    State.TEACHER_TURN: (
        (_is_drafted, State.SUPERVISOR_TURN),
        (_dialogue_goes_on, State.STUDENT_TURN),
        *_AFTER_DIALOGUE,
    ),
    State.SUPERVISOR_TURN: (
        (_is_drafted, State.TEACHER_TURN),  # the draft was rejected: an accepted message clears the drafts
        (_dialogue_goes_on, State.STUDENT_TURN),
        *_AFTER_DIALOGUE,
    ),
    State.STUDENT_TURN: ((_has_room, State.TEACHER_TURN), *_AFTER_DIALOGUE),
    State.JUDGE_TURN: _AFTER_DIALOGUE[1:],
    State.POST_TEST: _AFTER_DIALOGUE[2:],
    State.GENERATE_SOLUTION: _AFTER_DIALOGUE[3:],
    State.REWARD_TURN: ((_always, State.END),),
}
"""The transitions from each state, in order: the first one whose condition holds is taken."""
