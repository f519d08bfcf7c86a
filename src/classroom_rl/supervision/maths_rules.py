"""Rules that review a single message of a mathematics tutor.

They detect only what a program can decide for certain: that the message contains the reference answer or wrong
arithmetic, gives the student nothing to do, is too long or a repetition, or says goodbye too early. Where they cannot
tell, a message is valid. A model reviews the rest, such as whether the tutor listens to the student, or takes a step
that the student could take.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from classroom_rl.judges.feedback import SAYS_WRONG
from classroom_rl.judges.leaked_values import find_value
from classroom_rl.judges.messages import read_message, sentences
from classroom_rl.judges.moves.rules import MOVES_ON, identifies_mistake
from classroom_rl.judges.readings import REVEALS_ANSWER, Exchange, MessageReaders
from classroom_rl.judges.reference_answers import (
    Equation,
    Reference,
    equations,
    gives_wrong_result,
    has_answered,
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
"""The limit is lenient, as only clear cases count: the tutor's prompt asks for at most 80 words."""

MOST_CHARACTERS = 1600
"""The same limit for texts without spaces."""

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
_BEGINS_TASK = re.compile(
    rf"\W*(?:(?:now|then|and|please|next|first|so|ok|okay)\W+){{0,3}}(?:{_VERBS})\b", re.IGNORECASE
)
_CONFIRMS = re.compile(
    r"\b(?:right|correct|exactly|yes|indeed|perfect|precisely|well done|that's it|you found)\b", re.IGNORECASE
)
_IN_DOUBT = re.compile(
    r"[?？]|\b(?:check|wrote|write|said|say|claim\w*|not|isn't|wrong|mistake|error|incorrect|slip|really|would|if|suppose|"
    r"instead|careful|mod|base|clock|round\w*|about|approximately|roughly|estimate\w*)\b",
    re.IGNORECASE,
)
"""A sentence with one of these expressions may quote a wrong equation in order to question it."""


def maths_faults(request: MessageToReview, readers: MessageReaders | None = None) -> list[Fault]:
    """The faults of a message on a maths problem; [] if the rules find none. Trained move classifiers detect more
    messages that give the answer away."""
    faults = faults_of_form(request)
    reference = read_reference(request.answer)
    student_texts = [turn["content"] for turn in request.conversation if turn["role"] == "student"]
    answered = has_answered(reference, student_texts)
    if answered is False and reference.value is None and not reference.words:
        answered = None  # an expression can be written in many ways: no rule is certain that it has not been said
    return [
        *faults,
        *_faults_of_answer(request, reference, " ".join(student_texts), answered, readers),
        *_faults_of_arithmetic(request, student_texts),
        *_faults_of_task(request, answered),
        *_ignored_errors(request, reference),
        *_faults_of_text(request),
    ]


def _faults_of_answer(
    request: MessageToReview, reference: Reference, said: str, answered: bool | None, readers: MessageReaders | None
) -> Iterator[Fault]:
    """A leak of the answer, or a goodbye, before the student has given the answer. `answered` is None if the rules
    cannot tell whether it has, in the messages `said`."""
    message = says(request.message)
    if answered is not True and (leak := find_value(reference, message, request.problem, said)):
        yield Fault("leak", f"The message gives the answer away: “{leak[:60]}”.")
    elif answered is False and _is_classified_as_leak(request, reference, readers):
        yield Fault("leak", "The message gives the answer away.")
    if not ends(request.message) or _is_last(request):
        return
    student_has_spoken = any(turn["role"] == "student" for turn in request.conversation)
    if answered is False or not student_has_spoken:
        yield Fault("ends_early", "The message says goodbye before the student has found the answer.")


def _is_classified_as_leak(request: MessageToReview, reference: Reference, readers: MessageReaders | None) -> bool:
    """Whether a trained classifier predicts that the message gives the answer away; False for answers that are no
    numbers."""
    if readers is None or REVEALS_ANSWER not in readers.trust or reference.value is None:
        return False
    earlier_texts = [turn["content"] for turn in request.conversation]
    student_text = earlier_texts.pop() if earlier_texts and request.conversation[-1]["role"] == "student" else ""
    exchange = Exchange(says(request.message), student_text, reference.text, (request.problem, *earlier_texts))
    return readers.reads(REVEALS_ANSWER, exchange)


