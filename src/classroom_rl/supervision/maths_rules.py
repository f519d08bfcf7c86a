"""Rules that review a single message of a mathematics tutor.

They decide what a program can decide for certain: the reference answer in the message, wrong arithmetic, nothing for
the student to do, a message too long, repeated, or a goodbye too early. Where they cannot tell, a message is valid: a
model is asked for the rest, such as whether the tutor listens, or takes a step that the student could take.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from classroom_rl.judges.messages import read_message, sentences
from classroom_rl.judges.readings import REVEALS_ANSWER, Exchange, MessageReaders
from classroom_rl.judges.reference_answers import (
    Equation,
    Reference,
    equations,
    gives_away,
    has_been_said,
    read_reference,
)
from classroom_rl.rollout.reviews import MessageToReview
from classroom_rl.rollout.text import normal
from classroom_rl.supervision.faults import (
    Fault,
    ends,
    faults_of_form,
    is_in_another_script,
    is_not_english,
    repeats_earlier,
    says,
)

MOST_WORDS = 160
"""A longer message is too long. The tutor's prompt asks for at most 80 words; only clear cases count."""

MOST_CHARACTERS = 1600
"""The same bound for texts without spaces."""

MOST_QUESTIONS = 4
"""A message with more question marks asks too much at once. The tutor's prompt asks for one question."""

_VERBS = (
    "say|tell|try|repeat|answer|write|choose|complete|describe|give|explain|finish|find|calculate|compute|work|solve|draw|"
    "sketch|simplify|factor(?:ise|ize)?|expand|substitute|plug|put|set|count|compare|show|prove|estimate|go|continue|look|"
    "check|think|consider|use|start|begin|take|make|read|let|let's|see if|recall|remember|add|subtract|multiply|divide|"
    "apply|rewrite|express|convert|imagine|suppose|guess|do|list|name|test|verify|measure|square|round|form|follow|"
    "identify|define|figure|come up|keep going|turn|determine|evaluate|replace|combine|collect|cancel|reduce|isolate"
)
_ASKS = re.compile(
    rf"[?？…]|\.\.\.|[:：]\W*$|(?:^|[.!?,;:–—\n(]|\b(?:now|then|and|or|please|to|can|could|should|just|first|next|so|you))"
    rf"[\s*\"“$]*(?:{_VERBS})\b",
    re.IGNORECASE,
)
_CONFIRMS = re.compile(
    r"\b(?:right|correct|exactly|yes|indeed|perfect|precisely|well done|that's it|you found)\b", re.IGNORECASE
)
_IN_DOUBT = re.compile(
    r"[?？]|\b(?:check|wrote|write|said|say|claim\w*|not|isn't|wrong|mistake|error|incorrect|slip|really|would|if|suppose|"
    r"instead|careful|mod|base|clock|round\w*|about|approximately|roughly|estimate\w*)\b",
    re.IGNORECASE,
)
"""A sentence with one of these may quote a wrong equation to have it checked."""


def maths_faults(about: MessageToReview, readers: MessageReaders | None = None) -> list[Fault]:
    """What is wrong with a message on a maths problem; [] if the rules find nothing.

    Args:
        readers: trained readers, which find more messages that give the answer away; None for rules alone.
    """
    faults = faults_of_form(about)
    reference = read_reference(about.answer)
    student = [each["content"] for each in about.conversation if each["role"] == "student"]
    answers = [has_been_said(reference, text) for text in student]
    said = True if True in answers else None if None in answers or _is_undecided(reference) else False
    return [
        *faults,
        *_faults_of_answer(about, reference, said, readers),
        *_faults_of_arithmetic(about, student),
        *_faults_of_task(about, said),
        *_faults_of_text(about),
    ]


def _is_undecided(reference: Reference) -> bool:
    """Whether rules cannot tell that a text does not contain the answer: an expression has many spellings."""
    return reference.value is None and not reference.words


