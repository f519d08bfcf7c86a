"""Rules that review a single message of a language tutor, for lesson plans in any language.

They build on the findings of the rule judge (judges/rule_judge.py), which understands the tutor's English. A student's
message counts as an error if the program drew the error persona for it and the text is not a correct phrase of the
plan. Where the rules cannot tell, a message is valid. A model reviews the rest.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from classroom_rl.judges.feedback import feedback_kind, hands_over
from classroom_rl.judges.findings import TurnFinding
from classroom_rl.judges.leaks import shows
from classroom_rl.judges.messages import ParsedPlan, holds, own_words, read_message
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.judges.rule_judge import LONG_MESSAGE, LONG_TEXT, analyse
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
"""For each row: a pattern for the beginning of a reason of the rule judge, the category of fault, and the critique."""

_ERROR_PREFIX = "error – "
_POINTS_BACK = re.compile(r"\b(?:it|this|that|these|those|them)\b", re.IGNORECASE)


def language_faults(request: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None = None) -> list[Fault]:
    """The faults of a message in a lesson on this plan; [] if the rules find none."""
    faults = faults_of_form(request)
    if not says(request.message) and not ends(request.message):
        return faults
    finding = _finding(request, plan, readers)
    if any(reason.startswith("ends when") for reason in _reasons(finding)):
        faults += _faults_of_early_end(request, plan, readers)
    else:
        faults += _faults_of_reasons(request, plan, finding)
    if ends(request.message) and finding.sets_task:
        faults.append(Fault("task", "The message sets a task that nobody can do: it ends the conversation."))
    return [*faults, *_faults_of_text(request, finding)]


def _faults_of_reasons(request: MessageToReview, plan: ParsedPlan, finding: TurnFinding) -> Iterator[Fault]:
    for reason in _reasons(finding):
        for start, category, critique in _REASONS:
            if re.match(start, reason) and not _is_excused(category, request, plan, finding):
                yield Fault(category, critique.format(reason=reason.removesuffix(": not scaffolded")))


def _reasons(finding: TurnFinding) -> list[str]:
    """The distinct reasons of the rule judge, without the prefix for replies to an error."""
    reasons = (finding.task_reason, finding.forward_reason)
    return list(dict.fromkeys(reason.removeprefix(_ERROR_PREFIX) for reason in reasons))


def _finding(request: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None = None) -> TurnFinding:
    """The rule judge's finding on the message, as the last one of its conversation."""
    messages = [*request.conversation, {"role": "teacher", "content": request.message}]
    return analyse(messages, plan, request.facts, readers)[0][-1]


def _is_excused(category: str, request: MessageToReview, plan: ParsedPlan, finding: TurnFinding) -> bool:
    """Whether the judge's reason is too strict for a single message.

    In a role-play, the teacher may say a phrase of the plan as its own line. A request for clarification may add what
    the teacher did not understand.
    """
    if category == "leak":
        line = normal(read_message(request.message).task_text)
        return finding.student_error_kind is None and any(normal(phrase.text) == line for phrase in plan.phrases)
    if category == "task" and finding.student_error_kind is not None:
        return feedback_kind(request.conversation[-1]["content"], request.message, plan) == "clarification"
    return False


def _faults_of_early_end(request: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None) -> Iterator[Fault]:
    """The faults of a message that says goodbye before all steps are taken. Only a goodbye in the first half of the
    lesson counts as too early, because the judge misses some steps. The other faults are those of the message without
    its end, except that a goodbye need not set a task."""
    max_messages = request.facts.teacher_messages(request.conversation) or len(plan.phrases)
    message_number = 1 + sum(turn["role"] == "teacher" for turn in request.conversation)
    if 2 * message_number <= max_messages:
        yield Fault(
            "ends_early",
            f"The message says goodbye as number {message_number} of the {max_messages} that there is room for.",
        )
    without_end = replace(request, message=says(request.message))
    for fault in _faults_of_reasons(without_end, plan, _finding(without_end, plan, readers)):
        if fault.category not in ("task", "ignores_error"):
            yield fault


def _faults_of_text(request: MessageToReview, finding: TurnFinding) -> Iterator[Fault]:
    """The faults that the text of the message shows by itself, whatever the student said before."""
    message = read_message(request.message)
    if finding.replies_to is None and not message.tasks and not ends(request.message) and message.text:
        yield Fault("task", "The lesson begins without a task.")
    if message.words > LONG_MESSAGE or len(message.text) > LONG_TEXT:
        yield Fault("length", f"The message has {message.words} words; it is to be short, about 60 at most.")
    if repeats_earlier(request):
        yield Fault("repetition", "The message repeats an earlier one word for word.")
    if is_in_another_script(message.text, request.problem) or is_not_english(own_words(message.text)):
        yield Fault("language", "The message is in neither English nor the language of the lesson plan.")


def language_correction(
    request: MessageToReview, plan: ParsedPlan, readers: MessageReaders | None = None
) -> str | None:
    """A shortened version of the message without faults; None if the rules find none.

    The shortened version lacks the words after the first task, one sentence that gives the answer, or the end of the
    conversation. The rules write no sentences of their own.
    """
    for candidate in _shortened(request, plan):
        if candidate and not language_faults(replace(request, message=candidate, cut=False), plan, readers):
            return candidate
    return None


def _shortened(request: MessageToReview, plan: ParsedPlan) -> Iterator[str]:
    """Shortened versions of the message, those with the least left out first; none for a truncated message."""
    if request.cut:
        return
    text = says(request.message)
    if ends(request.message):
        yield text
    yield _without_tail(text)
    leaks = [sentence for sentence in read_message(text).sentences if _gives_phrase(sentence, request, plan)]
    if len(leaks) == 1 and text.count(leaks[0]) == 1:
        without_leak = " ".join(text.replace(leaks[0], " ").split())
        for candidate in (without_leak, _without_tail(without_leak)):
            task = own_words(read_message(candidate).task_text)
            # "Say it" may refer to the removed sentence; after an error, it refers to what the student said.
            if task and not (_POINTS_BACK.search(task) and not _follows_error(request, plan)):
                yield candidate


def _without_tail(text: str) -> str:
    """The text up to the end of its first task; "" if there is none, or if it cannot be located."""
    message, position = read_message(text), 0
    if not message.tasks:
        return ""
    for sentence in message.sentences[: message.tasks[0][-1] + 1]:
        start = message.text.find(sentence, position)
        if start < 0:
            return ""
        position = start + len(sentence)
    return message.text[:position].strip()


def _gives_phrase(sentence: str, request: MessageToReview, plan: ParsedPlan) -> bool:
    """Whether a sentence gives a phrase of the plan that the student has not said."""
    student_texts = [turn["content"] for turn in request.conversation if turn["role"] == "student"]

    def produced(form: str) -> bool:
        return any(holds(text, form) for text in student_texts)

    shown_phrases = [phrase.text for phrase in plan.phrases if shows(sentence, phrase.text)]
    return hands_over(sentence, produced, plan) or not all(map(produced, shown_phrases))


def _follows_error(request: MessageToReview, plan: ParsedPlan) -> bool:
    """Whether the message replies to an error."""
    return _finding(request, plan).student_error_kind is not None
