"""Loads messages of real tutors with labels by human annotators, from local files or from the Hugging Face Hub.

Three public data sets are supported: CIMA, MRBench and MathDial. Each is read in its published format and in a
flattened one (docs/classroom.md shows a row of each). The fourth is the project's own, `data/replies`,
which no person has labelled. The keys of a row determine its data set and format.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from classroom_rl.config.base import DataSource
from classroom_rl.errors import DataError
from classroom_rl.judges.moves.rules import last_number
from classroom_rl.judges.readings import (
    ACTIONABLE,
    CONFIRMATION,
    CORRECTION,
    GENERAL_LABELS,
    HINT,
    LABELLED_BY_A_MODEL,
    MATHS_LABELS,
    MISTAKE_IDENTIFIED,
    QUESTION,
    REVEALS_ANSWER,
    TELLING,
    TREATS_AS_WRONG,
    Exchange,
)
from classroom_rl.rollout.datasets import is_local_name, load_rows
from classroom_rl.rollout.text import has_surrogates


def numbered_rows(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .jsonl, .json or .parquet file, or of a split of a data set on the Hub, each with its location for
    messages, such as "a.jsonl: line 3".

    A .json file holds a list of rows, or an object whose values are objects of rows.

    Raises:
        DataError: if it cannot be read.
    """
    path = Path(name)
    if path.suffix == ".parquet":
        table = load_rows(DataSource(name))
        for number, row in enumerate(zip(*(table[column] for column in table.column_names), strict=True), start=1):
            yield f"{name}: row {number}", dict(zip(table.column_names, row, strict=True))
    elif path.suffix == ".json":
        yield from _rows_of_json(path)
    elif path.suffix == ".jsonl":
        yield from _rows_of_lines(path)
    elif is_local_name(path):
        raise DataError(f"{name}: labelled messages are read from .jsonl, .json and .parquet files, and from the Hub.")
    else:
        for number, row in enumerate(load_rows(DataSource(name, split)), start=1):
            yield f"{name} (split {split}): row {number}", row


def _rows_of_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON: {error}.") from error
        yield f"{path}: line {number}", _as_row(row, f"{path}: line {number}")


def _rows_of_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    if isinstance(content, dict) and content and all(isinstance(group, dict) for group in content.values()):
        content = [row for rows in content.values() for row in rows.values()]  # CIMA: {"prepDataset": {"0": {…}, …}, …}
    if not isinstance(content, list):
        raise DataError(f"{path} holds no list of rows.")
    for number, row in enumerate(content, start=1):
        yield f"{path}: row {number}", _as_row(row, f"{path}: row {number}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _as_row(row: Any, location: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{location} is no JSON object.")
    return row


REPLIES, CIMA, MRBENCH, MATHDIAL = LABELLED_BY_A_MODEL, "CIMA", "MRBench", "MathDial"
CITATIONS = {
    REPLIES: "data/replies of this project: a language model wrote them, and labelled them twice by written criteria",
    CIMA: "Stasaski, Kao and Hearst, CIMA: A Large Open Access Dialogue Dataset for Tutoring, BEA 2020",
    MRBENCH: "Maurya et al., Unifying AI Tutor Evaluation (MRBench), NAACL 2025",
    MATHDIAL: "Macina et al., MathDial, Findings of EMNLP 2023",
}
LICENCES = {REPLIES: "Apache-2.0", CIMA: "CC BY 2.5", MRBENCH: "CC BY-SA 4.0", MATHDIAL: "CC BY-SA 4.0"}
"""The licence of each data set. It also concerns classifiers trained on the data: they contain n-grams of its texts."""

LABELS_OF = {
    REPLIES: (QUESTION, HINT, CORRECTION, CONFIRMATION, *MATHS_LABELS, *GENERAL_LABELS),
    CIMA: (QUESTION, HINT, CORRECTION, TREATS_AS_WRONG, CONFIRMATION),
    MRBENCH: (REVEALS_ANSWER, ACTIONABLE, MISTAKE_IDENTIFIED),
    MATHDIAL: (TELLING,),
}
"""The labels that each data set provides. Where several have a label, the last of them is taken: people's come last."""

_CIMA_MOVES = ("question", "hint", "correction", "confirmation", "other")
OF_DIMENSIONS = {
    REVEALS_ANSWER: "Revealing_of_the_Answer",
    ACTIONABLE: "Actionability",
    MISTAKE_IDENTIFIED: "Mistake_Identification",
}
"""The labels that correspond to a dimension of MRBench, and the key of that dimension in its annotations."""

