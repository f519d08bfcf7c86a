"""Parses a judge's JSON into verdicts, on one conversation or on a whole group in one call, and aggregates the verdicts
on a conversation.

A failed attempt never counts as a score. It is stored with its error. If all attempts at a rule fail, the conversation
has no judgement, and so no reward. The one exception: if the judge refused the tutor's content in every attempt at a
rule, the conversation is rejected.

GRPO compares the conversations of a group with each other. So a judge that sees all of them in one call can rank them
directly, and reads the judging criteria and the lesson plan only once. Each entry of its answer becomes a `Verdict` on
one conversation, with the same scores as after a single call.
"""

import asyncio
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from classroom_rl.config.rubric import Rubric
from classroom_rl.config.values import SCORING_RULES
from classroom_rl.errors import ContentRefused, EngineFailure, JudgeOutputError, ProviderFailure, StorageError
from classroom_rl.judges.json_answer import find_object, number_in, quote
from classroom_rl.judges.rubric_scores import RubricScores, mean_rubric_scores, read_rubric_scores, rubric_properties
from classroom_rl.rollout.engine import ConversationFacts, EmbeddedJudge, Judge, ask_judge
from classroom_rl.rollout.text import without_surrogates

logger = logging.getLogger(__name__)

BEYOND_RULES = "beyond what rules can read"
"""How a verdict of an embedded judge names a message that it cannot read."""

STOPS = (EngineFailure, ProviderFailure, StorageError)
"""Errors that stop all judging until the user fixes their cause."""


@dataclass(frozen=True)
class Criterion:
    """A criterion that a scoring judge rates from 0 to `top`. `weight` is its share of the reward."""

    label: str
    top: float
    weight: float


CRITERIA = {
    "task_final_score": Criterion("Task-final discipline", 1.0, 0.4),
    "forward_progression_score": Criterion("Forward progression", 1.0, 0.4),
    "overall_momentum_score": Criterion("Overall momentum", 10.0, 0.2),
}
"""The criteria by their key in the judge's JSON, which is also the field of `Scores`. Their weights sum to 1. Schema,
parser, reward, metrics, viewer and reports all use this table."""


def criterion_of(key: str) -> Criterion:
    """How a score under this key is shown: as one of `CRITERIA`, or as one of a rubric, which is a share from 0 to 1
    (and has its weight in the rubric)."""
    name = key.removesuffix("_score").replace("_", " ").capitalize()
    return CRITERIA.get(key, Criterion(name, 1.0, 0.0))


def judged_criteria(steps: Iterable[Mapping[str, Any]]) -> dict[str, Criterion]:
    """The criteria that the metrics of a run's steps hold (`judge/…_score`), by their key."""
    names = dict.fromkeys(name for step in steps for name in step if name.startswith("judge/"))
    keys = [name.removeprefix("judge/") for name in names if name.endswith("_score")]
    return {key: criterion_of(key) for key in sorted(keys, key=lambda key: key not in CRITERIA)}


def reason_key(criterion: str) -> str:
    """The key in the judge's JSON of the reason for a criterion's score."""
    return criterion.removesuffix("_score") + "_reasoning"


@dataclass(frozen=True)
class Scores:
    """The scores for the three criteria of the language tutor: task-final discipline and forward progression in [0, 1],
    overall momentum in [0, 10]."""

    task_final_score: float
    forward_progression_score: float
    overall_momentum_score: float

    @property
    def values(self) -> dict[str, float]:
        """The scores by their keys in the judge's JSON."""
        return asdict(self)

    @property
    def final_reward(self) -> float:
        """The weighted sum of the scores, each divided by its maximum; in [0, 1], rounded to four decimal places."""
        shares = (criterion.weight * getattr(self, name) / criterion.top for name, criterion in CRITERIA.items())
        return round(sum(shares), 4)


