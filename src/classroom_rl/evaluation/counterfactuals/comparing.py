"""Compares the tutor's messages with alternatives: finds an alternative with another price, plays both branches, and
measures the outcome of each on the messages that follow.

A price is given to a single message by what came before it. The outcome is computed by the ledger of the post-test
(docs/trusting_rewards.md) from the student's own later messages, never by the judge or the supervisor that set the
price. A `LaterOutcome` is created from the messages before the fork and gets those after the forked one: it never sees
the forked message itself.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from classroom_rl.config.evaluation import EvalConfig, reward_weights
from classroom_rl.config.values import GROUP, SCORING_RULES
from classroom_rl.environments.classroom.config import classroom_rules
from classroom_rl.environments.classroom.conversation import State
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.errors import DataError
from classroom_rl.evaluation.counterfactuals.forks import BranchPlayer, Fork, Message, all_forks, corrected
from classroom_rl.evaluation.progress import EvaluationProgress, gather_or_stop
from classroom_rl.judges.post_test.exams import Exam, exam_of
from classroom_rl.judges.post_test.records import MISSED
from classroom_rl.judges.verdicts import ask_for_verdict, criterion_of, sum_up
from classroom_rl.rollout.engine import NO_FACTS, ConversationFacts
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import MessageToReview, Review, reviewed
from classroom_rl.rollout.scheduler import Schedule
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.thoughts import visible_messages, visible_text
from classroom_rl.rollout.tokens import Turn

SUPERVISOR, JUDGE = "supervisor", "judge"


async def review_of_message(
    roles: Roles, fork: Fork, turn: Turn, penalties: Mapping[str, float], max_turns: int
) -> Review:
    """The supervisor's priced review of a message at the fork. `max_turns` is the number of messages after which the
    teacher ends the conversation."""
    message = MessageToReview(
        visible_messages(fork.before),
        visible_text(turn.text),
        fork.problem.text,
        fork.problem.answer,
        ConversationFacts(tuple(earlier_turn.persona for earlier_turn in fork.before), max_turns),
        cut=not turn.ended,
    )
    return await reviewed(roles.supervisor, message, penalties)


async def judge_scores(roles: Roles, fork: Fork, turn: Turn, rule: str, attempts: int) -> dict[str, float] | None:
    """The judge's scores of the conversation up to and including a message, as if it ended there: the reward under
    `judge`, and each criterion as a share of its maximum. None without a verdict.

    Two messages at one fork have the same context, so their scores differ because of the messages alone. The judge is
    not told how long the lesson could have been: it would penalise the missing rest.
    """
    conversation_and_problem = (visible_messages([*fork.before, turn]), fork.problem.text)
    requests = (
        ask_for_verdict(roles.judge, rule, attempt, conversation_and_problem, NO_FACTS) for attempt in range(attempts)
    )
    judgement = sum_up(await asyncio.gather(*requests), (rule,))
    if judgement is None or judgement.scores is None:
        return None
    shares = {name: value / criterion_of(name).top for name, value in judgement.scores.values.items()}
    return {JUDGE: judgement.scores.final_reward, **shares}


PRODUCED, LEARNED = "produced", "learned"
OUTCOMES = {
    PRODUCED: "new items that the student produces later, as a share of the lesson's items",
    LEARNED: "those of them that it got wrong at its first try",
}


class LaterOutcome:
    """Measures the outcome of a lesson after one fork, by the post-test on its problem and the messages `before` the
    forked one; the same object measures both branches."""

    def __init__(self, exam: Exam, before: Sequence[Turn]):
        self._exam = exam
        self._before = tuple(before)
        self._settled = {index for index, item in enumerate(exam.ledger(before)) if item.outcome != MISSED}

    def of(self, later: Sequence[Turn]) -> dict[str, float]:
        """Each of `OUTCOMES`, in [0, 1]. `later` is the messages after the forked one."""
        ledger = self._exam.ledger([*self._before, *later])
        newly_known = [item for index, item in enumerate(ledger) if item.known and index not in self._settled]
        count = max(1, len(ledger))
        return {
            PRODUCED: len(newly_known) / count,
            LEARNED: sum(item.knew is False for item in newly_known) / count,
        }


def later_messages(record: ConversationRecord, fork: Fork) -> Sequence[Turn]:
    """The messages of a playout after the forked one."""
    return record.turns[fork.position + 1 :]


# Comparisons -------------------------------------------------------------------------------------------------------


CORRECTION, SIBLING = "correction", "sibling"
JOURNAL_FOLDER = "counterfactuals"
"""The subfolder of the evaluation's folder for the playouts' journal."""
BRANCHES_IN_FLIGHT = 16
_SMALLEST_DIFFERENCE = 1e-9
"""Prices that differ by less are equal up to rounding."""


@dataclass(frozen=True)
class Comparison:
    """A message of the tutor compared with an alternative at the same position.

    Attributes:
        lesson, conversation, place: the problem's id, the played conversation's id, the message's position in it.
        kind: whether the alternative is the supervisor's `correction` or a `sibling` that the tutor sampled.
        category: the supervisor's category of error for the worse of the two.
        said, other: the text of the message and of the alternative.
        price_said, price_other: source → the price of each message by itself. Sources are the supervisor (its penalty)
            and, if there is a judge that scores, the judge's scores. Higher is better.
        outcome_said, outcome_other: outcome → its value in each playout; playouts i of both used the same seeds.
    """

    lesson: str
    conversation: str
    place: int
    kind: str
    category: str
    said: str
    other: str
    price_said: dict[str, float]
    price_other: dict[str, float]
    outcome_said: dict[str, list[float]]
    outcome_other: dict[str, list[float]]


@dataclass(frozen=True)
class Compared:
    """All comparisons, and how many messages could not be compared.

    Attributes:
        unpriced: messages without a verdict of the supervisor.
        without_other: messages without a correction or a sampled alternative of another price.
        lost: pairs of playouts of which at least one failed.
    """

    comparisons: list[Comparison]
    unpriced: int = 0
    without_other: int = 0
    lost: int = 0


@dataclass(frozen=True)
class _Pair:
    """A fork with the alternative to its message, and the supervisor's reviews of both."""

    fork: Fork
    kind: str
    other: Message
    review_said: Review
    review_other: Review