MathDialTurn = tuple[bool, str | None, str]
"""A turn of MathDial: whether the teacher speaks, the label of the teacher's move (None without one), and the text."""

_SPEAKER = re.compile(r"(?:^|\n)\s*(Tutor|Teacher|Student)\s*:\s*")
_MOVE = re.compile(r"^\s*\((\w+)\)\s*")


@dataclass(frozen=True)
class LabelledMessage:
    """A tutor's message with the labels of human annotators.

    Attributes:
        exchange: the message and its context.
        labels: each label of `LABELS_OF[source]`, and whether the annotators gave it.
        source: the data set.
        lesson: an identifier of the lesson or problem. Cross-validation keeps all messages of a lesson in one fold.
    """

    exchange: Exchange
    labels: Mapping[str, bool]
    source: str
    lesson: str


def read_labelled(name: str, split: str = "train") -> list[LabelledMessage]:
    """Load the labelled messages of a local .jsonl or .json file, or of a split of a data set on the Hub.

    Raises:
        DataError: if it cannot be read, has a row in none of the supported formats, or is empty.
    """
    messages: list[LabelledMessage] = []
    for location, row in numbered_rows(name, split):
        try:
            parse_row = next(parse_row for keys, parse_row in _PARSERS.items() if set(keys) <= set(row))
        except StopIteration:
            raise DataError(
                f"{location} has the keys {', '.join(sorted(map(str, row)))[:200]}, which no known data "
                f"set has ({', '.join(LABELS_OF)}). docs/classroom.md shows a row of each."
            ) from None
        try:
            messages.extend(_checked(message) for message in parse_row(row))
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise DataError(f"{location} cannot be read: {type(error).__name__} {error}.") from error
    if not messages:
        raise DataError(f"{name} holds no labelled message.")
    return messages


def _checked(message: LabelledMessage) -> LabelledMessage:
    """The message itself, if its texts and labels have the right types; raises `ValueError` otherwise."""
    exchange = message.exchange
    texts = (exchange.message, exchange.student, exchange.target, *exchange.before, message.lesson)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text is missing")
    if any(has_surrogates(text) for text in texts):
        raise ValueError("it holds half of a character (a lone surrogate)")
    if not all(isinstance(value, bool) for value in message.labels.values()):
        raise ValueError("a label is neither true nor false")
    return message


