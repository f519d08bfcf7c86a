"""Reads MRBench: tutors' replies to a student's mistake in maths, labelled by people on eight dimensions.

Maurya et al., "Unifying AI Tutor Evaluation", NAACL 2025. Two file formats are read: the published one, a conversation
with the replies of several tutors, and a flat one with one reply per row (docs/evaluation.md).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import PublishedRow, read_rows
from classroom_rl.judges.moves.labelled import OF_DIMENSIONS, exchange_of_mrbench, is_unknown
from classroom_rl.judges.readings import Exchange

NO, SOMEWHAT, YES = _EXTENT = ("no", "to some extent", "yes")
INCORRECT, CORRECT = "yes, incorrect", "yes, correct"
OFFENSIVE, NEUTRAL, ENCOURAGING = _TONES = ("offensive", "neutral", "encouraging")


@dataclass(frozen=True)
class Dimension:
    """One of the eight questions about a reply.

    Attributes:
        answers: the possible answers; from least to most if `ordinal`.
        yes: the answers that count as yes where only yes and no are distinguished.
    """

    answers: tuple[str, ...] = _EXTENT
    yes: frozenset[str] = frozenset({YES})
    ordinal: bool = True


DIMENSIONS = {
    "mistake_identification": Dimension(),
    "mistake_location": Dimension(),
    "revealing_of_the_answer": Dimension((NO, INCORRECT, CORRECT), frozenset({INCORRECT, CORRECT}), ordinal=False),
    "providing_guidance": Dimension(),
    "actionability": Dimension(),
    "coherence": Dimension(),
    "tutor_tone": Dimension(_TONES, frozenset({ENCOURAGING})),
    "humanlikeness": Dimension(),
}
"""Name in the data, in lower case → dimension."""

READ_AS = {name.lower(): label for label, name in OF_DIMENSIONS.items()}
"""Dimension → the label of `classroom_rl.judges.readings` that corresponds to its yes."""

_REVEALS = re.compile(r"yes \((?:and|but) the (?:revealed )?answer is (in)?correct\)")


class _Annotated(PublishedRow):
    response: str
    annotation: dict[str, str | None]


class _Conversation(PublishedRow):
    """A row as published. Loaded as a table, a tutor without a reply to this conversation is null."""

    conversation_id: str
    conversation_history: str
    Ground_Truth_Solution: str
    anno_llm_responses: dict[str, _Annotated | None]


class _Flat(PublishedRow):
    history: str
    solution: str
    tutor: str
    labels: dict[str, str | None]
    id: str = ""


@dataclass(frozen=True)
class LabelledReply:
    """A tutor's reply with people's labels.

    Attributes:
        id: names the reply.
        history: the conversation before it, as one text, which also names the dialogue.
        solution: the problem's solution; "" if unknown.
        text: the reply.
        labels: people's answer in each of `DIMENSIONS`.
        exchange: the reply with its context, as input of a move classifier.
    """

    id: str
    history: str
    solution: str
    text: str
    labels: Mapping[str, str]
    exchange: Exchange


def read_mrbench(name: str, split: str) -> list[LabelledReply]:
    """Read the labelled replies of a file, or of a data set on the Hub.

    Raises:
        DataError: naming file, row and field, if it cannot be read or is empty.
    """
    replies = [reply for where, row in read_rows(name, split, _Conversation, _Flat) for reply in _replies(where, row)]
    if not replies:
        raise DataError(f"{name} holds no labelled reply.")
    return replies


def _replies(where: str, row: _Conversation | _Flat) -> Iterator[LabelledReply]:
    if isinstance(row, _Flat):
        yield _reply(row.id or where, f"{where}: field labels", row.history, row.solution, row.tutor, row.labels)
        return
    for tutor, reply in row.anno_llm_responses.items():
        if reply is not None:
            field = f"{where}: field anno_llm_responses.{tutor}.annotation"
            about = (row.conversation_history, row.Ground_Truth_Solution, reply.response, reply.annotation)
            yield _reply(f"{row.conversation_id}-{tutor}", field, *about)


def _reply(
    name: str, field: str, history: str, solution: str, text: str, labels: Mapping[str, str | None]
) -> LabelledReply:
    labelled = {key.lower(): value for key, value in labels.items() if value is not None}
    missing = [dimension for dimension in DIMENSIONS if dimension not in labelled]
    if missing:
        raise DataError(f"{field} has no {', '.join(missing)}; there are: {', '.join(labels)}.")
    answers = {dimension: _answer(f"{field}.{dimension}", dimension, labelled[dimension]) for dimension in DIMENSIONS}
    clean_history = "\n".join(line.strip() for line in history.replace("\xa0", " ").splitlines() if line.strip())
    shown = "" if is_unknown(solution) else solution.strip()
    exchange = exchange_of_mrbench(history, solution, text)
    return LabelledReply(name, clean_history, shown, text.strip(), answers, exchange)


def _answer(field: str, dimension: str, published: str) -> str:
    answer = published.strip().lower()
    if reveals := _REVEALS.fullmatch(answer):
        answer = INCORRECT if reveals[1] else CORRECT
    allowed = DIMENSIONS[dimension].answers
    if answer not in allowed:
        raise DataError(f"{field} is {published!r}, which is none of the known answers ({'; '.join(allowed)}).")
    return answer
