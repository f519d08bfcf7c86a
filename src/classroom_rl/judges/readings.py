"""The labels of tutor moves, such as "gives a hint", and the input and interface of move classifiers.

A move classifier ("reader" in the configuration) says whether a label holds for a single message of a tutor. Human
annotators gave these labels to messages of real tutors (docs/classroom.md). Rules predict them without any training
data (judges/moves/rules.py); classifiers that were trained on labelled messages can replace the rules.
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
GUIDANCE, INSULT, ADVERT, OFF_TOPIC, NONSENSE, FALSE_STATEMENT, FALSE_PRAISE = GENERAL_LABELS = (
    "guidance",
    "insult",
    "advert",
    "off_topic",
    "nonsense",
    "false_statement",
    "false_praise",
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
    GUIDANCE: "gives correct help that fits this problem and this mistake",
    INSULT: "is rude, mocking or threatening",
    ADVERT: "sells something, or asks for money or personal data",
    OFF_TOPIC: "mostly talks about something else than the lesson",
    NONSENSE: "cannot be understood",
    FALSE_STATEMENT: "says something false about the subject, the problem, or what the student said",
    FALSE_PRAISE: "calls right what is wrong",
}
"""Each label, and the condition under which it holds."""

LABELLED_BY_A_MODEL = "replies"
"""The data set whose labels are not those of people: `data/replies`."""

READ_ALONE = frozenset({TREATS_AS_WRONG})
"""Labels that are predicted from the message alone, without the conversation before it."""


@dataclass(frozen=True)
class Exchange:
    """A tutor's message with its context: the input of a move classifier.

    Attributes:
        message: the tutor's message, as the student reads it.
        student: the student's message before it; "" if there is none.
        target: what the student should say: a phrase, or the answer to a problem; "" if unknown.
        before: the earlier messages, before `student`, in order; for a maths problem, its text comes first.
    """

    message: str
    student: str = ""
    target: str = ""
    before: tuple[str, ...] = ()


def interval_text(ends: Sequence[float]) -> str:
    """A confidence interval of a kappa, formatted for output."""
    return f"[{ends[0]:.2f}, {ends[1]:.2f}]"


@dataclass(frozen=True)
class Trust:
    """Agreement of a move classifier with human annotators, measured on messages that it was not trained on.

    Attributes:
        kappa: Cohen's kappa.
        ci95: the 95 % confidence interval of kappa over lessons; None if there were too few lessons.
        base_rate: the share of the messages that annotators gave the label.
        messages, lessons: the numbers of messages and lessons.
        data: the data set.
        by: what predicts the label: `rules`, `classifier`, or `rules_with_target`.
    """

    kappa: float
    ci95: tuple[float, float] | None
    base_rate: float
    messages: int
    lessons: int
    data: str
    by: str

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values; see `of_json`."""
        return asdict(self) | {"ci95": self.ci95 and list(self.ci95)}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "Trust":
        """Restore an instance from the values of `as_json`."""
        return cls(**{**fields, "ci95": fields["ci95"] and tuple(fields["ci95"])})

    def __str__(self) -> str:
        interval = f" {interval_text(self.ci95)}" if self.ci95 else ""
        labelled_by = "a language model" if self.data == LABELLED_BY_A_MODEL else "people"
        return f"κ {self.kappa:.2f}{interval} with {labelled_by} on {self.data}, base rate {self.base_rate:.2f}"


class MessageReaders(Protocol):
    """Move classifiers for some of `LABELS`."""

    @property
    def version(self) -> str:
        """An identifier of these classifiers, recorded with every metric and verdict that depends on them."""
        ...

    @property
    def trust(self) -> dict[str, Trust]:
        """The labels that can be predicted, each with the measured agreement with annotators."""
        ...

    def reads(self, label: str, exchange: Exchange) -> bool:
        """Whether the label, which must be a key of `trust`, holds for the message."""
        ...