@dataclass(frozen=True)
class Verdict:
    """The result of one judge attempt at one rule.

    Attributes:
        rule: the name of the rule.
        attempt: the number of the attempt, from 0.
        scores: the scores, for a scoring rule; `RubricScores` if the judge has a rubric of its own.
        accepted: the decision, for a decision rule.
        reasons: the judge's reason for each criterion; for a decision rule and in a group, one reason under the name of
            the rule.
        error: why the attempt failed; None if it succeeded.
        raw: the judge's whole answer; in a group, its entry for this conversation.
        refused: whether the judge refused the tutor's content, although it judges other conversations.
        rules_version: the version of the message rules, if they produced the verdict.
        beyond_rules: the number of the teacher's messages that no rule can read; None if no embedded judge judged.
        turn_scores: the judge's score in [0, 1] of each message of the teacher, or None for a message without a score.
            None as a whole if the judge did not score single messages.
        group_size: the number of distinct conversations that the judge compared in one call. 1 if there was no verdict
            on the group, so that this conversation was judged by itself; None where groups are not judged.
        rank: the rank of this conversation in its group, from 1 (the best).
        anchor: whether this is an additional call on this conversation alone, made to compare it with the call on the
            group. It changes no reward.
    """

    rule: str
    attempt: int
    scores: Scores | RubricScores | None = None
    accepted: bool | None = None
    reasons: dict[str, str] | None = None
    error: str | None = None
    raw: str = ""
    refused: bool = False
    rules_version: str | None = None
    beyond_rules: int | None = None
    turn_scores: tuple[float | None, ...] | None = None
    group_size: int | None = None
    rank: int | None = None
    anchor: bool = False

    @property
    def valid(self) -> bool:
        return self.scores is not None or self.accepted is not None