def _read_reply(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """Parse a row of the project's own replies. A label holds if both readings gave it."""
    *before, (_, student) = row["context"]
    target = last_number(row["answer"]) if row["subject"] == "maths" else row["answer"]
    exchange = Exchange(row["reply"], student, target, (row["problem"], *(text for _, text in before)))
    agreed = set(row["labels_1"]) & set(row["labels_2"])
    yield LabelledMessage(exchange, {label: label in agreed for label in LABELS_OF[REPLIES]}, REPLIES, row["lesson"])


def _read_cima(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """Parse a flattened row: one message of the tutor."""
    target = row["target"]
    phrase = " ".join(target[part] for part in ("prep", "obj", "color") if target.get(part))
    yield _cima_message(row["history"], phrase, row["tutor"], row["tutor_actions"], json.dumps(target))


def _read_published_cima(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """Parse a published row: replies of several tutors in one conversation, each with one flag per move in
    `_CIMA_MOVES`."""
    phrase = " ".join(row[part] for part in ("prep", "obj", "color") if row.get(part))
    lesson = json.dumps({part: row.get(part) for part in ("obj", "engObj", "prep", "engPrep", "color", "engColor")})
    for text, flags in zip(row["tutorResponses"], row["tutorActions"], strict=True):
        moves = dict(zip(_CIMA_MOVES, flags, strict=True))
        yield _cima_message(row["past_convo"], phrase, text, moves, lesson)


def _cima_message(
    history: Sequence[str], phrase: str, text: str, moves: Mapping[str, bool], lesson: str
) -> LabelledMessage:
    labels = {label: bool(moves[label]) for label in (QUESTION, HINT, CORRECTION, CONFIRMATION)}
    exchange = Exchange(text, history[-1], phrase, tuple(history[:-1]))
    return LabelledMessage(
        exchange, labels | {TREATS_AS_WRONG: labels[CORRECTION]}, CIMA, f"{lesson}{'|'.join(history[:2])}"
    )


def _read_mrbench(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """Parse a flattened row: the reply of one tutor."""
    yield _mrbench_message(row["history"], row["solution"], row["tutor"], row["labels"])


def _read_published_mrbench(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """Parse a published row: replies of several tutors in one conversation."""
    for reply in row["anno_llm_responses"].values():
        solution = row["Ground_Truth_Solution"]
        yield _mrbench_message(row["conversation_history"], solution, reply["response"], reply["annotation"])


def _mrbench_message(history: str, solution: str, text: str, annotations: Mapping[str, str]) -> LabelledMessage:
    """Annotators rated each dimension as yes, no, or to some extent; only a yes counts as the label."""
    labels = {label: annotations[name].startswith("Yes") for label, name in OF_DIMENSIONS.items()}
    opening = history.strip().split("\n")[0][:400]
    lesson = history if is_unknown(solution) else opening + solution
    return LabelledMessage(exchange_of_mrbench(history, solution, text), labels, MRBENCH, lesson)


def is_unknown(solution: str) -> bool:
    """Whether MRBench provides no solution to a problem."""
    return solution.strip() == "Not Available"


def turns_of_mrbench(history: str) -> list[tuple[str, str]]:
    """The turns of a conversation in MRBench: ("Tutor", "Teacher" or "Student", text). The first holds the problem."""
    parts = _SPEAKER.split(history.replace("\xa0", " "))
    return [(role, content.strip()) for role, content in zip(parts[1::2], parts[2::2], strict=True)]


def exchange_of_mrbench(history: str, solution: str, text: str) -> Exchange:
    """The classifier input for the reply `text` of a tutor in MRBench, after the conversation "Tutor: … Student: …"."""
    turns = turns_of_mrbench(history)
    student_turns = [index for index, (role, _) in enumerate(turns) if role == "Student"]
    last_index = student_turns[-1] if student_turns else len(turns)
    return Exchange(
        text,
        turns[last_index][1] if student_turns else "",
        "" if is_unknown(solution) else last_number(solution),
        tuple(content for _, content in turns[:last_index]),
    )


def _read_mathdial(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """Parse a flattened row: a whole dialogue as a list of turns."""
    turns = [(turn["role"] == "teacher", turn["move"], turn["text"]) for turn in row["turns"]]
    yield from _mathdial_messages(row, turns)


def _read_published_mathdial(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    yield from _mathdial_messages(row, turns_of_mathdial(row["conversation"]))


def turns_of_mathdial(conversation: str) -> list[MathDialTurn]:
    """The turns of a published dialogue, which is one text: "Teacher: (focus)…|EOM|Mariana: …"."""
    turns = []
    for part in conversation.split("|EOM|"):
        speaker, _, text = part.partition(":")
        is_teacher = speaker.strip() == "Teacher"
        move = _MOVE.match(text) if is_teacher else None
        turns.append((is_teacher, move[1] if move else None, text[move.end() :] if move else text.strip()))
    return turns


def _mathdial_messages(row: Mapping[str, Any], turns: Sequence[MathDialTurn]) -> Iterator[LabelledMessage]:
    exchanges = exchanges_of_mathdial(row["question"], row["ground_truth"], row["student_incorrect_solution"], turns)
    for (_, move, _), exchange in zip(turns, exchanges, strict=True):
        if exchange is not None and move is not None:
            yield LabelledMessage(exchange, {TELLING: move == "telling"}, MATHDIAL, row["question"])


def exchanges_of_mathdial(
    question: str, solution: str, student: str, turns: Sequence[MathDialTurn]
) -> Iterator[Exchange | None]:
    """The classifier input for each turn of the teacher; None for each turn of the student. `student` is the student's
    attempt at the problem, before the first turn."""
    before = (question,)
    for is_teacher, _, text in turns:
        yield Exchange(text, student, last_number(solution), before) if is_teacher else None
        if is_teacher:
            before = (*before, student, text)
        else:
            student = text


_PARSERS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Iterator[LabelledMessage]]] = {
    ("labels_1", "labels_2", "context"): _read_reply,
    ("tutor_actions", "history", "target"): _read_cima,
    ("tutorActions", "tutorResponses", "past_convo"): _read_published_cima,
    ("labels", "history", "solution"): _read_mrbench,
    ("anno_llm_responses", "conversation_history"): _read_published_mrbench,
    ("turns", "ground_truth"): _read_mathdial,
    ("conversation", "ground_truth", "student_incorrect_solution"): _read_published_mathdial,
}
"""The parser of each format, by the keys that its rows have. A row may have more keys."""