def _is_last(request: MessageToReview) -> bool:
    """Whether the teacher cannot write another message after this one; False if the limit is unknown."""
    max_messages = request.facts.teacher_messages(request.conversation)
    message_number = 1 + sum(turn["role"] == "teacher" for turn in request.conversation)
    return max_messages is not None and message_number >= max_messages


def _faults_of_arithmetic(request: MessageToReview, student_texts: list[str]) -> Iterator[Fault]:
    """Wrong equations between numbers, unless the message may be quoting the student or questioning them."""
    quoted = {_parts(equation) for text in student_texts for equation in equations(text)}
    for sentence in re.split(r"(?<=[.!?])\s+|\n", says(request.message)):
        if _IN_DOUBT.search(sentence):
            continue
        for equation in equations(sentence):
            if not equation.holds and _parts(equation) not in quoted:
                yield Fault("wrong_maths", f"The message calculates wrongly: {equation.text}.")


def _parts(equation: Equation) -> tuple:
    return equation.left, equation.operation, equation.right, equation.result


def _faults_of_task(request: MessageToReview, answered: bool | None) -> Iterator[Fault]:
    """Too many questions at once, or nothing for the student to do although it has not found the answer."""
    message = says(request.message)
    questions = len(re.findall(r"[?？]+", message))
    if questions > MOST_QUESTIONS:
        yield Fault("task", f"The message asks {questions} questions at once.")
    is_solved = answered is True or (answered is None and _CONFIRMS.search(message) and request.conversation)
    if message and not ends(request.message) and not is_solved and not _ASKS.search(message):
        yield Fault("task", "The message gives the student nothing to do.")


def _ignored_errors(request: MessageToReview, reference: Reference) -> Iterator[Fault]:
    """A reply to a wrong result that neither points back at the student's work nor sets a task on it, such as praise
    alone or the next problem. With a task it may be a step on the way: a result need not be the last one."""
    student_texts = [turn["content"] for turn in request.conversation if turn["role"] == "student"]
    message = says(request.message)
    if not message or not student_texts or request.conversation[-1]["role"] != "student":
        return
    notices = identifies_mistake(Exchange(message)) or SAYS_WRONG.search(message)
    sets_task = _BEGINS_TASK.match("".join(sentences(message)[-1:])) and not MOVES_ON.search(message)
    if gives_wrong_result(reference, student_texts) and not (notices or sets_task):
        yield Fault("ignores_error", "The message passes over the mistake in what the student said.")


def _faults_of_text(request: MessageToReview) -> Iterator[Fault]:
    message = says(request.message)
    words = len(message.split())
    if words > MOST_WORDS or len(message) > MOST_CHARACTERS:
        yield Fault("length", f"The message has {words} words; it is to be short, about 80 at most.")
    if repeats_earlier(request):
        yield Fault("repetition", "The message repeats an earlier one word for word.")
    foreign = is_not_english(message) and not is_not_english(request.problem)
    if is_in_another_script(message, request.problem) or foreign:
        yield Fault("language", "The message is not in the language of the problem.")


def maths_correction(request: MessageToReview, readers: MessageReaders | None = None) -> str | None:
    """A shortened version of the message without faults; None if the rules find none.

    The shortened version lacks the end of the conversation, or everything after the first question. The rules write no
    sentences of their own, and do not remove anything that a later question may refer to.
    """
    if request.cut:
        return None
    text = says(request.message)
    without_end = [text] if ends(request.message) and read_message(text).tasks else []
    for candidate in [*without_end, _up_to_first_question(text)]:
        if candidate and not maths_faults(replace(request, message=candidate), readers):
            return candidate
    return None


def _up_to_first_question(text: str) -> str:
    """The text up to its first question of at least four words; "" if there is none."""
    position = 0
    for sentence in sentences(text):
        start = text.find(sentence, position)
        if start < 0:
            return ""
        position = start + len(sentence)
        if sentence.rstrip('*$"”») ').endswith(("?", "？")) and len(normal(sentence).split()) >= 4:
            return text[:position].strip()
    return ""
