"""Reads MathDial: dialogues of teachers with a simulated student, the teacher's moves labelled by the teacher.

Macina et al., "MathDial", Findings of EMNLP 2023. Read in the published form, where the turns are one text, and in a
flat one with a list of turns (docs/published_benchmarks.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.checked_rows import PublishedRow, read_rows
from classroom_rl.judges.moves.labelled import MathDialTurn, exchanges_of_mathdial, turns_of_mathdial
from classroom_rl.judges.readings import Exchange

MOVES = ("focus", "probing", "telling", "generic")
TELLING_MOVE = "telling"


class _Turn(PublishedRow):
    role: str
    text: str
    move: str | None


class _Dialogue(PublishedRow):
    question: str
    ground_truth: str
    student_incorrect_solution: str


class _Flat(_Dialogue):
    turns: list[_Turn]

    def said(self) -> list[MathDialTurn]:
        return [(turn.role == "teacher", turn.move, turn.text) for turn in self.turns]


class _Published(_Dialogue):
    conversation: str

    def said(self) -> list[MathDialTurn]:
        return turns_of_mathdial(self.conversation)


@dataclass(frozen=True)
class TeacherTurn:
    """A turn of the teacher that answers the student.

    Attributes:
        dialogue: names the dialogue.
        number: its place among the turns of the dialogue, from 0.
        student_solution: the student's attempt at the problem, before the dialogue.
        before: the turns before it, as {"role": "teacher" or "student", "content"}.
        text: what the teacher said.
        move: one of `MOVES`.
        exchange: what a reader of single messages is shown of the teacher's turn.
    """

    dialogue: str
    number: int
    problem: str
    solution: str
    student_solution: str
    before: tuple[dict[str, str], ...]
    text: str
    move: str
    exchange: Exchange

    def exchange_with(self, text: str) -> Exchange:
        """What a reader is shown if someone else says `text` in the teacher's place."""
        return replace(self.exchange, message=text)


def read_mathdial(name: str, split: str) -> list[TeacherTurn]:
    """The labelled turns of teachers that answer a turn of the student.

    Raises:
        DataError: naming file, row and field, if it cannot be read or holds no such turn.
    """
    found = [turn for where, row in read_rows(name, split, _Flat, _Published) for turn in _turns(where, row)]
    if not found:
        raise DataError(f"{name} holds no labelled turn of a teacher that answers a student.")
    return found


def _turns(where: str, row: _Flat | _Published) -> Iterator[TeacherTurn]:
    said = row.said()
    exchanges = exchanges_of_mathdial(row.question, row.ground_truth, row.student_incorrect_solution, said)
    before: tuple[dict[str, str], ...] = ()
    for number, ((teaches, move, text), exchange) in enumerate(zip(said, exchanges, strict=True)):
        if teaches and move not in (None, *MOVES):
            raise DataError(f"{where}: turn {number} has the move {move!r}; there are {', '.join(MOVES)}.")
        if exchange is not None and move is not None and before and before[-1]["role"] == "student":
            about = (row.question, row.ground_truth, row.student_incorrect_solution)
            yield TeacherTurn(where, number, *about, before, text.strip(), move, exchange)
        before = (*before, {"role": "teacher" if teaches else "student", "content": text.strip()})
