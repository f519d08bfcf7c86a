"""Statistics of finished conversations. Pure functions; an empty denominator gives None, never NaN. Intervals are
over lessons (`classroom_rl.rollout.intervals`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Optional

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.verdicts import Judgement, Scores, sum_up
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.turn_pairs import Exchange
from classroom_rl.rollout.intervals import (
    LEAST_LESSONS,
    LEVEL,
    Estimate,
    mean_with_ci,
    share,
    sign_flip_p,
    within_unit,
)
from classroom_rl.rollout.thoughts import visible_text


def paired_change(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean change of the lessons' means, over lessons that have values on both sides; n counts lessons, and `p` is
    that of a sign-flip test."""
    common = [lesson for lesson, group in before.items() if group and after.get(lesson)]
    changes = {lesson: [fmean(after[lesson]) - fmean(before[lesson])] for lesson in common}
    bounds = (-1.0, 1.0) if within_unit(before) and within_unit(after) else None
    return {**mean_with_ci(changes, bounds), "p": sign_flip_p([value for (value,) in changes.values()])}


def is_clear(change: Mapping[str, Any]) -> bool:
    """Whether a change of `paired_change` is more than chance: an interval to one side of 0, and a p below `LEVEL`."""
    interval, p = change["ci95"], change.get("p")
    if interval is None or p is None or change["n"] < LEAST_LESSONS:
        return False
    return p < LEVEL and not interval[0] <= 0 <= interval[1]


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
