"""The toy judge: the quickstart's embedded judge. It decides the language tutor's three criteria by rules on the text.

Its inputs are the messages of both sides and the lesson plan. A slip (an error in the toy language) is what
`find_slips` finds in the student's text, whatever persona was drawn. No score exceeds the covered share of the lesson
(see `coverage`). The verdict is JSON in the format of a judge model.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from classroom_rl.config.values import END_OF_CONVERSATION, SCORING_RULES
from classroom_rl.environments.toy_language.grammar import (
    Question,
    Slip,
    find_slips,
    holds_statement,
    parse_question,
    words_of_fix,
)
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.errors import ConfigError
from classroom_rl.judges.leaks import hides
from classroom_rl.judges.prompt_injection import find_injection, find_order, readings, undisguised
from classroom_rl.judges.toy_answers import tells_answer
from classroom_rl.judges.verdicts import CRITERIA
from classroom_rl.rollout.engine import NO_FACTS, ConversationFacts, EmbeddedJudge
from classroom_rl.rollout.thoughts import visible_text

LONGEST_ACKNOWLEDGEMENT = 14
"""In words. The prompt of the judge model says "under 15"."""

_SENTENCE = re.compile(r"[^.?!\n]*[.?!]+|[^.?!\n]+")
_TASK_STARTS = frozenset("say try tell repeat answer write choose complete rewrite".split())
_FILLERS = frozenset("please now then and".split())
_CORRECTION = re.compile(
    r"\b(?:check|careful|almost|mistakes?|errors?|wrong|incorrect|slips?|fix|use|not quite)\b|\bhere\s*:", re.IGNORECASE
)
_KINDS = {
    "tense": re.compile(r"\btenses?\b", re.IGNORECASE),
    "verb ending": re.compile(r"\b(?:verb )?endings?\b", re.IGNORECASE),
    "article": re.compile(r"\barticles?\b", re.IGNORECASE),
    "plural": re.compile(r"\b(?:plurals?|singular)\b", re.IGNORECASE),
    "preposition": re.compile(r"\bprepositions?\b", re.IGNORECASE),
}
_POINTED_AT = re.compile(r"\bhere\s*:\s*[\"'“‘]?([\w-]+)", re.IGNORECASE)
_WORD = re.compile(r"[\w'-]+")


@dataclass(frozen=True)
class TurnFinding:
    """The toy judge's findings on one teacher message.

    Attributes:
        index: the index of the message in the conversation, from 0.
        replies_to: the index of the student message that it replies to; None for an opening.
        student_error_kind: the kind of slip in that student message (the first of several); None without a slip.
        scaffolded: whether it hints at the right kind of slip, does not give the answer, and lets the student correct
            the slip.
        void: whether the message counts for nothing: it speaks for the student or to the judge, gives the answer to its
            own question, is far too long, or ends before the lesson is complete.
        falsely_corrected: whether it treats a message without a slip as if it had one.
        sets_task: whether it sets the student a task.
        task_final: whether it sets exactly one task and ends with it.
        moved_on: whether it goes on to new content at once, after a message without a slip.
        progressed: whether it advances the lesson without going back in the plan; after a slip, whether it scaffolds.
        new_step: whether it asks exactly one question, which is in the plan and was not asked before.
        ends: whether it closes the conversation.
        task_reason, forward_reason, momentum_reason: short reasons for the three scores.
        turns_back: whether its question comes before an already asked one in the plan.
    """

    index: int
    replies_to: int | None
    student_error_kind: str | None
    scaffolded: bool
    void: bool
    falsely_corrected: bool
    sets_task: bool
    task_final: bool
    moved_on: bool
    progressed: bool
    new_step: bool
    ends: bool
    task_reason: str
    forward_reason: str
    momentum_reason: str
    turns_back: bool = False

    @property
    def task_score(self) -> float | None:
        """1 or 0; None for a message that sets no task and needs none."""
        if self.void or self.falsely_corrected or (self.student_error_kind is not None and not self.scaffolded):
            return 0.0
        return float(self.task_final) if self.sets_task else None

    @property
    def forward_score(self) -> float | None:
        """1 or 0; None for an opening, which replies to nothing."""
        if self.replies_to is None:
            return None
        return float(self.moved_on if self.student_error_kind is None else self.scaffolded)

    @property
    def momentum_score(self) -> float | None:
        """1 or 0; None for an opening."""
        return None if self.replies_to is None else float(self.progressed)

    @property
    def score(self) -> float | None:
        """The mean of the message's scores, weighted as in the reward; None if it has no score."""
        scores = zip(CRITERIA.values(), (self.task_score, self.forward_score, self.momentum_score), strict=True)
        present = [(criterion.weight, score) for criterion, score in scores if score is not None]
        total_weight = sum(weight for weight, _ in present)
        return sum(weight * score for weight, score in present) / total_weight if present else None


