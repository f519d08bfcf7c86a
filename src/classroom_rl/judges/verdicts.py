"""A judge's JSON as verdicts: for one conversation, or for all of a group in one call; and the verdicts on a
conversation summed up.

A failed attempt never counts as an opinion. It is kept with its error. If all attempts at a rule fail, the conversation
has no judgement, and so no reward. The one exception: if the judge refused the tutor's content in every attempt at a
rule, the conversation is rejected.

GRPO compares the conversations of a group with each other, so one reader of all of them says what it needs, and reads
the rubric and the lesson plan once. Each entry of the answer becomes a `Verdict` on one conversation, with the same
scores as that of a single call.
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from classroom_rl.config.values import SCORING_RULES
from classroom_rl.errors import ContentRefused, EngineFailure, JudgeOutputError, ProviderFailure, StorageError
from classroom_rl.judges.json_answer import find_object, quote
from classroom_rl.rollout.engine import ConversationFacts, EmbeddedJudge, Judge, ask_judge
from classroom_rl.rollout.text import without_surrogates

logger = logging.getLogger(__name__)


LEAK_RULE, PEDAGOGY_RULE = "does_not_leak_answer", "follows_pedagogical_values"
"""Decision rules that evaluations report by name."""

STOPS = (EngineFailure, ProviderFailure, StorageError)
"""Errors that stop all judging until the user fixes their cause."""

_NUMBER = re.compile(r"\s*[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?\s*", re.ASCII)


@dataclass(frozen=True)
class Criterion:
    """A criterion that a scoring judge gives a number for, from 0 to `top`. `weight` is its share of the reward."""

    label: str
    top: float
    weight: float


CRITERIA = {
    "task_final_score": Criterion("Task-final discipline", 1.0, 0.4),
    "forward_progression_score": Criterion("Forward progression", 1.0, 0.4),
    "overall_momentum_score": Criterion("Overall momentum", 10.0, 0.2),
}
"""The criteria by their key in the judge's JSON, which is also the field of `Scores`. Their weights sum to 1. Schema,
parser, reward, metrics, page and reports use this table."""


def reason_key(criterion: str) -> str:
    """The key of the reason for a criterion's score in the judge's JSON."""
    return criterion.replace("_score", "_reasoning")


@dataclass(frozen=True)
class Scores:
    """The three criteria of the language tutor: task-final discipline and forward progression in [0, 1], overall
    momentum in [0, 10]."""

    task_final_score: float
    forward_progression_score: float
    overall_momentum_score: float

    @property
    def final_reward(self) -> float:
        """The weighted sum of the scores, each as a share of its maximum; in [0, 1], rounded to four places."""
        return round(sum(each.weight * getattr(self, name) / each.top for name, each in CRITERIA.items()), 4)


@dataclass(frozen=True)
class Verdict:
    """The result of one judge attempt at one rule: `scores` (scoring rules), `accepted` (decision rules), or an
    `error`.

    `reasons` maps a criterion to the judge's reason; `raw` is its whole answer. `refused` means that the judge refused
    the tutor's content, although it judges other conversations. `rules_version` is the version of the rules on
    messages, if they gave the verdict. `turn_scores` are the judge's findings on each message of the teacher in [0, 1],
    null for a message that it did not score; None if it gave none. `group_size` is the number of different
    conversations that the judge compared in one call, and `rank` the place it gave this one, from 1. The size is 1 if
    there was no verdict on its group, and None where conversations are judged one by one. An `anchor` is a call on this
    conversation beside those on the group: it is compared with them, and changes no reward.
    """

    rule: str
    attempt: int
    scores: Scores | None = None
    accepted: bool | None = None
    reasons: dict[str, str] | None = None
    error: str | None = None
    raw: str = ""
    refused: bool = False
    rules_version: str | None = None
    turn_scores: tuple[float | None, ...] | None = None
    group_size: int | None = None
    rank: int | None = None
    anchor: bool = False

    @property
    def valid(self) -> bool:
        return self.scores is not None or self.accepted is not None


def answer_schema(rule: str) -> dict[str, Any]:
    """The JSON schema of a judge's answer under a rule. Each reason comes before its score or decision, so that the
    judge writes it first.

    Ranges are in descriptions, because not every provider accepts bounds in a schema; the parser checks them anyway.
    """
    if rule in SCORING_RULES:
        properties = {}
        for name, criterion in CRITERIA.items():
            properties[reason_key(name)] = {"type": "string"}
            properties[name] = {"type": "number", "description": f"from 0 to {criterion.top:g}"}
    else:
        properties = {"reasoning": {"type": "string"}, "decision": {"type": "string", "enum": ["OK", "REJECT"]}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def parse_verdict(rule: str, attempt: int, text: str) -> Verdict:
    """The verdict in a judge's answer.

    Raises:
        JudgeOutputError: if the text holds no single JSON object with what the rule asks for.
    """
    answer = find_object(text)
    if rule in SCORING_RULES:
        reasons = {name: _reason(answer, reason_key(name)) for name in CRITERIA}
        scores, version = read_scores(answer, text), _reason(answer, "rules_version") or None
        found = {"raw": text, "rules_version": version, "turn_scores": _read_turn_scores(answer, text)}
        return Verdict(rule, attempt, scores=scores, reasons=reasons, **found)
    reasons = {rule: _reason(answer, "reasoning")}
    return Verdict(rule, attempt, accepted=_read_decision(answer, text), reasons=reasons, raw=text)


def parse_judge_output(text: str) -> Scores:
    """The three scores in a judge's answer; the result's `final_reward` is the reward.

    Raises:
        JudgeOutputError: if a score is missing, not a finite number or out of range.
    """
    return read_scores(find_object(text), text)


def read_scores(answer: dict[str, Any], text: str) -> Scores:
    """The scores in an object of a judge's answer.

    Args:
        text: the whole answer, for messages.

    Raises:
        JudgeOutputError: if a score is missing, not a finite number or out of range.
    """
    values = {}
    for name, criterion in CRITERIA.items():
        if name not in answer:
            raise JudgeOutputError(f"The judge's answer has no {name}: {quote(text)}")
        value = answer[name]
        number = _number(value)
        if not math.isfinite(number) or not 0 <= number <= criterion.top:
            rule = f"it must be a number from 0 to {criterion.top:g}"
            raise JudgeOutputError(f"{name} is {quote(value)}; {rule}: {quote(text)}")
        values[name] = number
    return Scores(**values)


def _read_turn_scores(answer: dict[str, Any], text: str) -> tuple[float | None, ...] | None:
    """The findings on single messages, which a judge may give in `turn_scores`."""
    given = answer.get("turn_scores")
    if given is None:
        return None
    scores = [None if value is None else _number(value) for value in given] if isinstance(given, list) else [math.nan]
    if not all(score is None or 0 <= score <= 1 for score in scores):
        raise JudgeOutputError(f"turn_scores is {quote(given)}; it is a list of numbers from 0 to 1: {quote(text)}")
    return tuple(scores)


def _number(value: Any) -> float:
    """A JSON number, or one written as a string; NaN for anything else."""
    if isinstance(value, bool) or not (
        isinstance(value, (int, float)) or isinstance(value, str) and _NUMBER.fullmatch(value)
    ):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_decision(answer: dict[str, Any], text: str) -> bool:
    given = answer.get("decision", "")
    decision = given.strip().upper() if isinstance(given, str) else None
    if decision not in ("OK", "REJECT"):
        said = "missing" if given == "" else quote(given)
        raise JudgeOutputError(f"The judge's decision is {said}, not OK or REJECT: {quote(text)}")
    return decision == "OK"


def _reason(answer: dict[str, Any], name: str) -> str:
    """A judge's reason as text that UTF-8 can encode, whatever type of value it wrote."""
    return without_surrogates(str(answer.get(name) or ""))


