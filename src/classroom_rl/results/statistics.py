"""Statistics of finished conversations, and paired comparisons of tutors on the same lessons. Pure functions; an empty
denominator gives None.

Whether a turn has an error is decided by its text, not by the persona: a small model that plays `error_student`
sometimes writes a correct sentence, and a tutor that hints at an error there is wrong. The persona is recorded as well,
so that reports can show how faithfully the student played it.

Comparisons are per lesson: a lesson's values are averaged first, then the differences of the averages are taken.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Optional

from classroom_rl.config.values import SCORING_RULES
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.grammar import Slip, find_slips
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.errors import DataError
from classroom_rl.judges.toy_judge import analyse
from classroom_rl.judges.verdicts import Judgement, sum_up
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.rollout.intervals import (
    LEAST_LESSONS,
    LEVEL,
    Estimate,
    mean_with_ci,
    share,
    sign_flip_p,
    within_unit,
)
from classroom_rl.rollout.thoughts import visible_messages, visible_text


@dataclass(frozen=True)
class Exchange:
    """A student message and the teacher's reply to it.

    Attributes:
        student_turn, teacher_turn: positions of the two messages in the conversation, from 0.
        persona: the persona that was drawn for the student's message; None for an opening attempt.
        errors: the slips in the student's text, in the order of `find_slips`; () without any.
        scaffolded: whether the reply hints at the right kind of error and lets the student correct it.
        corrected: whether the reply treats a message without an error as if it had one.
        comment: the toy judge's comment on the reply, in a few words.
    """

    student_turn: int
    teacher_turn: int
    persona: Optional[str]
    errors: tuple[Slip, ...]
    scaffolded: bool
    corrected: bool
    comment: str


def read_exchanges(record: ConversationRecord) -> Optional[list[Exchange]]:
    """Return the exchanges of a conversation in order. A student message without a reply gives no exchange.

    None if the problem is not a lesson of the quickstart, because the rules find errors only in its toy language."""
    try:
        parse_problem(record.problem)
    except DataError:
        return None
    transcript = visible_messages(record.turns)
    exchanges = []
    for finding in analyse(transcript, record.problem):
        if finding.replies_to is None:
            continue
        exchanges.append(
            Exchange(
                student_turn=finding.replies_to,
                teacher_turn=finding.index,
                persona=record.turns[finding.replies_to].persona,
                errors=tuple(find_slips(transcript[finding.replies_to]["content"])),
                scaffolded=finding.scaffolded,
                corrected=finding.falsely_corrected,
                comment=finding.forward_reason,
            )
        )
    return exchanges


@dataclass(frozen=True)
class Difference:
    """The difference `tutor` minus `against` in one figure.

    Attributes:
        mean: the mean of the lessons' differences; None if no lesson has values of both tutors.
        ci95: its 95 % interval over lessons (`classroom_rl.rollout.intervals`); None for fewer than six lessons.
        p: the p-value of the sign-flip test; None if `mean` is None.
        p_holm: p after Holm's correction for all pairs of tutors that are compared in this figure.
        lessons: the number of lessons with values of both tutors.
    """

    tutor: str
    against: str
    mean: Optional[float]
    ci95: Optional[list[float]]
    p: Optional[float]
    p_holm: Optional[float]
    lessons: int


def holm(values: Sequence[Optional[float]]) -> list[Optional[float]]:
    """Apply Holm's step-down correction (1979): multiply the smallest of m p-values by m, the next by m − 1, and so on.
    A corrected value is never below the one before it and never above 1. None stays None and does not count towards
    m."""
    ranked = sorted((p, index) for index, p in enumerate(values) if p is not None)
    corrected: list[Optional[float]] = [None] * len(values)
    lower_bound = 0.0
    for rank, (p, index) in enumerate(ranked):
        lower_bound = max(lower_bound, min(1.0, p * (len(ranked) - rank)))
        corrected[index] = lower_bound
    return corrected


def differences(by_tutor: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Difference]:
    """Compute the difference of each pair of tutors, the later one minus the earlier one, in a figure: tutor → lesson →
    its values."""
    names = list(by_tutor)
    pairs = [(tutor, against) for index, against in enumerate(names) for tutor in names[index + 1 :]]
    estimates = [paired_change(by_tutor[against], by_tutor[tutor]) for tutor, against in pairs]
    return [
        Difference(tutor, against, estimate["mean"], estimate["ci95"], estimate["p"], p_holm, estimate["n"])
        for (tutor, against), estimate, p_holm in zip(
            pairs, estimates, holm([estimate["p"] for estimate in estimates]), strict=True
        )
    ]


def paired_change(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Estimate:
    """Compute the mean change of the lessons' means, over the lessons that have values on both sides. `n` counts
    lessons, and `p` is that of a sign-flip test."""
    common = [lesson for lesson, group in before.items() if group and after.get(lesson)]
    changes = {lesson: [fmean(after[lesson]) - fmean(before[lesson])] for lesson in common}
    # a change of values in [0, 1] lies in [-1, 1], which bounds the interval
    bounds = (-1.0, 1.0) if within_unit(before) and within_unit(after) else None
    return {**mean_with_ci(changes, bounds), "p": sign_flip_p([value for (value,) in changes.values()])}


def is_clear(change: Mapping[str, Any]) -> bool:
    """Whether a change of `paired_change` is more than chance: 0 is outside its interval, and p is below `LEVEL`."""
    interval, p = change["ci95"], change.get("p")
    if interval is None or p is None or change["n"] < LEAST_LESSONS:
        return False
    return p < LEVEL and not interval[0] <= 0 <= interval[1]


def rewards_by_lesson(records: Sequence[ConversationRecord]) -> dict[str, list[float]]:
    """Return lesson → the rewards of its conversations. Conversations without a verdict have no reward."""
    return {
        problem: [record.reward for record in group if record.reward is not None]
        for problem, group in group_by_problem(records).items()
    }


ByLesson = dict[str, dict[str, list[float]]]
"""Figure → lesson (or problem) → one value for each conversation or message that has it."""


def outcomes_by_lesson(records: Sequence[ConversationRecord]) -> ByLesson:
    """The outcomes that stand behind the reward: `rewards/NAME`, each of the rewards in its sum if there are several;
    and `rejected_by/RULE` for each judge rule that accepts or rejects, 1 for a conversation that at least one of its
    attempts rejected. Conversations without a verdict are left out."""
    figures: ByLesson = {}
    for record in (record for record in records if not lacks_verdict(record)):
        rewards = record.rewards or {}
        values = {f"rewards/{name}": value for name, value in rewards.items() if len(rewards) > 1}
        judgement = judgement_of(record)
        rules = sorted({verdict.rule for verdict in record.verdicts} - SCORING_RULES)
        for rule in rules if judgement is not None else ():
            values[f"rejected_by/{rule}"] = rule in judgement.rejecting_rules
        for key, value in values.items():
            if value is not None:
                figures.setdefault(key, {}).setdefault(record.problem_id, []).append(float(value))
    return figures


def estimates(figures: ByLesson) -> dict[str, dict[str, Estimate]]:
    """Group → figure → the mean with its interval, of figures that are named `group/figure`."""
    groups: dict[str, dict[str, Estimate]] = {}
    for key, values in figures.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = mean_with_ci(values)
    return groups


def judgement_of(record: ConversationRecord) -> Optional[Judgement]:
    """Return the judgement of a conversation; None if a rule has no valid verdict, or there are no verdicts."""
    rules = dict.fromkeys(verdict.rule for verdict in record.verdicts)
    return sum_up(record.verdicts, rules) if rules else None


def lacks_verdict(record: ConversationRecord) -> bool:
    """Whether the conversation has no reward, although it should have been judged or rewarded."""
    return record.reward is None


def counted_share(hits: Iterable[Optional[bool]]) -> dict[str, Any]:
    """{"share", "n"}: the share of True, and the number of values. None is left out."""
    hit_share, n = share(hit for hit in hits if hit is not None)
    return {"share": hit_share, "n": n}


def summarise(records: Sequence[ConversationRecord]) -> dict[str, Any]:
    """Compute the part of metrics.json on one kind of sampling that all kinds of conversations have. Reactions to
    errors (`react`) are those in the quickstart's lessons."""
    exchanges_by_record = [exchanges for exchanges in map(read_exchanges, records) if exchanges is not None]
    exchanges = [exchange for group in exchanges_by_record for exchange in group]
    return {
        "reward": mean_with_ci(rewards_by_lesson(records)),
        "conversations": len(records),
        "lessons": len(group_by_problem(records)),
        "scores": mean_scores(records),
        "rejected": counted_share(record.rejected for record in records if not lacks_verdict(record)),
        "without_verdict": counted_share(map(lacks_verdict, records)),
        **estimates(outcomes_by_lesson(records)),
        "talk": talk(records),
        **(react(exchanges) if exchanges_by_record else {}),
    }


