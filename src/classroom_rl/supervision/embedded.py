"""The embedded supervisors by name: the rule supervisor, which reviews messages in any lesson and on any maths problem,
and the toy supervisor of the quickstart.

The toy supervisor reviews a teacher's message in the toy language, based on the findings of the toy judge. Its review
depends on the texts alone, not on the drawn personas. A message is valid if the toy judge gives it the full score under
all three criteria. The correction is what the scripted ideal teacher would say instead.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from classroom_rl.config.values import EMBEDDED_SUPERVISORS, RULES
from classroom_rl.environments.toy_language.grammar import find_slips, holds_statement
from classroom_rl.environments.toy_language.lessons import Lesson, parse_problem
from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.findings import TurnFinding
from classroom_rl.judges.messages import answers, questions_asked, read_plan
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.judges.toy_judge import analyse
from classroom_rl.rollout.reviews import MessageToReview, Review, Supervisor
from classroom_rl.supervision.faults import Fault, ends, faults_of_form, review_of, says
from classroom_rl.supervision.language_rules import language_correction, language_faults
from classroom_rl.supervision.maths_rules import maths_correction, maths_faults

Rules = Callable[[MessageToReview], Review]
"""A function that reviews a message by rules."""

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
"""For each row: a pattern for the beginning of a reason of the toy judge, the category of fault, and the critique."""

_ERROR_PREFIX = re.compile(r"error \([^)]*\) – ")
_AGAIN = re.compile(r"\b(?:again|once more|repeat)\b", re.IGNORECASE)
_WORD = re.compile(r"[\w'-]+")


class RulesSupervisor:
    """The rule supervisor. It needs no model: the same message with the same facts always gets the same review.

    In the classroom, messages in lessons of the quickstart are reviewed by the toy judge, on problems with a reference
    answer by the rules for maths, and on lesson plans by the rules for languages. On any other problem, only the form
    of a message is reviewed.

    Args:
        rules: the rules of the environment; None for those of the classroom.
    """

    def __init__(self, rules: Rules | None = None):
        self._rules = rules or review_by_rules

    async def review(self, request: MessageToReview) -> Review:
        """The review; it has no verdict if the rules cannot decide about such a message."""
        return self._rules(request)


def review_by_rules(request: MessageToReview, readers: MessageReaders | None = None) -> Review:
    """The classroom's rules: review a message, with a correction if a shortened version of it is valid.

    Args:
        readers: trained move classifiers for labels that they predict better than rules; None for rules alone.
    """
    plan = read_plan(request.problem)
    if plan.lesson:
        return review_by_rubric(request)
    if request.answer.strip():
        faults = maths_faults(request, readers)
        return review_of(faults, maths_correction(request, readers) if faults else None)
    if plan.phrases:
        faults = language_faults(request, plan, readers)
        return review_of(faults, language_correction(request, plan, readers) if faults else None)
    if faults := faults_of_form(request):
        return review_of(faults)
    return Review(
        error="The problem is no lesson plan and has no reference answer: rules cannot review messages on it."
    )


def embedded_supervisor(name: str, rules: Rules | None = None) -> Supervisor:
    """The supervisor without a model that `supervisor_model.model_name_or_path` names.

    Args:
        name: one of `EMBEDDED_SUPERVISORS`.
        rules: the rules of the environment, which the name `rules` selects; None for those of the classroom.

    Raises:
        ConfigError: if there is no such supervisor.
    """
    if name not in EMBEDDED_SUPERVISORS:
        raise ConfigError(f"There is no embedded supervisor {name!r}; there are {', '.join(EMBEDDED_SUPERVISORS)}.")
    return RulesSupervisor(rules) if name == RULES else RubricSupervisor()


class RubricSupervisor:
    """The toy supervisor. It needs no model: the same message always gets the same review."""

    async def review(self, request: MessageToReview) -> Review:
        """The review; it has no verdict if the problem is not a lesson of the quickstart."""
        return review_by_rubric(request)


def review_by_rubric(request: MessageToReview) -> Review:
    """The review of a message by the toy judge, with the ideal teacher's message as the correction if this is valid."""
    try:
        lesson = parse_problem(request.problem)
    except DataError as error:
        return Review(error=f"DataError: {error}")
    faults = rubric_faults(request, lesson)
    if not faults:
        return review_of(faults)
    correction = ideal(lesson, request.conversation)
    is_valid = not rubric_faults(replace(request, message=correction, cut=False), lesson)
    return review_of(faults, correction if is_valid else None)


