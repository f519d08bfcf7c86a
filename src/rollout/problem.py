"""The problem that an episode is about."""

import hashlib
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A maths problem, a lesson plan, a game: a text, and an answer for rewards that need one.

    Attributes:
        id: a hash of text and answer; it is the same on every rank and after a restart.
    """

    id: str
    text: str
    answer: str = ""

    @classmethod
    def of(cls, text: str, answer: str = "") -> "Problem":
        """The problem with this text and answer."""
        digest = hashlib.sha256(json.dumps([text, answer]).encode()).hexdigest()
        return cls(digest[:16], text, answer)
