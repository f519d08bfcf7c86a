"""The reward of a student under training: how many of its messages are those of the learner that it plays. It is never
the tutor's: a student is paid for erring as drawn, not for lessons that go well.

Rules have to tell right from wrong, so it is for lessons in the quickstart's language.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.environments.toy_language.grammar import (
    SUBJECTS,
    Sentence,
    corrected,
    find_slips,
    parse_question,
    parse_sentence,
)
from classroom_rl.judges.feedback import feedback_kind
from classroom_rl.judges.messages import ParsedPlan, parrots, questions_asked, read_plan
from classroom_rl.judges.tricks import calls_right, find_false_hint
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import Turn


@dataclass(frozen=True)
class StudentMessage:
    """What rules find in a message of the student.

    Attributes:
        drawn: whether the prompt that asks for an error was drawn.
        errors: the number of its errors.
        answers: whether it is one sentence of the language, about what the tutor asked last, if anything. One that
            speaks as the tutor is not.
        repeats: whether it repeats the tutor's words, other than to repair.
        helped: whether the tutor's reply to the same sentence with an error, in the student's last message, scaffolds;
            None for any other message.
    """

    drawn: bool
    errors: int
    answers: bool
    repeats: bool
    helped: bool | None

    @property
    def faithful(self) -> bool:
        """Whether it is as the learner would write it: an answer with exactly one error if an error was drawn, and
        without one if not. A sentence with an error that no reply has scaffolded stays wrong."""
        expected = self.errors > 0 if self.helped is False else self.errors == int(self.drawn)
        return self.answers and not self.repeats and expected


def student_messages(problem: str, turns: Sequence[Turn]) -> list[StudentMessage]:
    """What rules find in each message of the student whose persona was drawn; [] outside the quickstart's language."""
    plan = read_plan(problem)
    return list(_messages(plan, turns)) if plan.lesson is not None else []


def _messages(plan: ParsedPlan, turns: Sequence[Turn]) -> Iterator[StudentMessage]:
    questions: set[str] = set()
    last_text, teacher_text = "", ""
    for turn in turns:
        text = visible_text(turn.text)
        if turn.role == "teacher":
            teacher_text, questions = text, questions_asked(text) or questions
            continue
        if turn.persona in (ERROR_PERSONA, CORRECT_PERSONA):
            sentence = parse_sentence(text)
            answers_question = (
                not questions or sentence is not None and any(_is_about(sentence, question) for question in questions)
            )
            tries_again = bool(find_slips(last_text)) and _is_again(last_text, text)
            helped = scaffolds(last_text, teacher_text, plan) if tries_again else None
            # Whoever was told the right form says it back.
            repeats = not helped and parrots(text, teacher_text)
            drawn, errors = turn.persona == ERROR_PERSONA, len(find_slips(text))
            yield StudentMessage(drawn, errors, sentence is not None and answers_question, repeats, helped)
        last_text = text


def _is_about(sentence: Sentence, question: str) -> bool:
    parsed = parse_question(question)
    subject_and_time = (SUBJECTS[parsed.subject], parsed.time.lower()) if parsed else None
    return subject_and_time == (sentence.subject, sentence.time.lower()) and sentence.verb.startswith(parsed.verb)


def _is_again(last: str, text: str) -> bool:
    """Whether two messages are the same sentence but for its errors."""
    earlier, later = parse_sentence(last), parse_sentence(text)
    if earlier is None or later is None:
        return False
    earlier, later = corrected(earlier), corrected(later)
    return (earlier.time, earlier.subject, earlier.verb) == (later.time, later.subject, later.verb)


def scaffolds(error: str, reply: str, plan: ParsedPlan) -> bool:
    """Whether a reply to an error helps to repair it: feedback that is not false, and that names the right kind of
    error if it names one."""
    kind = feedback_kind(error, reply, plan)
    if kind == "none" or calls_right(reply) or find_false_hint(error, reply, plan):
        return False
    return kind != "metalinguistic" or any(slip.kind in reply.casefold() for slip in find_slips(error))


def fidelity(problem: str, turns: Sequence[Turn]) -> float | None:
    """The share of the student's messages that are faithful; None if there is none that rules can tell."""
    messages = student_messages(problem, turns)
    return fmean(message.faithful for message in messages) if messages else None
