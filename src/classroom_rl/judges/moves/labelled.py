"""Reads messages of real tutors that people labelled, from files or from the Hub.

Three public data sets are known, in the form in which they were published and in a flat one with a message per row
(docs/classroom.md shows a row of each). A row's keys say which set it belongs to.
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
    HINT,
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
    """The rows of a file or a Hub data set, each with its place in words, such as "a.jsonl: line 3".

    The rows of a .json file are a list, or an object of objects of rows.

    Args:
        split: the split of a data set on the Hub.

    Raises:
        DataError: if it cannot be read.
    """
    path = Path(name)
    if path.suffix == ".json":
        yield from _rows_of_json(path)
    elif path.suffix == ".jsonl":
        yield from _rows_of_lines(path)
    elif is_local_name(path):
        raise DataError(f"{name}: labelled messages are read from .jsonl and .json files, and from the Hub.")
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
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    if isinstance(found, dict) and found and all(isinstance(each, dict) for each in found.values()):
        found = [row for rows in found.values() for row in rows.values()]  # CIMA: {"prepDataset": {"0": {…}, …}, …}
    if not isinstance(found, list):
        raise DataError(f"{path} holds no list of rows.")
    for number, row in enumerate(found, start=1):
        yield f"{path}: row {number}", _as_row(row, f"{path}: row {number}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _as_row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where} is no JSON object.")
    return row


CIMA, MRBENCH, MATHDIAL = "CIMA", "MRBench", "MathDial"
CITATIONS = {
    CIMA: "Stasaski, Kao and Hearst, CIMA: A Large Open Access Dialogue Dataset for Tutoring, BEA 2020",
    MRBENCH: "Maurya et al., Unifying AI Tutor Evaluation (MRBench), NAACL 2025",
    MATHDIAL: "Macina et al., MathDial, Findings of EMNLP 2023",
}
LICENCES = {CIMA: "CC BY 2.5", MRBENCH: "CC BY-SA 4.0", MATHDIAL: "CC BY-SA 4.0"}
"""The licence of each data set; a trained reader holds words of its data."""

LABELS_OF = {
    CIMA: (QUESTION, HINT, CORRECTION, TREATS_AS_WRONG, CONFIRMATION),
    MRBENCH: (REVEALS_ANSWER, ACTIONABLE, MISTAKE_IDENTIFIED),
    MATHDIAL: (TELLING,),
}
"""The labels that each data set has."""

_CIMA_MOVES = ("question", "hint", "correction", "confirmation", "other")
OF_DIMENSIONS = {
    REVEALS_ANSWER: "Revealing_of_the_Answer",
    ACTIONABLE: "Actionability",
    MISTAKE_IDENTIFIED: "Mistake_Identification",
}
"""The labels that stand for a dimension of MRBench."""

MathDialTurn = tuple[bool, str | None, str]
"""A turn of MathDial: whether the teacher speaks, the teacher's move (None: unlabelled), and the text."""

_SPEAKER = re.compile(r"(?:^|\n)\s*(Tutor|Teacher|Student)\s*:\s*")
_MOVE = re.compile(r"^\s*\((\w+)\)\s*")


@dataclass(frozen=True)
class LabelledMessage:
    """A tutor's message with what people said of it.

    Attributes:
        labels: those of `LABELS_OF[source]`, each with whether people gave it.
        source: the data set.
        lesson: the lesson or problem that it belongs to. All messages of a lesson are in one fold.
    """

    exchange: Exchange
    labels: Mapping[str, bool]
    source: str
    lesson: str


def read_labelled(name: str, split: str = "train") -> list[LabelledMessage]:
    """The labelled messages of a local .jsonl or .json file, or of a data set on the Hub.

    Args:
        split: the split of a data set on the Hub.

    Raises:
        DataError: if it cannot be read, holds rows of none of the known data sets, or is empty.
    """
    found: list[LabelledMessage] = []
    for where, row in numbered_rows(name, split):
        try:
            read = next(read for key, read in _READERS.items() if set(key) <= set(row))
        except StopIteration:
            raise DataError(
                f"{where} has the keys {', '.join(sorted(map(str, row)))[:200]}, which no known data "
                f"set has ({', '.join(LABELS_OF)}). docs/classroom.md shows a row of each."
            ) from None
        try:
            found.extend(_checked(each) for each in read(row))
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise DataError(f"{where} cannot be read: {type(error).__name__} {error}.") from error
    if not found:
        raise DataError(f"{name} holds no labelled message.")
    return found


def _checked(each: LabelledMessage) -> LabelledMessage:
    texts = (each.exchange.message, each.exchange.student, each.exchange.target, *each.exchange.before, each.lesson)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text is missing")
    if any(has_surrogates(text) for text in texts):
        raise ValueError("it holds half of a character (a lone surrogate)")
    if not all(isinstance(value, bool) for value in each.labels.values()):
        raise ValueError("a label is neither true nor false")
    return each