def check_outcomes(config: EvalConfig, problems: Sequence[Problem]) -> None:
    """Refuse problems for which no program can determine what the student produces. Raises `DataError`, naming the
    problem."""
    for problem in problems:
        try:
            exam_of(problem, config.generation.post_test.siblings)
        except DataError as error:
            raise DataError(
                f"counterfactuals.forks is {config.counterfactuals.forks}, so what the student produces later is read "
                f"with the ledger of a post-test, but the problem {problem.text[:80]!r} has none: it needs phrases of "
                "a lesson plan, or an answer and a column sibling_problems_column. Or set counterfactuals.forks=0."
            ) from error


async def compare_messages(
    config: EvalConfig,
    roles: Roles,
    schedule: Schedule,
    played: Journal,
    records: Sequence[ConversationRecord],
    problems: Sequence[Problem],
    folder: Path,
) -> Compared:
    """Compare up to `counterfactuals.forks` messages of the conversations in `records`, which the journal `played`
    holds, with alternatives. Raises `EngineFailure` or `ProviderFailure` if a model cannot be asked any more."""
    count, max_turns = config.counterfactuals.forks, config.generation.max_turns
    forks = all_forks(records, problems, played.events, max_turns, config.seed)
    with closing(Journal(folder / JOURNAL_FOLDER)) as journal:
        comparer = _Comparer(config, roles, schedule, journal)
        pairs: list[_Pair] = []
        # Not every fork has an alternative: take further batches of forks until there are enough pairs.
        for start in range(0, len(forks), count):
            batch = await gather_or_stop(map(comparer.pair, forks[start : start + count]))
            pairs += [pair for pair in batch if pair is not None]
            if len(pairs) >= count:
                break
        pairs = pairs[:count]
        with EvaluationProgress(len(pairs), "comparing messages", "forks") as progress:
            results = await gather_or_stop(comparer.compare(pair, progress) for pair in pairs)
    comparisons = [comparison for comparison in results if comparison is not None]
    return Compared(comparisons, comparer.unpriced, comparer.without_other, comparer.lost)


