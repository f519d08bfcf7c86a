"""Asks a model for the review of one message, and reads its answer.

The model names what is wrong; it never gives a number. Prices stand in `generation.supervisor.penalties`.
"""

from collections.abc import Iterable
from typing import Any

from classroom_rl.errors import JudgeOutputError
from classroom_rl.judges.json_answer import find_object, quote
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.rollout.text import without_surrogates

NO_CATEGORY = "none"
"""The category of a valid message in a model's answer."""

_KEYS = {"critique": str, "category": str, "valid": bool, "correction": str}


def review_messages(path: str, about: MessageToReview) -> list[dict[str, str]]:
    """The chat messages that ask a model for a review; `path` is the prompt template. It may use `conversation`,
    `message`, `problem` and `answer`. The facts that the program knows are not shown.

    Raises:
        DataError: as `render`.
    """
    text = render(
        path, conversation=about.conversation, message=about.message, problem=about.problem, answer=about.answer
    )
    return [{"role": "user", "content": text}]


def review_schema(categories: Iterable[str]) -> dict[str, Any]:
    """The JSON schema of a model's answer. The critique comes first, so that the model thinks before it decides.

    Args:
        categories: the categories that have a price.
    """
    properties = {
        "critique": {"type": "string"},
        "category": {"type": "string", "enum": [*categories, NO_CATEGORY]},
        "valid": {"type": "boolean"},
        "correction": {"type": "string", "description": "empty if there is none"},
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def parse_review(text: str, categories: Iterable[str]) -> Review:
    """The review in a model's answer, its correction unchecked. A `correction` that is null or empty is none.

    Raises:
        JudgeOutputError: if the text holds no single JSON object with exactly what was asked for: a key is missing, has
            another type or names an unknown category, or `valid` contradicts the category.
    """
    answer = find_object(text)
    for key, kind in _KEYS.items():
        if key not in answer:
            raise JudgeOutputError(f"The supervisor's answer has no {key}: {quote(text)}")
        if not isinstance(answer[key], kind) and not (key == "correction" and answer[key] is None):
            raise JudgeOutputError(f"{key} is {quote(answer[key])}, not a {kind.__name__}: {quote(text)}")
    valid, category = answer["valid"], answer["category"]
    known = list(categories)
    if category not in (*known, NO_CATEGORY):
        names = ", ".join((*known, NO_CATEGORY))
        raise JudgeOutputError(f"The category is {quote(category)}, not one of {names}: {quote(text)}")
    if valid != (category == NO_CATEGORY):
        said = f"valid is {valid}, but the category is {category}"
        raise JudgeOutputError(f"The supervisor's answer contradicts itself, {said}: {quote(text)}")
    correction = without_surrogates(answer["correction"] or "").strip()
    return Review(
        valid=valid,
        category="" if valid else category,
        critique=without_surrogates(answer["critique"]).strip(),
        correction=None if valid or not correction else correction,
        source="model",
        raw=without_surrogates(text),
    )
