"""Statistics of finished conversations. Pure functions; an empty denominator gives None, never NaN.

Conversations on one lesson resemble each other, so intervals are bootstrapped over lessons, not over conversations
or turns: each resample draws as many lessons as there are, with replacement, and takes all conversations of each.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from statistics import fmean
from typing import Any, Optional

import numpy as np

from src.classroom.record import ConversationRecord
from src.classroom.verdicts import Judgement, Scores, sum_up
from src.results.evaluation_files import group_by_problem
from src.rollout.thoughts import visible_text
from src.toy_language.turn_pairs import Exchange

RESAMPLES = 10_000
BOOTSTRAP_SEED = 0
_Z_95 = 1.959963984540054
Estimate = dict[str, Any]
"""{"mean": float or None, "ci95": [low, high] or None, "n": int}"""


def mean_with_ci(values: Mapping[str, Sequence[float]], resamples: int = RESAMPLES) -> Estimate:
    """Mean over all values with its 95 % interval, the 2.5th to 97.5th percentile of a seeded bootstrap over lessons.

    Args:
        values: the values of each lesson; lessons without a value are left out.

    Returns:
        {"mean", "ci95", "n"}; n counts values. The interval is None for fewer than two lessons.
    """
    lessons = [list(group) for group in values.values() if group]
    sums = np.array([sum(group) for group in lessons], dtype=float)
    counts = np.array([len(group) for group in lessons], dtype=float)
    if not lessons:
        return {"mean": None, "ci95": None, "n": 0}
    return {
        "mean": float(sums.sum() / counts.sum()),
        "ci95": _interval(sums, counts, resamples),
        "n": int(counts.sum()),
    }


def _interval(sums: np.ndarray, counts: np.ndarray, resamples: int) -> Optional[list[float]]:
    lessons = len(sums)
    if lessons < 2:
        return None
    drawn = _draws(lessons, resamples)
    means = (drawn @ sums) / (drawn @ counts)
    low, high = np.percentile(means, [2.5, 97.5])
    return [float(low), float(high)]


@lru_cache(maxsize=4)
def _draws(lessons: int, resamples: int) -> np.ndarray:
    """How often each lesson is drawn, by resample; the same for all figures on this number of lessons."""
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    return generator.multinomial(lessons, np.full(lessons, 1 / lessons), size=resamples)


def paired_change(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean change of the lessons' means, over lessons that have values on both sides; n counts lessons."""
    common = [lesson for lesson, group in before.items() if group and after.get(lesson)]
    return mean_with_ci({lesson: [fmean(after[lesson]) - fmean(before[lesson])] for lesson in common})


def rewards_by_lesson(records: Sequence[ConversationRecord]) -> dict[str, list[float]]:
    """Lesson → the rewards of its conversations; conversations without a verdict have no reward."""
    return {
        problem: [record.reward for record in group if record.reward is not None]
        for problem, group in group_by_problem(records).items()
    }


def judgement_of(record: ConversationRecord) -> Optional[Judgement]:
    """The judgement of a conversation from its verdicts; None if a rule has no valid one, or if nothing was judged."""
    rules = dict.fromkeys(verdict.rule for verdict in record.verdicts)
    return sum_up(record.verdicts, rules) if rules else None


def lacks_verdict(record: ConversationRecord) -> bool:
    """True if the conversation has no reward, although it was to be judged or rewarded."""
    return record.reward is None


def share(hits: Iterable[bool]) -> tuple[Optional[float], int]:
    """(share of True, number of values); (None, 0) without values."""
    counted = [bool(hit) for hit in hits]
    return (sum(counted) / len(counted) if counted else None), len(counted)


def wilson_interval(hits: int, total: int) -> Optional[tuple[float, float]]:
    """The 95 % Wilson score interval of a share, for values that are independent of each other; None without values."""
    if not total:
        return None
    share_of_hits, doubt = hits / total, _Z_95**2 / total
    middle = (share_of_hits + doubt / 2) / (1 + doubt)
    reach = _Z_95 * math.sqrt(share_of_hits * (1 - share_of_hits) / total + doubt / (4 * total)) / (1 + doubt)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def summarise(
    records: Sequence[ConversationRecord],
    read_exchanges: Callable[[ConversationRecord], Optional[list[Exchange]]],
) -> dict[str, Any]:
    """Compute the part of metrics.json about one sampling that all kinds of conversations have.

    Args:
        read_exchanges: finds the errors of a conversation and the teacher's reactions. It returns None for lessons that
            its rules cannot read (all but the quickstart's); their turns are not counted.
    """
    read = [exchanges for exchanges in map(read_exchanges, records) if exchanges is not None]
    exchanges = [exchange for found in read for exchange in found]
    rejected, judged = share(record.rejected for record in records if not lacks_verdict(record))
    without, total = share(lacks_verdict(record) for record in records)
    return {
        "reward": mean_with_ci(rewards_by_lesson(records)),
        "conversations": total,
        "lessons": len(group_by_problem(records)),
        "scores": mean_scores(records),
        "rejected": {"share": rejected, "n": judged},
        "without_verdict": {"share": without, "n": total},
        "talk": talk(records),
        **(react(exchanges) if read else {}),
    }


def mean_scores(records: Sequence[ConversationRecord]) -> Optional[dict[str, float]]:
    """Each criterion's mean, on its own scale, over conversations that a rule scored; None if there are none."""
    judgements = [judgement for judgement in map(judgement_of, records) if judgement is not None]
    scores = [asdict(judgement.scores) for judgement in judgements if judgement.scores is not None]
    if not scores:
        return None
    return {name: fmean(each[name] for each in scores) for name in Scores.__dataclass_fields__}


def talk(records: Sequence[ConversationRecord]) -> dict[str, Optional[float]]:
    """How much is said: mean messages per conversation, mean words per message of teacher and student (split at white
    space, without thoughts), and the teacher's share of all words."""
    words: dict[str, list[int]] = {"teacher": [], "student": []}
    for record in records:
        for turn in record.turns:
            words[turn.role].append(len(visible_text(turn.text).split()))
    said = sum(words["teacher"]) + sum(words["student"])
    return {
        "messages": _mean(len(record.turns) for record in records),
        "teacher_words": _mean(words["teacher"]),
        "student_words": _mean(words["student"]),
        "teacher_share": sum(words["teacher"]) / said if said else None,
    }


def _mean(values: Iterable[float]) -> Optional[float]:
    found = list(values)
    return fmean(found) if found else None


def react(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """How the teacher reacted to turns with and without errors, and how often each persona erred.

    `error_turns.scaffolded`: the share of turns with an error that were answered with the right hint.
    `clean_turns.falsely_corrected`: the share of turns without an error that were treated as if they had one.
    `personas[name].with_error`: the share of a persona's turns that hold an error.
    """
    scaffolded, errors = share(exchange.scaffolded for exchange in exchanges if exchange.errors)
    corrected, clean = share(exchange.corrected for exchange in exchanges if not exchange.errors)
    personas = {}
    for persona in sorted({exchange.persona for exchange in exchanges if exchange.persona is not None}):
        with_error, turns = share(bool(each.errors) for each in exchanges if each.persona == persona)
        personas[persona] = {"with_error": with_error, "n": turns}
    return {
        "error_turns": {"scaffolded": scaffolded, "n": errors},
        "clean_turns": {"falsely_corrected": corrected, "n": clean},
        "personas": personas,
    }