@dataclass(frozen=True)
class Judgement:
    """The judgement on one conversation, summed up from its verdicts.

    `scores` is the mean over the valid attempts at the scoring rule (None without one). `rejecting_rules` are the
    decision rules under which a valid attempt rejected the conversation; `refusing_rules` those under which every
    attempt refused its content.
    """

    scores: Scores | None
    rejecting_rules: tuple[str, ...]
    refusing_rules: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """The judge's opinion in [0, 1], independent of the configured rewards: 0 if a decision rule rejected the
        conversation or its content was refused, otherwise the weighted scores, or 1 without a scoring rule."""
        if self.rejecting_rules or self.refusing_rules:
            return 0.0
        return 1.0 if self.scores is None else self.scores.final_reward


def sum_up(verdicts: Sequence[Verdict], rules: Iterable[str]) -> Judgement | None:
    """The judgement of a conversation; None if a rule has no valid verdict, unless all its attempts refused the
    content. Anchors do not count."""
    rules = tuple(rules)
    verdicts = [verdict for verdict in verdicts if not verdict.anchor]
    by_rule = {rule: [v for v in verdicts if v.rule == rule and v.valid] for rule in rules}
    refusing = tuple(rule for rule, found in by_rule.items() if not found and _is_refused(verdicts, rule))
    if not all(found or rule in refusing for rule, found in by_rule.items()):
        return None
    scored = [v.scores for found in by_rule.values() for v in found if v.scores is not None]
    rejecting = tuple(rule for rule, found in by_rule.items() if any(v.accepted is False for v in found))
    return Judgement(_mean_scores(scored) if scored else None, rejecting, refusing)


