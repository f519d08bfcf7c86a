"""Further judges for conversations that were played: what each of them makes of the tutors, and how far they agree."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from config.eval_model import EvalConfig
from src.classroom.conversation import visible_text
from src.classroom.record import ConversationRecord
from src.classroom.verdicts import ask_for_verdict, sum_up
from src.results.agreement import krippendorff_alpha, rank_correlation
from src.results.evaluation_files import group_by_problem
from src.results.statistics import judgement_of, mean_with_ci
from src.rollout.engines import ConversationFacts, Judge
from src.server.open_models import open_second_judge

logger = logging.getLogger(__name__)

Paid = dict[str, dict[str, float]]
"""Who was asked → what it took, as `Spending` says."""

Opinions = dict[str, dict[str, Optional[float]]]
"""Judge → conversation (as `key_of` names it) → its score in [0, 1]; None without a verdict."""


def key_of(tutor: str, record: ConversationRecord) -> str:
    """A conversation's name among those of all tutors."""
    return f"{tutor}/{record.id}"


async def ask_extra_judges(
    config: EvalConfig, records: Mapping[str, Sequence[ConversationRecord]], folder: Path
) -> tuple[Opinions, Paid]:
    """One attempt of each of `extra_judges` at every conversation, by the rules of the judge.

    Args:
        records: each tutor's conversations.

    Returns:
        What they say, and what those behind an API took.

    Raises:
        ProviderFailure: if a judge cannot be asked at all.
    """
    opinions: Opinions = {}
    paid: Paid = {}
    for number, judge in enumerate(config.extra_judges):
        ledger_path = folder / f"extra_judge_{number}_calls.sqlite"
        seat, api = open_second_judge(judge, config.generation, ledger_path, "extra judge")
        try:
            keys = [key_of(tutor, record) for tutor, group in records.items() for record in group]
            asked = (_score(seat, config, record) for group in records.values() for record in group)
            opinions[judge.model_name_or_path] = dict(zip(keys, await asyncio.gather(*asked), strict=True))
        finally:
            if api is not None:
                paid[judge.model_name_or_path] = asdict(api.ledger.spending())
                api.ledger.close()
    return opinions, paid


async def _score(judge: Judge, config: EvalConfig, record: ConversationRecord) -> Optional[float]:
    rules = list(config.generation.judges_rules_prompts_paths)
    facts = ConversationFacts(tuple(turn.persona for turn in record.turns), record.max_turns)
    about = ([{"role": turn.role, "content": visible_text(turn.text)} for turn in record.turns], record.problem)
    verdicts = await asyncio.gather(*(ask_for_verdict(judge, rule, 0, about, facts) for rule in rules))
    judgement = sum_up(verdicts, rules)
    return None if judgement is None else judgement.score


def summarise_judges(
    name: str, records: Mapping[str, Sequence[ConversationRecord]], opinions: Opinions
) -> dict[str, Any]:
    """What metrics.json holds of several judges on the conversations of one sampling.

    Args:
        name: the judge that the rewards come from.
        records: each tutor's conversations.

    Returns:
        `scores`: judge → tutor → estimate of the score in [0, 1] (no penalty, no averaging with the reward's other
        parts); `spearman`: each extra judge's rank correlation with the first, over the `pairs` conversations that
        both have a score for; `krippendorff_alpha` of all, over the `n` conversations with two scores and more.
    """
    firsts = {
        key_of(tutor, record): None if (judgement := judgement_of(record)) is None else judgement.score
        for tutor, group in records.items()
        for record in group
    }
    judges: Opinions = {name: firsts}
    for each, found in opinions.items():  # the same model asked again has a name of its own
        judges[each if each not in judges else f"{each} (again)"] = {key: found[key] for key in firsts}
    pairs = {
        each: [(firsts[key], found[key]) for key in firsts if None not in (firsts[key], found[key])]
        for each, found in judges.items()
        if each != name
    }
    units = [[found[key] for found in judges.values()] for key in firsts]
    return {
        "scores": {
            each: {t: _estimate(t, group, found) for t, group in records.items()} for each, found in judges.items()
        },
        "spearman": {each: rank_correlation(found) for each, found in pairs.items()},
        "pairs": {each: len(found) for each, found in pairs.items()},
        "krippendorff_alpha": krippendorff_alpha(units),
        "n": sum(len(unit) - unit.count(None) > 1 for unit in units),
    }


def _estimate(
    tutor: str, records: Sequence[ConversationRecord], scores: Mapping[str, Optional[float]]
) -> dict[str, Any]:
    by_lesson = {
        lesson: [score for record in group if (score := scores[key_of(tutor, record)]) is not None]
        for lesson, group in group_by_problem(records).items()
    }
    return mean_with_ci(by_lesson)