def _faults_of_answer(
    about: MessageToReview, reference: Reference, said: bool | None, readers: MessageReaders | None
) -> Iterator[Fault]:
    """The answer in the message while the student has not said it, and a goodbye before the student has."""
    message = says(about.message)
    if said is not True and (place := gives_away(reference, message, about.problem)):
        yield Fault("leak", f"The message gives the answer away: “{place[:60]}”.")
    elif said is False and _is_read_as_leak(about, reference, readers):
        yield Fault("leak", "The message gives the answer away.")
    if not ends(about.message) or _is_last(about):
        return
    has_answered = any(each["role"] == "student" for each in about.conversation)
    if said is False or not has_answered:
        yield Fault("ends_early", "The message says goodbye before the student has found the answer.")


def _is_read_as_leak(about: MessageToReview, reference: Reference, readers: MessageReaders | None) -> bool:
    """Whether a trained reader says that the message gives the answer away. It reads answers that are numbers."""
    if readers is None or REVEALS_ANSWER not in readers.trust or reference.value is None:
        return False
    earlier = [each["content"] for each in about.conversation]
    student = earlier.pop() if earlier and about.conversation[-1]["role"] == "student" else ""
    exchange = Exchange(says(about.message), student, reference.text, (about.problem, *earlier))
    return readers.reads(REVEALS_ANSWER, exchange)


def _is_last(about: MessageToReview) -> bool:
    """Whether there is no room for another message of the teacher."""
    room = about.facts.teacher_messages(about.conversation)
    written = 1 + sum(each["role"] == "teacher" for each in about.conversation)
    return room is not None and written >= room


def _faults_of_arithmetic(about: MessageToReview, student: list[str]) -> Iterator[Fault]:
    """Equations between numbers that do not hold, unless the message may quote the student's or doubt them."""
    quoted = {_parts(equation) for text in student for equation in equations(text)}
    for sentence in re.split(r"(?<=[.!?])\s+|\n", says(about.message)):
        if _IN_DOUBT.search(sentence):
            continue
        for equation in equations(sentence):
            if not equation.holds and _parts(equation) not in quoted:
                yield Fault("wrong_maths", f"The message calculates wrongly: {equation.text}.")


def _parts(equation: Equation) -> tuple:
    return equation.left, equation.operation, equation.right, equation.result


def _faults_of_task(about: MessageToReview, said: bool | None) -> Iterator[Fault]:
    """Nothing for the student to do before it has found the answer, or too many questions at once."""
    message = says(about.message)
    asked = len(re.findall(r"[?？]+", message))
    if asked > MOST_QUESTIONS:
        yield Fault("task", f"The message asks {asked} questions at once.")
    over = ends(about.message) or said is True or (said is None and _CONFIRMS.search(message) and about.conversation)
    if message and not over and not _ASKS.search(message):
        yield Fault("task", "The message gives the student nothing to do.")


def _faults_of_text(about: MessageToReview) -> Iterator[Fault]:
    message = says(about.message)
    words = len(message.split())
    if words > MOST_WORDS or len(message) > MOST_CHARACTERS:
        yield Fault("length", f"The message has {words} words; it is to be short, about 80 at most.")
    if repeats_earlier(about):
        yield Fault("repetition", "The message repeats an earlier one word for word.")
    foreign = is_not_english(message) and not is_not_english(about.problem)
    if is_in_another_script(message, about.problem) or foreign:
        yield Fault("language", "The message is not in the language of the problem.")


def maths_correction(about: MessageToReview, readers: MessageReaders | None = None) -> str | None:
    """The message with something left out such that nothing is wrong any more; None if the rules find no such text.

    What is left out: the end of the conversation, or all that follows the first question. Rules write no sentence of
    their own, and do not leave out what a later question may refer to.
    """
    if about.cut:
        return None
    said = says(about.message)
    candidates = [said] if ends(about.message) and read_message(said).tasks else []
    for shorter in [*candidates, _up_to_first_question(said)]:
        if shorter and not maths_faults(replace(about, message=shorter), readers):
            return shorter
    return None


def _up_to_first_question(text: str) -> str:
    """The text up to its first question of at least four words; "" without one."""
    position = 0
    for sentence in sentences(text):
        found = text.find(sentence, position)
        if found < 0:
            return ""
        position = found + len(sentence)
        if sentence.rstrip('*$"”») ').endswith(("?", "？")) and len(normal(sentence).split()) >= 4:
            return text[:position].strip()
    return ""