def _is_refused(verdicts: Sequence[Verdict], rule: str) -> bool:
    attempts = [verdict for verdict in verdicts if verdict.rule == rule]
    return bool(attempts) and all(verdict.refused for verdict in attempts)


async def ask_for_verdict(
    judge: Judge | EmbeddedJudge,
    rule: str,
    attempt: int,
    about: tuple[list[dict[str, str]], str],
    facts: ConversationFacts,
    stops: tuple[type[Exception], ...] = STOPS,
    timeout_s: float | None = None,
) -> Verdict:
    """One judge attempt at one rule. If the attempt fails, the verdict holds its error.

    Args:
        about: the transcript, and the problem's text.
        stops: errors that are raised, not put into a verdict.
        timeout_s: the time after which the attempt counts as failed; None means no limit.
    """
    text = ""
    try:
        async with asyncio.timeout(timeout_s):
            text = await ask_judge(judge, rule, *about, attempt, facts)
        return parse_verdict(rule, attempt, text)
    except stops:
        raise
    except Exception as error:
        logger.warning("no verdict by the rule %s: %s: %s", rule, type(error).__name__, error)
        return failed_verdict(rule, attempt, error, text or getattr(error, "answer", ""))


def failed_verdict(rule: str, attempt: int, error: Exception, raw: str) -> Verdict:
    """The verdict of a failed attempt, with its error."""
    refused = isinstance(error, ContentRefused)
    return Verdict(rule, attempt, error=f"{type(error).__name__}: {error}", raw=raw, refused=refused)


def _mean_scores(scores: Sequence[Scores]) -> Scores:
    return Scores(**{name: fmean(getattr(s, name) for s in scores) for name in CRITERIA})


def group_schema(size: int) -> dict[str, Any]:
    """The JSON schema of the answer on a group of `size` conversations. The judge first compares and ranks them, and
    then scores each."""
    scores = {name: {"type": "number", "description": f"from 0 to {each.top:g}"} for name, each in CRITERIA.items()}
    entry = _object({"number": {"type": "integer"}, "reasoning": {"type": "string"}, **scores})
    return _object(
        {
            "comparison": {"type": "string"},
            "ranking": {"type": "array", "items": {"type": "integer"}, "description": f"1 to {size}, the best first"},
            "conversations": {"type": "array", "items": entry},
        }
    )


def parse_group(rule: str, attempt: int, text: str, size: int) -> list[Verdict]:
    """The verdicts in a judge's answer on a group, in the order of its conversations.

    Raises:
        JudgeOutputError: if the answer does not rank every conversation once, or does not score every one once.
    """
    answer = find_object(text)
    numbers = list(range(1, size + 1))
    ranking, entries = answer.get("ranking"), answer.get("conversations")
    if not isinstance(ranking, list) or _numbers(ranking) != numbers:
        raise JudgeOutputError(f"ranking is {quote(ranking)}; it names 1 to {size}, each once: {quote(text)}")
    named = [each.get("number") for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    if _numbers(named) != numbers or len(entries) != size:
        raise JudgeOutputError(f"conversations has the numbers {named}, not 1 to {size}, each once: {quote(text)}")
    by_number = {each["number"]: each for each in entries}
    return [_verdict(rule, attempt, by_number[number], ranking.index(number) + 1, size) for number in numbers]


def read_again(verdict: Verdict) -> Verdict:
    """A verdict on a conversation of a group, from its own entry in the judge's answer, which is its `raw`.

    Raises:
        JudgeOutputError: if its scores are not readable.
    """
    return _verdict(verdict.rule, verdict.attempt, json.loads(verdict.raw), verdict.rank, verdict.group_size)


def contradictions(verdicts: Sequence[Verdict]) -> float | None:
    """The share of pairs of conversations whose scores say the opposite of their ranks, of those with different scores;
    None if all are equal.

    Args:
        verdicts: those of one answer.
    """
    ordered = [each.scores.final_reward for each in sorted(verdicts, key=lambda each: each.rank)]
    pairs = [(better, worse) for place, better in enumerate(ordered) for worse in ordered[place + 1 :]]
    differing = [better < worse for better, worse in pairs if better != worse]
    return sum(differing) / len(differing) if differing else None


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _numbers(values: Sequence[Any]) -> list[int]:
    """The values, sorted, if all are whole numbers; else nothing."""
    whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return sorted(whole) if len(whole) == len(values) else []


def _verdict(rule: str, attempt: int, entry: dict[str, Any], rank: int | None, size: int | None) -> Verdict:
    raw = without_surrogates(json.dumps(entry, ensure_ascii=False))
    reasons = {rule: without_surrogates(str(entry.get("reasoning") or ""))}
    scores = read_scores(entry, raw)
    return Verdict(rule, attempt, scores=scores, reasons=reasons, raw=raw, group_size=size, rank=rank)
