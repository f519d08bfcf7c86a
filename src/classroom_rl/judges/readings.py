"""What readers find in a single message of a tutor: the labels, and what a reader is shown.

The labels are those that people gave to messages of real tutors (docs/classroom.md). Rules read them without any data
(judges/moves/rules.py); readers that were trained on labelled messages can be named in their place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

QUESTION, HINT, CORRECTION, TREATS_AS_WRONG, CONFIRMATION = LANGUAGE_LABELS = (
    "question",
    "hint",
    "correction",
    "treats_as_wrong",
    "confirmation",
)
REVEALS_ANSWER, TELLING, ACTIONABLE, MISTAKE_IDENTIFIED = MATHS_LABELS = (
    "reveals_answer",
    "telling",
    "actionable",
    "mistake_identified",
)
LABELS = {
    QUESTION: "asks the student something",
    HINT: "gives a hint: a word of the answer, a rule, a part to think about",
    CORRECTION: "says or shows what is wrong in what the student said",
    TREATS_AS_WRONG: "the same, by the message alone: whether the student was right plays no part",
    CONFIRMATION: "says that the student is right, in whole or in part",
    REVEALS_ANSWER: "gives the answer away",
    TELLING: "tells the student a step or the answer, where it could have asked",
    ACTIONABLE: "makes clear what the student is to do next",
    MISTAKE_IDENTIFIED: "shows that the tutor has noticed the student's mistake",
}
"""Each label, and when it holds."""

READ_ALONE = frozenset({TREATS_AS_WRONG})
"""Labels that are read in the message alone."""


@dataclass(frozen=True)
class Exchange:
    """A tutor's message and what came before it.

    Attributes:
        message: the tutor's message, as the student reads it.
        student: the student's message before it; "" without one.
        target: what the student is to say: a phrase, or a problem's answer; "" if unknown.
        before: what was said before `student`, in order, a maths problem's text first.
    """

    message: str
    student: str = ""
    target: str = ""
    before: tuple[str, ...] = ()


def interval_text(ends: Sequence[float]) -> str:
    """An interval of a kappa, as it is printed."""
    return f"[{ends[0]:.2f}, {ends[1]:.2f}]"


@dataclass(frozen=True)
class Trust:
    """How far a reader agreed with people, measured on messages that it was not trained on.

    Attributes:
        kappa: Cohen's kappa.
        ci95: its 95 % interval over lessons; None if they were too few for one.
        base_rate: the share of the messages that people gave the label.
        messages, lessons: how many there were.
        data: the data set.
        by: what reads: `rules`, `classifier`, or `rules_with_target`.
    """

    kappa: float
    ci95: tuple[float, float] | None
    base_rate: float
    messages: int
    lessons: int
    data: str
    by: str

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"ci95": self.ci95 and list(self.ci95)}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "Trust":
        """Trust from the values of `as_json`."""
        return cls(**{**fields, "ci95": fields["ci95"] and tuple(fields["ci95"])})

    def __str__(self) -> str:
        interval = f" {interval_text(self.ci95)}" if self.ci95 else ""
        return f"κ {self.kappa:.2f}{interval} with people on {self.data}, base rate {self.base_rate:.2f}"


class MessageReaders(Protocol):
    """Readers of some of `LABELS`."""

    @property
    def version(self) -> str:
        """Which readers these are; recorded with every figure and verdict that they take part in."""
        ...

    @property
    def trust(self) -> dict[str, Trust]:
        """Each label that can be read, and how far to trust the reading."""
        ...

    def reads(self, label: str, about: Exchange) -> bool:
        """Whether the label holds for the message. The label must be one of those in `trust`."""
        ...