class _Comparer:
    """Compares the messages of one evaluation. `unpriced`, `without_other` and `lost` are as in `Compared`."""

    def __init__(self, config: EvalConfig, roles: Roles, schedule: Schedule, journal: Journal):
        generation, teacher = config.generation, config.teacher_model
        context = generation.max_tokens_in_conversation if teacher.is_remote else teacher.vllm.max_length
        rules = classroom_rules(generation, reward_weights(config), context, graded=False)
        self.unpriced = self.without_other = self.lost = 0
        self._config, self._roles, self._schedule = config, roles, schedule
        self._player = BranchPlayer(generation, rules, roles, schedule, journal, config.seed)
        self._slots = asyncio.Semaphore(BRANCHES_IN_FLIGHT)
        scoring = [rule for rule in generation.judge_rules if rule in SCORING_RULES]
        has_judge = roles.judge is not None and config.judge_model.mode != GROUP
        self._rule = scoring[0] if scoring and has_judge else None

    async def pair(self, fork: Fork) -> _Pair | None:
        """The fork with the alternative to compare with: the supervisor's correction if there is one, else the sampled
        message whose price differs most from that of the fork's message. None if there is neither."""
        async with self._slots:
            review = await self._review(fork, fork.message)
            if review.penalty is None:
                self.unpriced += 1
                return None
            correction = corrected(fork, review, self._roles.teacher, self._roles.teacher_has_tokens)
            if correction is not None:
                reviewed = await self._review(fork, correction)
                if _differ(review, reviewed):
                    return _Pair(fork, CORRECTION, correction, review, reviewed)
            siblings = await self._player.siblings(fork, self._config.counterfactuals.siblings)
            reviews = [await self._review(fork, sibling) for sibling in siblings]
        priced = [pair for pair in zip(siblings, reviews, strict=True) if _differ(review, pair[1])]
        if not priced:
            self.without_other += 1
            return None
        sibling, reviewed = max(priced, key=lambda pair: _distance(review, pair[1]))
        return _Pair(fork, SIBLING, sibling, review, reviewed)

    async def compare(self, pair: _Pair, progress: EvaluationProgress) -> Comparison | None:
        """The comparison; None if every pair of playouts failed."""
        fork, siblings = pair.fork, self._config.generation.post_test.siblings
        outcome = LaterOutcome(exam_of(fork.problem, siblings), fork.before)
        messages = (fork.message, pair.other)
        prices = [await self._prices(fork, message) for message in messages]
        count = self._config.counterfactuals.playouts
        async with self._slots:
            branches = [await self._player.playouts(fork, message, count) for message in messages]
        progress.add(1)
        complete = [records for records in zip(*branches, strict=True) if not any(record.failure for record in records)]
        self.lost += count - len(complete)
        if not complete:
            return None
        values = [[outcome.of(later_messages(record, fork)) for record in side] for side in zip(*complete, strict=True)]
        outcome_said, outcome_other = (
            {name: [outcomes[name] for outcomes in side] for name in OUTCOMES} for side in values
        )
        worse = min(pair.review_said, pair.review_other, key=lambda review: review.penalty)
        return Comparison(
            fork.problem.id,
            fork.conversation,
            fork.position,
            pair.kind,
            worse.category,
            *(visible_text(message.turn.text) for message in messages),
            {SUPERVISOR: pair.review_said.penalty} | prices[0],
            {SUPERVISOR: pair.review_other.penalty} | prices[1],
            outcome_said,
            outcome_other,
        )

    async def _review(self, fork: Fork, message: Message) -> Review:
        penalties, max_turns = self._config.generation.supervisor.penalties, self._config.generation.max_turns
        with self._schedule.register(1) as registration:
            await registration.wait_for_phase(State.SUPERVISOR_TURN)  # a supervisor on an engine is awake only then
            return await review_of_message(self._roles, fork, message.turn, penalties, max_turns)

    async def _prices(self, fork: Fork, message: Message) -> dict[str, float]:
        """The judge's scores of a message; {} without a judge that scores, or without a verdict."""
        if self._rule is None:
            return {}
        attempts = self._config.generation.number_judge_attempts
        with self._schedule.register(1) as registration:
            await registration.wait_for_phase(State.JUDGE_TURN)  # a judge on an engine is awake only then
            return await judge_scores(self._roles, fork, message.turn, self._rule, attempts) or {}


def _distance(review: Review, other: Review) -> tuple[float, float]:
    """The distance between the prices of an alternative and of the message. At equal distance the alternative with the
    lower price wins."""
    return abs(other.penalty - review.penalty), -other.penalty


def _differ(review: Review, other: Review) -> bool:
    return other.penalty is not None and abs(other.penalty - review.penalty) > _SMALLEST_DIFFERENCE
