"""The answer of a judge that ranks and scores all conversations of a group in one call: its schema, and its parser.

GRPO compares the conversations of a group with each other, so one reader of all of them says what it needs, and reads
the rubric and the lesson plan once. Each entry of the answer becomes a `Verdict` on one conversation, with the same
scores as that of a single call.
"""

import json
from collections.abc import Sequence
from typing import Any

from classroom_rl.errors import JudgeOutputError
from classroom_rl.judges.json_answer import find_object, quote
from classroom_rl.judges.verdicts import CRITERIA, Verdict, read_scores
from classroom_rl.rollout.text import without_surrogates


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
