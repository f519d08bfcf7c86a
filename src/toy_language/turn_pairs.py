"""What happened between a student's message and the teacher's reply, found in the text by the embedded rubric.

What counts as an error turn is what the text holds, not the persona that was asked for: a small model that plays
`error_student` sometimes says a right sentence, and a tutor that hints at an error there is wrong. The persona is
kept beside it, so that reports can show how faithfully the student played its part.
"""

from dataclasses import dataclass
from typing import Optional

from src.classroom.conversation import visible_text
from src.classroom.record import ConversationRecord
from src.errors import DataError
from src.toy_language.grammar import Slip, find_slips
from src.toy_language.lessons import parse_problem
from src.toy_language.rubric_judge import analyse


@dataclass(frozen=True)
class Exchange:
    """A student's message with the teacher's reply to it.

    Attributes:
        student_turn, teacher_turn: positions of the two messages in the conversation, from 0.
        persona: the prompt that the student was given for this message; None for an opening attempt.
        errors: what is wrong in the student's text, in the rubric's order; () if nothing is.
        scaffolded: the reply hints at the right kind of error and leaves the repair to the student.
        corrected: the reply treats a message without an error as if it had one.
        comment: what the rubric says of the reply, in a few words.
    """

    student_turn: int
    teacher_turn: int
    persona: Optional[str]
    errors: tuple[Slip, ...]
    scaffolded: bool
    corrected: bool
    comment: str


def read_exchanges(record: ConversationRecord) -> Optional[list[Exchange]]:
    """The exchanges of a conversation in order, or None if its problem is no lesson of the quickstart, in whose
    grammar alone errors can be found by rules. A student's message that nobody replied to makes no exchange."""
    try:
        parse_problem(record.problem)
    except DataError:
        return None
    transcript = [{"role": turn.role, "content": visible_text(turn.text)} for turn in record.turns]
    exchanges = []
    for finding in analyse(transcript, record.problem):
        if finding.replies_to is None:
            continue
        exchanges.append(
            Exchange(
                student_turn=finding.replies_to,
                teacher_turn=finding.index,
                persona=record.turns[finding.replies_to].persona,
                errors=tuple(find_slips(transcript[finding.replies_to]["content"])),
                scaffolded=finding.scaffolded,
                corrected=finding.falsely_corrected,
                comment=finding.forward_reason,
            )
        )
    return exchanges