def _read_cima(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """A flat row: one message of the tutor."""
    target = row["target"]
    phrase = " ".join(target[part] for part in ("prep", "obj", "color") if target.get(part))
    yield _of_cima(row["history"], phrase, row["tutor"], row["tutor_actions"], json.dumps(target))


def _read_published_cima(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """A row as published: several tutors' messages to one conversation, each with a flag for each of `_CIMA_MOVES`."""
    phrase = " ".join(row[part] for part in ("prep", "obj", "color") if row.get(part))
    lesson = json.dumps({part: row.get(part) for part in ("obj", "engObj", "prep", "engPrep", "color", "engColor")})
    for text, flags in zip(row["tutorResponses"], row["tutorActions"], strict=True):
        moves = dict(zip(_CIMA_MOVES, flags, strict=True))
        yield _of_cima(row["past_convo"], phrase, text, moves, lesson)


def _of_cima(history: Sequence[str], phrase: str, text: str, moves: Mapping[str, bool], lesson: str) -> LabelledMessage:
    labels = {label: bool(moves[label]) for label in (QUESTION, HINT, CORRECTION, CONFIRMATION)}
    exchange = Exchange(text, history[-1], phrase, tuple(history[:-1]))
    return LabelledMessage(
        exchange, labels | {TREATS_AS_WRONG: labels[CORRECTION]}, CIMA, f"{lesson}{'|'.join(history[:2])}"
    )


def _read_mrbench(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """A flat row: one tutor's reply."""
    yield _of_mrbench(row["history"], row["solution"], row["tutor"], row["labels"])


def _read_published_mrbench(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """A row as published: the replies of several tutors to one conversation."""
    for reply in row["anno_llm_responses"].values():
        solution = row["Ground_Truth_Solution"]
        yield _of_mrbench(row["conversation_history"], solution, reply["response"], reply["annotation"])


def _of_mrbench(history: str, solution: str, text: str, found: Mapping[str, str]) -> LabelledMessage:
    """People answered each dimension with yes, no, or to some extent; only a yes counts."""
    labels = {label: found[name].startswith("Yes") for label, name in OF_DIMENSIONS.items()}
    opening = history.strip().split("\n")[0][:400]
    lesson = history if is_unknown(solution) else opening + solution
    return LabelledMessage(exchange_of_mrbench(history, solution, text), labels, MRBENCH, lesson)


def is_unknown(solution: str) -> bool:
    """Whether MRBench has no solution of a problem."""
    return solution.strip() == "Not Available"


def exchange_of_mrbench(history: str, solution: str, text: str) -> Exchange:
    """What a reader is shown of a reply in MRBench.

    Args:
        history: the conversation before it as one text, "Tutor: … Student: …".
    """
    parts = _SPEAKER.split(history.replace("\xa0", " "))
    said = [(role, each.strip()) for role, each in zip(parts[1::2], parts[2::2], strict=True)]
    students = [place for place, (role, _) in enumerate(said) if role == "Student"]
    last = students[-1] if students else len(said)
    return Exchange(
        text,
        said[last][1] if students else "",
        "" if is_unknown(solution) else last_number(solution),
        tuple(each for _, each in said[:last]),
    )


def _read_mathdial(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    """A flat row: a whole dialogue, as a list of turns."""
    turns = [(turn["role"] == "teacher", turn["move"], turn["text"]) for turn in row["turns"]]
    yield from _of_mathdial(row, turns)


def _read_published_mathdial(row: Mapping[str, Any]) -> Iterator[LabelledMessage]:
    yield from _of_mathdial(row, turns_of_mathdial(row["conversation"]))


def turns_of_mathdial(conversation: str) -> list[MathDialTurn]:
    """The turns of a dialogue as published, one text: "Teacher: (focus)…|EOM|Mariana: …"."""
    turns = []
    for part in conversation.split("|EOM|"):
        speaker, _, text = part.partition(":")
        teaches = speaker.strip() == "Teacher"
        move = _MOVE.match(text) if teaches else None
        turns.append((teaches, move[1] if move else None, text[move.end() :] if move else text.strip()))
    return turns


def _of_mathdial(row: Mapping[str, Any], turns: Sequence[MathDialTurn]) -> Iterator[LabelledMessage]:
    exchanges = exchanges_of_mathdial(row["question"], row["ground_truth"], row["student_incorrect_solution"], turns)
    for (_, move, _), exchange in zip(turns, exchanges, strict=True):
        if exchange is not None and move is not None:
            yield LabelledMessage(exchange, {TELLING: move == "telling"}, MATHDIAL, row["question"])


def exchanges_of_mathdial(
    question: str, solution: str, student: str, turns: Sequence[MathDialTurn]
) -> Iterator[Exchange | None]:
    """What a reader is shown of each turn of the teacher; None for each turn of the student.

    Args:
        student: the student's attempt at the problem, which stands before the first turn.
    """
    before = (question,)
    for teaches, _, text in turns:
        yield Exchange(text, student, last_number(solution), before) if teaches else None
        if teaches:
            before = (*before, student, text)
        else:
            student = text


_READERS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Iterator[LabelledMessage]]] = {
    ("tutor_actions", "history", "target"): _read_cima,
    ("tutorActions", "tutorResponses", "past_convo"): _read_published_cima,
    ("labels", "history", "solution"): _read_mrbench,
    ("anno_llm_responses", "conversation_history"): _read_published_mrbench,
    ("turns", "ground_truth"): _read_mathdial,
    ("conversation", "ground_truth", "student_incorrect_solution"): _read_published_mathdial,
}