def answer_schema(rule: str, rubric: Rubric | None = None) -> dict[str, Any]:
    """The JSON schema of a judge's answer under a rule, or by a rubric if the rule scores. Each reason comes before its
    score or decision, so that the judge reasons before it decides.

    The ranges are given in descriptions, because not every provider accepts bounds in a schema. The parser checks them.
    """
    if rule in SCORING_RULES and rubric is not None:
        properties = rubric_properties(rubric)
    elif rule in SCORING_RULES:
        properties = {}
        for name, criterion in CRITERIA.items():
            properties[reason_key(name)] = {"type": "string"}
            properties[name] = {"type": "number", "description": f"from 0 to {criterion.top:g}"}
    else:
        properties = {"reasoning": {"type": "string"}, "decision": {"type": "string", "enum": ["OK", "REJECT"]}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def parse_verdict(rule: str, attempt: int, text: str, rubric: Rubric | None = None) -> Verdict:
    """Parse a judge's answer.

    Args:
        rubric: what a scoring rule scores by in place of `CRITERIA`.

    Raises:
        JudgeOutputError: if the text does not contain exactly one JSON object with the keys that the rule requires.
    """
    answer = find_object(text)
    if rule in SCORING_RULES and rubric is not None:
        reasons = {criterion.key: _reason(answer, reason_key(criterion.key)) for criterion in rubric}
        return Verdict(rule, attempt, scores=read_rubric_scores(rubric, answer, text), reasons=reasons, raw=text)
    if rule in SCORING_RULES:
        reasons = {name: _reason(answer, reason_key(name)) for name in CRITERIA}
        scores, version = read_scores(answer, text), _reason(answer, "rules_version") or None
        turn_scores = _read_turn_scores(answer, text)
        return Verdict(
            rule,
            attempt,
            scores=scores,
            reasons=reasons,
            raw=text,
            rules_version=version,
            beyond_rules=_read_beyond_rules(answer),
            turn_scores=turn_scores,
        )
    reasons = {rule: _reason(answer, "reasoning")}
    return Verdict(rule, attempt, accepted=_read_decision(answer, text), reasons=reasons, raw=text)


def parse_judge_output(text: str) -> Scores:
    """The three scores in a judge's answer. Their `final_reward` is their weighted sum, in [0, 1], before penalties.

    Raises:
        JudgeOutputError: if a score is missing, not a finite number or out of range.
    """
    return read_scores(find_object(text), text)


def read_scores(answer: dict[str, Any], text: str) -> Scores:
    """The scores in the JSON object of a judge's answer.

    Args:
        answer: the object.
        text: the whole answer, for error messages.

    Raises:
        JudgeOutputError: if a score is missing, not a finite number or out of range.
    """
    values = {}
    for name, criterion in CRITERIA.items():
        if name not in answer:
            raise JudgeOutputError(f"The judge's answer has no {name}: {quote(text)}")
        value = answer[name]
        number = number_in(value)
        if not math.isfinite(number) or not 0 <= number <= criterion.top:
            rule = f"it must be a number from 0 to {criterion.top:g}"
            raise JudgeOutputError(f"{name} is {quote(value)}; {rule}: {quote(text)}")
        values[name] = number
    return Scores(**values)


def _read_beyond_rules(answer: dict[str, Any]) -> int | None:
    """The number of messages that no rule can read. Only embedded judges give it; anything else is ignored."""
    value = answer.get("beyond_rules")
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _read_turn_scores(answer: dict[str, Any], text: str) -> tuple[float | None, ...] | None:
    """The optional scores of single messages in `turn_scores`.

    Raises:
        JudgeOutputError: if they are not a list of numbers in [0, 1] and nulls.
    """
    values = answer.get("turn_scores")
    if values is None:
        return None
    scores = (
        [None if value is None else number_in(value) for value in values] if isinstance(values, list) else [math.nan]
    )
    if not all(score is None or 0 <= score <= 1 for score in scores):
        raise JudgeOutputError(f"turn_scores is {quote(values)}; it is a list of numbers from 0 to 1: {quote(text)}")
    return tuple(scores)


def _read_decision(answer: dict[str, Any], text: str) -> bool:
    value = answer.get("decision", "")
    decision = value.strip().upper() if isinstance(value, str) else None
    if decision not in ("OK", "REJECT"):
        shown = "missing" if value == "" else quote(value)
        raise JudgeOutputError(f"The judge's decision is {shown}, not OK or REJECT: {quote(text)}")
    return decision == "OK"


def _reason(answer: dict[str, Any], name: str) -> str:
    """A judge's reason as text that can be encoded in UTF-8, whatever the type of the value."""
    return without_surrogates(str(answer.get(name) or ""))


@dataclass(frozen=True)
class Judgement:
    """The judgement on one conversation, aggregated from its verdicts.

    Attributes:
        scores: the mean scores over the valid attempts at scoring rules; None without such a rule.
        rejecting_rules: the decision rules under which at least one valid attempt rejected the conversation.
        refusing_rules: the rules under which every attempt refused its content.
    """

    scores: Scores | RubricScores | None
    rejecting_rules: tuple[str, ...]
    refusing_rules: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        """The overall score in [0, 1], independent of the configured rewards: 0 if a decision rule rejected the
        conversation or its content was refused, otherwise the weighted scores, or 1 without a scoring rule."""
        if self.rejecting_rules or self.refusing_rules:
            return 0.0
        return 1.0 if self.scores is None else self.scores.final_reward


def sum_up(verdicts: Sequence[Verdict], rules: Iterable[str]) -> Judgement | None:
    """Aggregate the verdicts on a conversation. Anchors do not count.

    Returns:
        The judgement; None if a rule has no valid verdict, unless all attempts at it refused the content.
    """
    rules = tuple(rules)
    verdicts = [verdict for verdict in verdicts if not verdict.anchor]
    by_rule = {rule: [verdict for verdict in verdicts if verdict.rule == rule and verdict.valid] for rule in rules}
    refusing = tuple(rule for rule, valid in by_rule.items() if not valid and _is_refused(verdicts, rule))
    if not all(valid or rule in refusing for rule, valid in by_rule.items()):
        return None
    scores = [verdict.scores for valid in by_rule.values() for verdict in valid if verdict.scores is not None]
    rejecting = tuple(rule for rule, valid in by_rule.items() if any(verdict.accepted is False for verdict in valid))
    return Judgement(_mean_scores(scores) if scores else None, rejecting, refusing)


def _is_refused(verdicts: Sequence[Verdict], rule: str) -> bool:
    attempts = [verdict for verdict in verdicts if verdict.rule == rule]
    return bool(attempts) and all(verdict.refused for verdict in attempts)


async def ask_for_verdict(
    judge: Judge | EmbeddedJudge,
    rule: str,
    attempt: int,
    transcript_and_problem: tuple[list[dict[str, str]], str],
    facts: ConversationFacts,
    stops: tuple[type[Exception], ...] = STOPS,
    timeout_s: float | None = None,
) -> Verdict:
    """Run one judge attempt at one rule. If the attempt fails, the verdict contains its error.

    Args:
        transcript_and_problem: the transcript, and the text of the problem.
        facts: what the program knows about the conversation; passed to embedded judges only.
        stops: errors that are raised instead of being stored in the verdict.
        timeout_s: the time in seconds after which the attempt counts as failed; None for no limit.
    """
    text = ""
    try:
        async with asyncio.timeout(timeout_s):
            text = await ask_judge(judge, rule, *transcript_and_problem, attempt, facts)
        return parse_verdict(rule, attempt, text, getattr(judge, "rubric", None))  # only judge models have one
    except stops:
        raise
    except Exception as error:
        logger.warning("no verdict by the rule %s: %s: %s", rule, type(error).__name__, error)
        return failed_verdict(rule, attempt, error, text or getattr(error, "answer", ""))


def failed_verdict(rule: str, attempt: int, error: Exception, raw: str) -> Verdict:
    """The verdict of a failed attempt, with its error."""
    refused = isinstance(error, ContentRefused)
    return Verdict(rule, attempt, error=f"{type(error).__name__}: {error}", raw=raw, refused=refused)


def _mean_scores(scores: Sequence[Scores | RubricScores]) -> Scores | RubricScores:
    rubric_scores = [item for item in scores if isinstance(item, RubricScores)]
    if rubric_scores:
        return mean_rubric_scores(rubric_scores)
    return Scores(**{name: fmean(getattr(item, name) for item in scores) for name in CRITERIA})


def group_schema(size: int) -> dict[str, Any]:
    """The JSON schema of the answer on a group of `size` conversations. The judge first compares and ranks them, and
    then scores each."""
    scores = {
        name: {"type": "number", "description": f"from 0 to {criterion.top:g}"} for name, criterion in CRITERIA.items()
    }
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
        JudgeOutputError: if the answer does not rank or does not score each conversation exactly once.
    """
    answer = find_object(text)
    numbers = list(range(1, size + 1))
    ranking, entries = answer.get("ranking"), answer.get("conversations")
    if not isinstance(ranking, list) or _numbers(ranking) != numbers:
        raise JudgeOutputError(f"ranking is {quote(ranking)}; it names 1 to {size}, each once: {quote(text)}")
    entry_numbers = (
        [entry.get("number") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
    if _numbers(entry_numbers) != numbers or len(entries) != size:
        raise JudgeOutputError(
            f"conversations has the numbers {entry_numbers}, not 1 to {size}, each once: {quote(text)}"
        )
    by_number = {entry["number"]: entry for entry in entries}
    return [_verdict(rule, attempt, by_number[number], ranking.index(number) + 1, size) for number in numbers]


def read_again(verdict: Verdict) -> Verdict:
    """Parse the verdict on a conversation of a group again, from its `raw`, the entry in the judge's answer.

    Raises:
        JudgeOutputError: if the entry has no valid scores.
    """
    return _verdict(verdict.rule, verdict.attempt, json.loads(verdict.raw), verdict.rank, verdict.group_size)


def contradictions(verdicts: Sequence[Verdict]) -> float | None:
    """The share of discordant pairs in the verdicts of one answer: of the pairs of conversations with different scores,
    those whose scores contradict their ranks. None if all scores are equal."""
    rewards = [verdict.scores.final_reward for verdict in sorted(verdicts, key=lambda verdict: verdict.rank)]
    pairs = [(better, worse) for index, better in enumerate(rewards) for worse in rewards[index + 1 :]]
    differing = [better < worse for better, worse in pairs if better != worse]
    return sum(differing) / len(differing) if differing else None


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _numbers(values: Sequence[Any]) -> list[int]:
    """The values in sorted order if all are integers; otherwise []."""
    integers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return sorted(integers) if len(integers) == len(values) else []


def _verdict(rule: str, attempt: int, entry: dict[str, Any], rank: int | None, size: int | None) -> Verdict:
    """The verdict on one conversation of a group, from its entry in the judge's answer."""
    raw = without_surrogates(json.dumps(entry, ensure_ascii=False))
    reasons = {rule: without_surrogates(str(entry.get("reasoning") or ""))}
    scores = read_scores(entry, raw)
    return Verdict(rule, attempt, scores=scores, reasons=reasons, raw=raw, group_size=size, rank=rank)