class RubricJudge(EmbeddedJudge):
    """The toy judge. It needs no model and has no state: the same conversation always gets the same answer."""

    async def judge(
        self,
        rule: str,
        conversation: list[dict[str, str]],
        problem: str,
        attempt: int,
        facts: ConversationFacts = NO_FACTS,
    ) -> str:
        """The verdict as JSON text.

        Raises:
            ConfigError: if `rule` is not one of `SCORING_RULES`.
            DataError: if `problem` is not a lesson of the quickstart.
        """
        if rule not in SCORING_RULES:
            raise ConfigError(
                f"The rubric cannot judge by the rule {rule!r}; it knows {', '.join(sorted(SCORING_RULES))}. "
                "Name a judge model, or leave that rule out of generation.judges_rules_prompts_paths."
            )
        findings = analyse(conversation, problem)
        covered = coverage(findings, problem, facts.teacher_messages(conversation))
        turn_scores = [finding.score for finding in findings]
        return json.dumps({**verdict(findings, covered), "turn_scores": turn_scores}, ensure_ascii=False)


@dataclass(frozen=True)
class Coverage:
    """How much of a lesson was covered: `taken` steps out of `due`. `taken` may be fractional: outside the quickstart,
    an early goodbye costs half a step."""

    taken: float
    due: int

    @property
    def share(self) -> float:
        """The covered share of the lesson, from 0 to 1."""
        return min(1.0, self.taken / self.due)

    @property
    def reason(self) -> str:
        """An explanation to append to the judge's reasons; "" if the whole lesson was covered."""
        if self.share == 1:
            return ""
        steps = f"{self.taken:g} of {self.due} steps of the lesson were taken"
        return f"; {steps}: no score above {self.share:.2f} of its range"


FULL_COVERAGE = Coverage(1, 1)


def coverage(findings: Sequence[TurnFinding], problem: str, room: int | None) -> Coverage:
    """How many questions of the plan were asked, and how many were due.

    The number due is the number of messages that the teacher can write, less one for each slip (the reply to a slip has
    to scaffold), and at most the number of questions in the plan.

    Args:
        findings: the findings on the teacher's messages.
        problem: the problem's text.
        room: the number of messages that the teacher can write. None if unknown: then it is the number that the teacher
            wrote, or enough for the whole lesson if the teacher closed the conversation.

    Raises:
        DataError: if `problem` is not a lesson of the quickstart.
    """
    steps = len(parse_problem(problem).questions)
    slips = sum(finding.student_error_kind is not None for finding in findings)
    if room is None:
        room = steps + slips if findings and findings[-1].ends else len(findings)
    taken = [finding for finding in findings if finding.new_step]
    backward = sum(finding.turns_back for finding in taken)
    return Coverage(steps_forward(len(taken), backward), max(1, min(steps, room - slips)))


def steps_forward(steps: int, back: int) -> int:
    """The number of steps that count.

    All `steps` count, unless at least as many of them go back in the plan as go forward; then only one counts. (The
    first step does neither.)

    Args:
        steps: the steps that were taken.
        back: those of them that go back in the plan.
    """
    return 1 if back and back >= steps - 1 - back else steps


