"""Rules that review a single message of a language tutor, for lesson plans in any language.

They build on the findings of the `rules` judge (judges/rule_judge.py), which read the tutor's English. A
student's message counts as an error if the program drew the error persona for it and the text is no correct phrase of
the plan. Where the rules cannot tell, a message is valid: a model is asked for the rest.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from classroom_rl.judges.feedback import feedback_kind, hands_over
from classroom_rl.judges.messages import ParsedPlan, holds, own_words, read_message
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.judges.rule_judge import LONG_MESSAGE, LONG_TEXT, analyse
from classroom_rl.judges.toy_judge import TurnFinding
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

_REASONS = (
    (r"lists \d+ phrases", "length", "The message {reason}."),
    (r"corrects what was right", "false_correction", "The message treats a right answer as wrong."),
    (r"hands the answer over", "leak", "The message gives what the student should say."),
    (r"passed over", "ignores_error", "The message passes over the error in what the student said."),
    (r"names \d+ kinds of slips", "ignores_error", "The hint fits any error: the message {reason}."),
    (r"hints and then asks", "ignores_error", "The message {reason}."),
    (r"gives the same hint as before", "repetition", "The message gives the same hint as before."),
    (r"asks for the same again", "repetition", "The message {reason} although the student was right."),
    (r"repeats a task", "repetition", "The message {reason}."),
    (r"explains or repeats", "repetition", "The message {reason}."),
    (r"asks nothing new", "task", "The message sets no task although one is due."),
    (r"sets \d+ tasks|sets a task that nobody", "task", "The message {reason}."),
    (r"“.*follows the task", "task", "Something follows the task: {reason}."),
    (r"praises in \d+ sentences|acknowledges at length", "length", "The message {reason}."),
)
"""The beginning of one of the judge's reasons, the category that it stands for, and the critique."""

_HEARD = "error – "
_POINTS_BACK = re.compile(r"\b(?:it|this|that|these|those|them)\b", re.IGNORECASE)


def language_faults(about: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None = None) -> list[Fault]:
    """What is wrong with a message in a lesson on this plan; [] if the rules find nothing.

    Args:
        readers: trained readers; None for rules alone.
    """
    faults = faults_of_form(about)
    if not says(about.message) and not ends(about.message):
        return faults
    finding = _finding(about, plan, readers)
    if any(reason.startswith("ends when") for reason in _reasons(finding)):
        faults += _faults_of_early_end(about, plan, readers)
    else:
        faults += _faults_of_reasons(about, plan, finding)
    if ends(about.message) and finding.sets_task:
        faults.append(Fault("task", "The message sets a task that nobody can do: it ends the conversation."))
    return [*faults, *_faults_of_text(about, finding)]


def _faults_of_reasons(about: MessageToReview, plan: ParsedPlan, finding: TurnFinding) -> Iterator[Fault]:
    for reason in _reasons(finding):
        for start, category, critique in _REASONS:
            if re.match(start, reason) and not _is_excused(category, about, plan, finding):
                yield Fault(category, critique.format(reason=reason.removesuffix(": not scaffolded")))


def _reasons(finding: TurnFinding) -> list[str]:
    """The judge's reasons, each once, without the word that says that the student erred."""
    said = (finding.task_reason, finding.forward_reason)
    return list(dict.fromkeys(each.removeprefix(_HEARD) for each in said))


def _finding(about: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None = None) -> TurnFinding:
    """The judge's finding on the message, as the last of its conversation."""
    messages = [*about.conversation, {"role": "teacher", "content": about.message}]
    return analyse(messages, plan, about.facts, readers)[0][-1]


def _is_excused(category: str, about: MessageToReview, plan: ParsedPlan, finding: TurnFinding) -> bool:
    """Whether the judge's reason is too strict for a single message.

    In a role-play the teacher may say a phrase of the plan as its own line. Who asks what the student meant may add
    what it did not understand.
    """
    if category == "leak":
        line = normal(read_message(about.message).task_text)
        return finding.student_error_kind is None and any(normal(phrase.text) == line for phrase in plan.phrases)
    if category == "task" and finding.student_error_kind is not None:
        return feedback_kind(about.conversation[-1]["content"], about.message, plan) == "clarification"
    return False


