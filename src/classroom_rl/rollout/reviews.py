"""Reviews: a supervisor's verdict on a single message, right after it was written.

If a supervisor gives no answer, or one that cannot be parsed, there is *no verdict*: the message then has no penalty
and no correction, and does not count as invalid.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Optional, Protocol

from classroom_rl.errors import EngineFailure, ProviderFailure, StorageError
from classroom_rl.rollout.engine import NO_FACTS, ConversationFacts
from classroom_rl.rollout.text import left_out_when_empty, without_surrogates
from classroom_rl.rollout.tools.tool import ToolCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Review:
    """A supervisor's review of one message.

    Attributes:
        valid: whether the message is valid; None without a verdict.
        category: the category of the mistake, a key of `generation.supervisor.penalties`; "" for a valid message.
        penalty: the value of that category there, at most 0; 0 for a valid message; None without a verdict.
        critique: what is wrong, in words for people.
        correction: the message that would have been valid; None if there is none, or if it breaks the rules itself.
        refused_correction: why a correction was not accepted; None if it was, or if there was none.
        source: `rules`, `model` or `human`.
        error: why there is no verdict.
        raw: the supervisor's whole answer.
    """

    valid: Optional[bool] = None
    category: str = ""
    penalty: Optional[float] = None
    critique: str = ""
    correction: Optional[str] = None
    refused_correction: Optional[str] = None
    source: str = "rules"
    error: Optional[str] = None
    raw: str = ""


@left_out_when_empty("tool_calls")
@dataclass(frozen=True)
class Draft:
    """A message that the policy sampled and that did not enter the conversation, with its review and its tool calls."""

    text: str
    tokens: int
    review: Review
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class MessageToReview:
    """What a supervisor is shown.

    Attributes:
        conversation: the messages before it, as the student sees them: {"role": "teacher" | "student", "content"}.
        message: the message, without thoughts.
        problem, answer: the problem's text and its reference answer ("" without one).
        facts: what the program knows for certain. Embedded supervisors may use it; models never see it.
        cut: whether the message was cut at its token limit.
    """

    conversation: list[dict[str, str]]
    message: str
    problem: str
    answer: str = ""
    facts: ConversationFacts = NO_FACTS
    cut: bool = False


class Supervisor(Protocol):
    """Reviews messages: rules, a model on an engine, or a model behind an API."""

    async def review(self, about: MessageToReview) -> Review:
        """The review of a message, without a penalty. A failure that concerns this message alone is a review without a
        verdict. Raises `EngineFailure`, `ProviderFailure` or `StorageError` if no message can be reviewed until a user
        fixes the cause."""


def no_verdict(error: Exception, source: str = "rules", raw: str = "") -> Review:
    """The review of a message that could not be reviewed: it holds the error, which is logged, too. `raw` is the
    supervisor's answer, if it gave one."""
    message = without_surrogates(f"{type(error).__name__}: {error}")
    logger.warning("no review of a message: %s", message)
    return Review(source=source, error=message, raw=without_surrogates(raw))


async def reviewed(supervisor: Supervisor, about: MessageToReview, penalties: Mapping[str, float]) -> Review:
    """The supervisor's review of a message, with its penalty. An error that concerns this message alone gives a review
    without a verdict. Raises `EngineFailure`, `ProviderFailure` or `StorageError` if no message can be reviewed until a
    user fixes the cause."""
    try:
        return priced(await supervisor.review(about), penalties)
    except (EngineFailure, ProviderFailure, StorageError):
        raise
    except Exception as error:
        return no_verdict(error)


def priced(review: Review, penalties: Mapping[str, float]) -> Review:
    """The review with the penalty of its category. Raises a `KeyError` if `penalties` lacks the category."""
    if review.valid is None:
        return replace(review, penalty=None)
    return replace(review, penalty=0.0 if review.valid else penalties[review.category])
