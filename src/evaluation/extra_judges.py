"""Scores of finished conversations by further judges, and the agreement between judges."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from config.base import JudgeModelConfig
from config.eval_model import EvalConfig
from config.values import EMBEDDED_JUDGES
from src.classroom.conversation import visible_text
from src.classroom.record import ConversationRecord
from src.classroom.verdicts import Verdict, failed_verdict, parse_verdict, sum_up
from src.errors import EngineFailure, ProviderFailure, StorageError
from src.inference_providers.call_ledger import CallLedger
from src.inference_providers.chat_api import ChatApi
from src.inference_providers.open_router_inference import OpenAICompatibleJudge
from src.results.agreement import krippendorff_alpha, rank_correlation
from src.results.evaluation_files import group_by_problem
from src.results.statistics import judgement_of, mean_with_ci
from src.rollout.engines import Judge, Ledger, ask_judge
from src.server.open_models import embedded_judge

logger = logging.getLogger(__name__)

SpendingByJudge = dict[str, dict[str, float]]
"""Judge → tokens and dollars it cost, as the fields of `Spending`."""

JudgeScores = dict[str, dict[str, Optional[float]]]
"""Judge → conversation (its `conversation_key`) → the judge's score in [0, 1]; None without a verdict."""


def conversation_key(tutor: str, record: ConversationRecord) -> str:
    """The name of a conversation, unique across tutors."""
    return f"{tutor}/{record.id}"


async def ask_extra_judges(
    config: EvalConfig, records: Mapping[str, Sequence[ConversationRecord]], folder: Path
) -> tuple[JudgeScores, SpendingByJudge]:
    """Have each of `extra_judges` judge every conversation once, by the configured judge's rules.

    Args:
        records: each tutor's conversations.

    Returns:
        The scores, and the spending of the judges behind an API.

    Raises:
        ProviderFailure: if a judge cannot be asked at all.
    """
    extra_scores: JudgeScores = {}
    paid: SpendingByJudge = {}
    for number, judge in enumerate(config.extra_judges):
        seat, api = _open(judge, config, folder / f"extra_judge_{number}_calls.sqlite")
        try:
            keys = [conversation_key(tutor, record) for tutor, group in records.items() for record in group]
            asked = (_score(seat, config, record) for group in records.values() for record in group)
            extra_scores[judge.model_name_or_path] = dict(zip(keys, await asyncio.gather(*asked), strict=True))
        finally:
            if api is not None:
                paid[judge.model_name_or_path] = asdict(api.ledger.spending())
                api.ledger.close()
    return extra_scores, paid


def _open(judge: JudgeModelConfig, config: EvalConfig, ledger_path: Path) -> tuple[Judge, ChatApi | None]:
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        return embedded_judge(judge.model_name_or_path), None
    ledger = CallLedger(ledger_path, judge.max_cost_usd)
    api = ChatApi(judge, ledger, "extra judge")
    rules, most = config.generation.judges_rules_prompts_paths, config.generation.max_tokens_per_judge_attempt
    return OpenAICompatibleJudge(judge, rules, most, ledger, api), api


async def _score(judge: Judge, config: EvalConfig, record: ConversationRecord) -> Optional[float]:
    rules = list(config.generation.judges_rules_prompts_paths)
    ledger = Ledger(tuple(turn.persona for turn in record.turns), record.max_turns)
    verdicts = await asyncio.gather(*(_attempt(judge, rule, record, ledger) for rule in rules))
    judgement = sum_up(verdicts, rules)
    return None if judgement is None else judgement.score


async def _attempt(judge: Judge, rule: str, record: ConversationRecord, ledger: Ledger) -> Verdict:
    transcript = [{"role": turn.role, "content": visible_text(turn.text)} for turn in record.turns]
    text = ""
    try:
        text = await ask_judge(judge, rule, transcript, record.problem, 0, ledger)
        return parse_verdict(rule, 0, text)
    except (EngineFailure, ProviderFailure, StorageError):
        raise
    except Exception as error:  # recorded as a failed verdict: never as a score
        logger.warning("an extra judge has no verdict on %s: %s: %s", record.id, type(error).__name__, error)
        return failed_verdict(rule, 0, error, text)


def summarise_judges(
    name: str, records: Mapping[str, Sequence[ConversationRecord]], extra_scores: JudgeScores
) -> dict[str, Any]:
    """Summarise the scores of several judges on the conversations of one sampling, for metrics.json.

    Args:
        name: the judge that the rewards come from.
        records: each tutor's conversations.

    Returns:
        `scores`: judge → tutor → estimate of the score in [0, 1], without penalties and the reward's other parts;
        `spearman`: the rank correlation of each extra judge with the first judge, over the `pairs` conversations that
        both scored; `krippendorff_alpha` of all judges, over the `n` conversations with at least two scores.
    """
    firsts = {
        conversation_key(tutor, record): None if (judgement := judgement_of(record)) is None else judgement.score
        for tutor, group in records.items()
        for record in group
    }
    judges: JudgeScores = {name: firsts}
    for each, found in extra_scores.items():  # an extra judge may be the same model as the first
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
        lesson: [score for record in group if (score := scores[conversation_key(tutor, record)]) is not None]
        for lesson, group in group_by_problem(records).items()
    }
    return mean_with_ci(by_lesson)