def rubric_faults(request: MessageToReview, lesson: Lesson) -> list[Fault]:
    """The faults of a message in this lesson; [] if it is valid."""
    faults = faults_of_form(request)
    message = {"role": "teacher", "content": request.message}
    finding = analyse([*request.conversation, message], request.problem)[-1]
    if not _is_right(finding):
        faults += _faults_of_finding(request, lesson, finding) or [
            Fault("task", "The message does not ask the next question of the plan.")
        ]
    return faults


def _is_right(finding: TurnFinding) -> bool:
    """Whether the toy judge gives the message the full score. An opening must also ask a question of the plan."""
    scores = (finding.task_score, finding.forward_score, finding.momentum_score)
    opens_well = finding.replies_to is not None or finding.new_step
    return opens_well and not finding.void and all(score in (None, 1.0) for score in scores)


def _faults_of_finding(request: MessageToReview, lesson: Lesson, finding: TurnFinding) -> list[Fault]:
    """The faults that correspond to the reasons of the toy judge."""
    reasons = (finding.task_reason, finding.forward_reason, finding.momentum_reason)
    reasons = [_ERROR_PREFIX.sub("", reason) for reason in reasons]
    faults = [
        Fault(category, critique.format(reason=reason.removesuffix(": not scaffolded")))
        for reason in dict.fromkeys(reasons)
        for start, category, critique in _REASONS
        if re.match(start, reason)
    ]
    faults += _faults_of_speech(request, lesson, finding)
    if finding.student_error_kind is None and not finding.falsely_corrected and not finding.void:
        faults += _faults_of_step(request, lesson, reasons)
    return faults


def _faults_of_speech(request: MessageToReview, lesson: Lesson, finding: TurnFinding) -> Iterator[Fault]:
    """The faults of a message that contains a correct form or a statement of the toy language, which only the student
    should say, or that ends the lesson too early."""
    text = says(request.message)
    sentences = re.findall(r"[^.?!\n]*[.?!]+|[^.?!\n]+", text)
    statements = " ".join(sentence for sentence in sentences if not sentence.endswith("?"))
    student_text = request.conversation[-1]["content"] if finding.replies_to is not None else ""
    words = set(_WORD.findall(statements.lower()))
    if any(slip.fix in words for slip in find_slips(student_text)):
        yield Fault("leak", "The message gives the word that the student should find.")
    if holds_statement(text):
        asked_questions = questions_asked(text)
        answered_questions = {
            question for sentence in re.split(r"(?<=[.!?])\s+|\n", statements) for question in answers(sentence, lesson)
        }
        if asked_questions & answered_questions:
            yield Fault("leak", "The message answers its own question.")
        yield Fault("format", "The message says a sentence that the student should say.")
    if ends(request.message) and not _all_were_asked(request, lesson):
        yield Fault("ends_early", "The message says goodbye before every question of the plan was asked.")


def _faults_of_step(request: MessageToReview, lesson: Lesson, reasons: list[str]) -> Iterator[Fault]:
    """The faults of a message that does not take the lesson forward although the student made no slip."""
    text = says(request.message)
    questions = questions_asked(text)
    plan_questions = {question.text for question in lesson.questions}
    if not text:
        return
    if "goes on after the last question" in reasons:
        if "sets no task" in reasons:
            yield Fault("length", "The goodbye is longer than two sentences.")
        else:
            yield Fault("off_topic", "The message asks for more after the last question of the plan.")
    elif questions - plan_questions:
        yield Fault("off_topic", "The message asks a question that the lesson does not hold.")
    elif not questions and "sets no task" in reasons:
        yield Fault("task", "The message sets no task although one is due.")
    elif not questions and _AGAIN.search(text):
        yield Fault("repetition", "The message asks for the same again although the student was right.")
    elif not questions and lesson.verb in _WORD.findall(text.lower()):
        yield Fault("task", "The question of the message is not formed as those of the plan are.")
    elif not questions:
        yield Fault("off_topic", "The message asks for something that the lesson does not hold.")


def _all_were_asked(request: MessageToReview, lesson: Lesson) -> bool:
    """Whether each question of the plan was asked in a message of its own, as the toy judge requires."""
    messages = (turn["content"] for turn in request.conversation if turn["role"] == "teacher")
    questions_by_message = [questions_asked(says(message)) for message in messages]
    asked_alone = set().union(*(questions for questions in questions_by_message if len(questions) == 1))
    return asked_alone >= {question.text for question in lesson.questions}
