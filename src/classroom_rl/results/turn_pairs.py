"""Pairs of a student message and the teacher's reply, with the embedded rubric's findings on both.

The text decides what an error turn is, not the persona: a small model that plays `error_student` sometimes says a right
sentence, and a tutor that hints at an error there is wrong. The persona is kept as well, so that reports can show how
faithfully the student played it.
"""

from dataclasses import dataclass
from typing import Optional

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.grammar import Slip, find_slips
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.errors import DataError
from classroom_rl.judges.toy_judge import analyse
from classroom_rl.rollout.thoughts import visible_messages


@dataclass(frozen=True)
class Exchange:
    """A student message with the teacher's reply to it.

    Attributes:
        student_turn, teacher_turn: positions of the two messages in the conversation, from 0.
        persona: the persona that was drawn for the student's message; None for an opening attempt.
        errors: the slips in the student's text, in the order of `find_slips`; () without any.
        scaffolded: the reply hints at the right kind of error and lets the student correct it.
        corrected: the reply treats a message without an error as if it had one.
        comment: the rubric's comment on the reply, in a few words.
    """

    student_turn: int
    teacher_turn: int
    persona: Optional[str]
    errors: tuple[Slip, ...]
    scaffolded: bool
    corrected: bool
    comment: str


def read_exchanges(record: ConversationRecord) -> Optional[list[Exchange]]:
    """The exchanges of a conversation in order. A student message without a reply gives no exchange.

    Returns None if the problem is no lesson of the quickstart: rules find errors in its grammar only."""
    try:
        parse_problem(record.problem)
    except DataError:
        return None
    transcript = visible_messages(record.turns)
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