def verdict(findings: Sequence[TurnFinding], covered: Coverage = FULL_COVERAGE) -> dict[str, float | str]:
    """The three scores and their reasons, under the six keys of a judge's answer. No score exceeds the covered share of
    the lesson."""
    task = _macro_mean(findings, lambda finding: finding.task_score)
    forward = _macro_mean(findings, lambda finding: finding.forward_score)
    momentum = _macro_mean(findings, lambda finding: finding.momentum_score)
    has_task = any(finding.sets_task for finding in findings)
    task_reasons = _reasons(findings, lambda f: f.task_reason) if has_task else "No task was set."
    return {
        "task_final_score": round(min(task, covered.share), 4) if has_task else 0.0,
        "task_final_reasoning": task_reasons + covered.reason,
        "forward_progression_score": round(min(forward, covered.share), 4),
        "forward_progression_reasoning": _reasons(findings, lambda f: f.forward_reason) + covered.reason,
        "overall_momentum_score": round(10 * min(momentum, covered.share), 4),
        "overall_momentum_reasoning": _reasons(findings, lambda f: f.momentum_reason) + covered.reason,
    }


def _macro_mean(findings: Iterable[TurnFinding], score: Callable[[TurnFinding], float | None]) -> float:
    """The macro average of two groups of messages: the replies to slips, and all others. So a teacher that handles only
    one of them well gets half of the score, however rare the other is. A group without scores is left out; without any
    scores the result is 0."""
    groups: dict[bool, list[float]] = {True: [], False: []}
    for finding in findings:
        value = score(finding)
        if value is not None:
            groups[finding.student_error_kind is not None].append(value)
    means = [fmean(values) for values in groups.values() if values]
    return fmean(means) if means else 0.0


def _reasons(findings: Iterable[TurnFinding], reason: Callable[[TurnFinding], str]) -> str:
    parts = [f"turn {finding.index + 1}: {reason(finding)}" for finding in findings if reason(finding)]
    return "; ".join(parts) if parts else "The teacher replied to nothing."


@dataclass(frozen=True)
class _TeacherMessage:
    """A parsed teacher message.

    Attributes:
        text: the part that the student sees; "" if the message is rejected as a whole.
        sentences: its sentences.
        questions: for each sentence the question of the toy language in it, or None.
        ends: whether it closes the conversation.
        plays_student: whether it contains a statement of the toy language, which only the student should write.
        foul: why such a message is rejected in any lesson; "" if it is not.
    """

    text: str
    sentences: tuple[str, ...]
    questions: tuple[Question | None, ...]
    ends: bool
    plays_student: bool
    foul: str

    @property
    def lesson_questions(self) -> list[Question]:
        return [question for question in self.questions if question is not None]

    @property
    def own_sentences(self) -> list[str]:
        """The sentences without a question of the lesson."""
        return [s for s, q in zip(self.sentences, self.questions, strict=True) if q is None]

    @property
    def own_words(self) -> str:
        """The text of `own_sentences`."""
        return " ".join(self.own_sentences)

    @cached_property
    def corrections(self) -> list[str]:
        """Those of `own_sentences` that mention a slip."""
        return [s for s in self.own_sentences if _CORRECTION.search(s) or _kinds_named(s)]

    def before(self, index: int) -> str:
        """The words of the sentence at `index` before its lesson question; the whole sentence if it has none."""
        sentence, question = " ".join(self.sentences[index].split()), self.questions[index]
        return sentence if question is None else sentence[: sentence.lower().rfind(question.text.lower())]

    @cached_property
    def tasks(self) -> list[int]:
        """The indices of the sentences that set a task. If there are none, the last hint counts as the task."""
        tasks = [i for i, sentence in enumerate(self.sentences) if _is_task(sentence)]
        hints = [i for i, sentence in enumerate(self.sentences) if sentence in self.corrections]
        return tasks or hints[-1:]


def _is_task(sentence: str) -> bool:
    words = [word for word in _WORD.findall(sentence.lower()) if word not in _FILLERS]
    return sentence.endswith("?") or bool(_TASK_STARTS.intersection(words[:1]))


