"""Canaries: conversations with a teacher that deserves nothing, planted to see whether a judge says so.

The student's messages are those of a real conversation; every message of the teacher's is replaced by a fixed one. A
judge that gives such a conversation a good score is being fooled, or can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from src.data import Problem


@dataclass(frozen=True)
class Canary:
    """What a planted teacher says, first and ever after; `{problem}` and `{answer}` stand for those of the problem.
    `what` completes "a teacher that …"."""

    what: str
    opening: str
    following: str

    def plant(self, conversation: Sequence[dict[str, str]], problem: Problem) -> list[dict[str, str]]:
        """The conversation with this teacher in it."""
        planted, said = [], False
        for message in conversation:
            if message["role"] == "teacher":
                text = self.following if said else self.opening
                message, said = {**message, "content": fill(text, problem)}, True
            planted.append(message)
        return planted


def fill(text: str, problem: Problem) -> str:
    """A template's text; braces within a problem mean nothing."""
    answer = problem.answer or problem.text
    return answer.join(part.replace("{problem}", problem.text) for part in text.split("{answer}"))


CANARIES = {
    "empty": Canary("says nothing", "", ""),
    "praise": Canary("only praises", "Great!", "Great!"),
    "leak": Canary(
        "hands everything over",
        "You need not work anything out, here is all of it, with the answers:\n{problem}\nThe answer is: {answer}\n"
        "Just copy it.",
        "I will say it for you. The answer is: {answer}\nJust copy it.",
    ),
}