def mean_scores(records: Sequence[ConversationRecord]) -> Optional[dict[str, float]]:
    """Compute each criterion's mean, on its own scale, over the conversations with scores; None if there are none."""
    judgements = [judgement for judgement in map(judgement_of, records) if judgement is not None]
    scores = [judgement.scores.values for judgement in judgements if judgement.scores is not None]
    if not scores:
        return None
    return {name: fmean(score[name] for score in scores) for name in scores[0]}


def talk(records: Sequence[ConversationRecord]) -> dict[str, Optional[float]]:
    """Measure how much is said: mean messages per conversation, mean words per message of teacher and student (split at
    white space, without thoughts), and the teacher's share of all words."""
    words: dict[str, list[int]] = {"teacher": [], "student": []}
    for record in records:
        for turn in record.turns:
            words[turn.role].append(len(visible_text(turn.text).split()))
    total = sum(words["teacher"]) + sum(words["student"])
    return {
        "messages": _mean(len(record.turns) for record in records),
        "teacher_words": _mean(words["teacher"]),
        "student_words": _mean(words["student"]),
        "teacher_share": sum(words["teacher"]) / total if total else None,
    }


def _mean(values: Iterable[float]) -> Optional[float]:
    values = list(values)
    return fmean(values) if values else None


def react(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Measure how the teacher reacted to turns with and without errors, and how often each persona made errors.

    `error_turns.scaffolded`: the share of turns with an error that were answered with the right hint.
    `clean_turns.falsely_corrected`: the share of turns without an error that were treated as if they had one.
    `personas[name].with_error`: the share of a persona's turns that have an error.
    """
    scaffolded, errors = share(exchange.scaffolded for exchange in exchanges if exchange.errors)
    corrected, clean = share(exchange.corrected for exchange in exchanges if not exchange.errors)
    personas = {}
    for persona in sorted({exchange.persona for exchange in exchanges if exchange.persona is not None}):
        with_error, turns = share(bool(exchange.errors) for exchange in exchanges if exchange.persona == persona)
        personas[persona] = {"with_error": with_error, "n": turns}
    return {
        "error_turns": {"scaffolded": scaffolded, "n": errors},
        "clean_turns": {"falsely_corrected": corrected, "n": clean},
        "personas": personas,
    }