def _kinds_named(text: str) -> set[str]:
    return {kind for kind, pattern in _KINDS.items() if pattern.search(text)}


def _read_message(text: str, order: str) -> _TeacherMessage:
    """The message, after an earlier one that holds `order` (see `find_injection`)."""
    foul, shown = find_injection(text, order), undisguised(visible_text(text))
    spoken = "" if foul else shown.replace(END_OF_CONVERSATION, "\n")
    sentences = tuple(sentence.strip() for sentence in _SENTENCE.findall(spoken) if sentence.strip())
    return _TeacherMessage(
        text=spoken,
        sentences=sentences,
        questions=tuple(parse_question(sentence) for sentence in sentences),
        ends=END_OF_CONVERSATION in shown,
        plays_student=any(holds_statement(reading) for reading in readings(spoken)),
        foul=foul,
    )


class _LessonProgress:
    """The questions that the teacher has asked so far, compared with the plan."""

    def __init__(self, problem: str):
        self._plan = parse_problem(problem).questions
        self._shown: set[Question] = set()
        self._asked: set[Question] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every question of the plan was asked, each in its own message."""
        return self._asked >= set(self._plan)

    def refusal(self, message: _TeacherMessage) -> str:
        """Why the message brings no new content; "" if it does."""
        asked = message.lesson_questions
        if not asked:
            return "asks nothing new"
        if len(asked) > 1:
            return f"asks {len(asked)} questions at once"
        if asked[0] in self._shown:
            return "repeats a question"
        return "" if asked[0] in self._plan else "asks what the lesson does not hold"

    def turns_back(self, message: _TeacherMessage) -> bool:
        """Whether its question comes before an already asked question in the plan."""
        positions = [self._plan.index(question) for question in self._shown if question in self._plan]
        return bool(positions) and self._plan.index(message.lesson_questions[0]) < max(positions)

    def record(self, message: _TeacherMessage) -> None:
        """Record the questions that the message asks."""
        self._shown.update(message.lesson_questions)
        if len(message.lesson_questions) == 1:
            self._asked.update(message.lesson_questions)


def analyse(conversation: Sequence[dict[str, str]], problem: str) -> list[TurnFinding]:
    """One finding for each teacher message. Messages are {"role": "teacher" | "student", "content"}.

    Raises:
        DataError: if `problem` is not a lesson of the quickstart.
    """
    lesson = _LessonProgress(problem)
    findings = []
    said: list[str] = []
    order = ""
    for index, turn in enumerate(conversation):
        if turn["role"] != "teacher":
            said.append(turn["content"])
            continue
        replies_to = index - 1 if index > 0 and conversation[index - 1]["role"] == "student" else None
        message = _read_message(turn["content"], order)
        order = order or find_order(turn["content"])
        findings.append(_judge_message(index, replies_to, said, message, lesson))
        lesson.record(message)
    return findings


def _judge_message(
    index: int, replies_to: int | None, said: Sequence[str], message: _TeacherMessage, lesson: _LessonProgress
) -> TurnFinding:
    """The finding on a message, after the student has `said` these messages."""
    student_text = "" if replies_to is None else said[-1]
    slips = find_slips(student_text)
    refused = _why_void(message, lesson, said)
    falsely_corrected = replies_to is not None and not slips and bool(message.corrections)
    unscaffolded = (refused or _why_not_scaffolded(message, slips, student_text)) if slips else "no slip"
    blocked = refused or ("corrects what was right" if falsely_corrected else "")
    not_moved = "" if slips else blocked or _why_not_moved_on(message, lesson)
    no_progress = unscaffolded if slips else blocked or _why_no_progress(message, lesson)
    task_final = len(message.tasks) == 1 and message.tasks[0] == len(message.sentences) - 1 and not blocked
    prefix = f"error ({slips[0].kind}: {slips[0].word}) – " if slips else ""
    forward_reason = (unscaffolded or "scaffolded") if slips else (not_moved or "moves on")
    return TurnFinding(
        index=index,
        replies_to=replies_to,
        student_error_kind=slips[0].kind if slips else None,
        scaffolded=not unscaffolded,
        void=bool(refused),
        falsely_corrected=falsely_corrected,
        sets_task=bool(message.tasks),
        task_final=task_final,
        moved_on=replies_to is not None and not slips and not not_moved,
        progressed=replies_to is not None and not no_progress,
        new_step=not refused and not lesson.refusal(message),
        turns_back=not lesson.refusal(message) and lesson.turns_back(message),
        ends=message.ends,
        task_reason=prefix + _say_task(message, blocked, unscaffolded if slips else ""),
        forward_reason="" if replies_to is None else prefix + forward_reason,
        momentum_reason="" if replies_to is None else prefix + (no_progress or "goes forward"),
    )


def _why_void(message: _TeacherMessage, lesson: _LessonProgress, said: Sequence[str]) -> str:
    """Why the message counts for nothing; "" if it counts."""
    if message.foul:
        return message.foul
    if message.plays_student:
        return "says the student's part itself"
    if message.ends and not lesson.is_complete:
        return "ends before the lesson is through"
    text = " ".join(message.before(index) for index in range(len(message.sentences)))
    if any(tells_answer(text, question, said) for question in message.lesson_questions):
        return "hands the answer over"
    return ""


def _gives_fix(slip: Slip, message: _TeacherMessage, student_text: str) -> bool:
    """Whether a message contains the correct form of a slip, plainly or in a code, or a prefix of it that differs from
    what the student said."""
    words = {word for reading in readings(message.own_words) for word in _WORD.findall(reading.lower())}
    has_prefix = any(slip.fix.startswith(word) and not slip.word.startswith(word) for word in words if len(word) > 1)
    return slip.fix in words or has_prefix or hides(message.text, (slip.fix, words_of_fix(slip, student_text)))


def _why_not_scaffolded(message: _TeacherMessage, slips: Sequence[Slip], student_text: str) -> str:
    kinds = _kinds_named(message.own_words)
    pointed_at = set(_POINTED_AT.findall(message.own_words.lower()))
    matching = [slip for slip in slips if {slip.kind} == kinds]
    if any(_gives_fix(slip, message, student_text) for slip in slips):
        return "hands the answer over: not scaffolded"
    if not kinds:
        return "passed over: not scaffolded"
    if not matching:
        return f"hinted at {' and '.join(sorted(kinds))}: not scaffolded"
    if not pointed_at <= {slip.word for slip in matching}:
        return f"pointed at {', '.join(sorted(pointed_at))}: not scaffolded"
    if not message.tasks or message.lesson_questions:
        return "hinted and then asked something else: not scaffolded"
    return ""


def _why_not_moved_on(message: _TeacherMessage, lesson: _LessonProgress) -> str:
    if lesson.is_complete:
        return _why_not_closed(message)
    if refusal := lesson.refusal(message):
        return refusal
    index = message.questions.index(message.lesson_questions[0])
    before = message.sentences[:index]
    if len(before) > 1:
        return f"says {len(before)} sentences before moving on"
    if len(_WORD.findall(" ".join([*before, message.before(index)]))) > LONGEST_ACKNOWLEDGEMENT:
        return "acknowledges at length"
    return ""


def _why_not_closed(message: _TeacherMessage) -> str:
    """Why the message is no farewell: one or two sentences and no task; "" if it is one."""
    return "" if 1 <= len(message.sentences) <= 2 and not message.tasks else "goes on after the last question"


def _why_no_progress(message: _TeacherMessage, lesson: _LessonProgress) -> str:
    if lesson.is_complete:
        return _why_not_closed(message)
    return lesson.refusal(message) or ("turns back in the plan" if lesson.turns_back(message) else "")


def _say_task(message: _TeacherMessage, blocked: str, unscaffolded: str) -> str:
    if blocked or unscaffolded:
        return blocked or unscaffolded
    if not message.tasks:
        return "sets no task"
    if len(message.tasks) > 1:
        return f"sets {len(message.tasks)} tasks"
    after = message.sentences[message.tasks[0] + 1 :]
    return f"“{after[0]}” follows the task" if after else "ends with its task"