def _faults_of_early_end(about: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None) -> Iterator[Fault]:
    """The faults of a message that ends before all steps are taken. Only a goodbye in the first half of the lesson
    counts as too early: the judge's count of steps misses some. Any other fault is what it would be without the end,
    but a goodbye need not set a task."""
    room = about.facts.teacher_messages(about.conversation) or len(plan.phrases)
    written = 1 + sum(each["role"] == "teacher" for each in about.conversation)
    if 2 * written <= room:
        yield Fault("ends_early", f"The message says goodbye as number {written} of the {room} that there is room for.")
    going_on = replace(about, message=says(about.message))
    for fault in _faults_of_reasons(going_on, plan, _finding(going_on, plan, readers)):
        if fault.category not in ("task", "ignores_error"):
            yield fault


def _faults_of_text(about: MessageToReview, finding: TurnFinding) -> Iterator[Fault]:
    """Faults that show in the text of the message and do not depend on what the student said before."""
    message = read_message(about.message)
    if finding.replies_to is None and not message.tasks and not ends(about.message) and message.text:
        yield Fault("task", "The lesson begins without a task.")
    if message.words > LONG_MESSAGE or len(message.text) > LONG_TEXT:
        yield Fault("length", f"The message has {message.words} words; it is to be short, about 60 at most.")
    if repeats_earlier(about):
        yield Fault("repetition", "The message repeats an earlier one word for word.")
    if is_in_another_script(message.text, about.problem) or is_not_english(own_words(message.text)):
        yield Fault("language", "The message is in neither English nor the language of the lesson plan.")


def language_correction(about: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None = None) -> str | None:
    """The message with something left out such that nothing is wrong any more; None if the rules find no such text.

    What is left out: the words after the first task, one sentence that gives the answer, or the end of the
    conversation. Rules write no sentence of their own.
    """
    for shorter in _shortened(about, plan):
        if shorter and not language_faults(replace(about, message=shorter, cut=False), plan, readers):
            return shorter
    return None


def _shortened(about: MessageToReview, plan: ParsedPlan) -> Iterator[str]:
    """Versions of the message with something left out, the ones with the least left out first."""
    if about.cut:
        return
    said = says(about.message)
    if ends(about.message):
        yield said
    without_tail = _without_tail(said)
    yield without_tail
    places = [each for each in read_message(said).sentences if _gives(each, about, plan)]
    if len(places) == 1 and said.count(places[0]) == 1:
        without = " ".join(said.replace(places[0], " ").split())
        for shorter in (without, _without_tail(without)):
            task = own_words(read_message(shorter).task_text)
            if task and not (_POINTS_BACK.search(task) and not _after_error(about, plan)):
                yield shorter


def _without_tail(text: str) -> str:
    """The text up to the end of its first task; "" if that place cannot be found."""
    message, position = read_message(text), 0
    if not message.tasks:
        return ""
    for sentence in message.sentences[: message.tasks[0][-1] + 1]:
        found = message.text.find(sentence, position)
        if found < 0:
            return ""
        position = found + len(sentence)
    return message.text[:position].strip()


def _gives(sentence: str, about: MessageToReview, plan: ParsedPlan) -> bool:
    """Whether a sentence holds a phrase of the plan that the student has not said."""
    said = [each["content"] for each in about.conversation if each["role"] == "student"]
    shown = [phrase.text for phrase in plan.phrases if holds(sentence, phrase.text)]
    return hands_over(sentence, lambda form: any(holds(each, form) for each in said), plan) or any(
        not any(holds(each, phrase) for each in said) for phrase in shown
    )


def _after_error(about: MessageToReview, plan: ParsedPlan) -> bool:
    """Whether the message replies to an error."""
    return _finding(about, plan).student_error_kind is not None
