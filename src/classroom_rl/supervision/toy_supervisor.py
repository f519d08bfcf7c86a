"""The quickstart's embedded supervisor: reviews a teacher's message in the closed language by the rubric's findings.

The review depends on the texts alone, not on the drawn personas. A message is valid if the rubric counts it as right
under all three criteria. The correction is the scripted ideal teacher's message at that place.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from classroom_rl.environments.toy_language.grammar import find_slips, holds_statement
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem
from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.errors import DataError
from classroom_rl.judges.messages import answers, questions_asked
from classroom_rl.judges.toy_judge import TurnFinding, analyse
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.supervision.faults import Fault, ends, faults_of_form, review_of, says

_REASONS = (
    (r"hands the answer over", "leak", "The message gives the word that the student should find."),
    (r"ends before", "ends_early", "The message says goodbye before every question of the plan was asked."),
    (r"passed over", "ignores_error", "The message passes over the slip in what the student said."),
    (r"hinted at|pointed at", "ignores_error", "The hint does not fit the slip: the message {reason}."),
    (r"hinted and then", "ignores_error", "The message hints at the slip and asks for something else."),
    (r"corrects what was right", "false_correction", "The message treats a right sentence as wrong."),
    (r"repeats a question", "repetition", "The message asks a question that was asked before."),
    (r"turns back in the plan", "repetition", "The message turns back in the plan."),
    (r"asks what the lesson", "off_topic", "The message asks a question that the lesson does not hold."),
    (r"asks \d+ questions|sets \d+ tasks", "task", "The message {reason}."),
    (r"“.*follows the task", "task", "Something follows the task: {reason}."),
    (r"says \d+ sentences before|acknowledges", "length", "Too much comes before the task: the message {reason}."),
)
"""The beginning of one of the rubric's reasons, the category that it stands for, and the critique."""

_HEARD = re.compile(r"error \([^)]*\) – ")
_AGAIN = re.compile(r"\b(?:again|once more|repeat)\b", re.IGNORECASE)
_WORD = re.compile(r"[\w'-]+")


class RubricSupervisor:
    """A supervisor without a model for lessons of the quickstart. The same message always gets the same review."""

    async def review(self, about: MessageToReview) -> Review:
        """The review; without a verdict if the problem is no lesson of the quickstart."""
        return review_by_rubric(about)


def review_by_rubric(about: MessageToReview) -> Review:
    """The rubric's review of a message, with a correction if there is a right message at that place."""
    try:
        lesson = parse_problem(about.problem)
    except DataError as error:
        return Review(error=f"DataError: {error}")
    faults = rubric_faults(about, lesson)
    if not faults:
        return review_of(faults)
    right = ideal(lesson, about.conversation)
    passes = not rubric_faults(replace(about, message=right, cut=False), lesson)
    return review_of(faults, right if passes else None)


def rubric_faults(about: MessageToReview, lesson: Lesson) -> list[Fault]:
    """What is wrong with a message in this lesson; [] if it is valid."""
    faults = faults_of_form(about)
    asked = {"role": "teacher", "content": about.message}
    finding = analyse([*about.conversation, asked], about.problem)[-1]
    if not _is_right(finding):
        faults += _faults_of_finding(about, lesson, finding) or [
            Fault("task", "The message does not ask the next question of the plan.")
        ]
    return faults


def _is_right(finding: TurnFinding) -> bool:
    """Whether the rubric counts the message as right. An opening has to ask a question of the plan."""
    scores = (finding.task_score, finding.forward_score, finding.momentum_score)
    opens_well = finding.replies_to is not None or finding.new_step
    return opens_well and not finding.void and all(score in (None, 1.0) for score in scores)


def _faults_of_finding(about: MessageToReview, lesson: Lesson, finding: TurnFinding) -> list[Fault]:
    reasons = [_HEARD.sub("", each) for each in (finding.task_reason, finding.forward_reason, finding.momentum_reason)]
    faults = [
        Fault(category, critique.format(reason=reason.removesuffix(": not scaffolded")))
        for reason in dict.fromkeys(reasons)
        for start, category, critique in _REASONS
        if re.match(start, reason)
    ]
    faults += _faults_of_speech(about, lesson, finding)
    if finding.student_error_kind is None and not finding.falsely_corrected and not finding.void:
        faults += _faults_of_step(about, lesson, reasons)
    return faults


def _faults_of_speech(about: MessageToReview, lesson: Lesson, finding: TurnFinding) -> Iterator[Fault]:
    """The faults of a message that holds a sentence of the language, which only the student should say."""
    said = says(about.message)
    stated = " ".join(each for each in re.findall(r"[^.?!\n]*[.?!]+|[^.?!\n]+", said) if not each.endswith("?"))
    last = about.conversation[-1]["content"] if finding.replies_to is not None else ""
    words = set(_WORD.findall(stated.lower()))
    if any(slip.fix in words for slip in find_slips(last)):
        yield Fault("leak", "The message gives the word that the student should find.")
    if holds_statement(said):
        due = questions_asked(said)
        shown = {question for each in re.split(r"(?<=[.!?])\s+|\n", stated) for question in answers(each, lesson)}
        if due & shown:
            yield Fault("leak", "The message answers its own question.")
        yield Fault("format", "The message says a sentence that the student should say.")
    if ends(about.message) and not _all_were_asked(about, lesson):
        yield Fault("ends_early", "The message says goodbye before every question of the plan was asked.")


def _faults_of_step(about: MessageToReview, lesson: Lesson, reasons: list[str]) -> Iterator[Fault]:
    """The faults of a message that does not take the lesson forward although the student made no slip."""
    said = says(about.message)
    asked = questions_asked(said)
    plan = {question.text for question in lesson.questions}
    if not said:
        return
    if "goes on after the last question" in reasons:
        if "sets no task" in reasons:
            yield Fault("length", "The goodbye is longer than two sentences.")
        else:
            yield Fault("off_topic", "The message asks for more after the last question of the plan.")
    elif asked - plan:
        yield Fault("off_topic", "The message asks a question that the lesson does not hold.")
    elif not asked and "sets no task" in reasons:
        yield Fault("task", "The message sets no task although one is due.")
    elif not asked and _AGAIN.search(said):
        yield Fault("repetition", "The message asks for the same again although the student was right.")
    elif not asked and lesson.verb in _WORD.findall(said.lower()):
        yield Fault("task", "The question of the message is not formed as those of the plan are.")
    elif not asked:
        yield Fault("off_topic", "The message asks for something that the lesson does not hold.")


def _all_were_asked(about: MessageToReview, lesson: Lesson) -> bool:
    """Whether each question of the plan was asked in a message of its own, as the rubric wants it."""
    sets = [questions_asked(says(each["content"])) for each in about.conversation if each["role"] == "teacher"]
    alone = set().union(*(asked for asked in sets if len(asked) == 1))
    return alone >= {question.text for question in lesson.questions}
