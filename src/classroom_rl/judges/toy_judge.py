"""The toy judge: the quickstart's embedded judge. It decides the language tutor's three criteria by rules on the text.

Its inputs are the messages of both sides and the lesson plan. A slip (an error in the toy language) is what
`find_slips` finds in the student's text, whatever persona was drawn. No score exceeds the covered share of the lesson
(see `coverage`). The verdict is JSON in the format of a judge model.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from classroom_rl.config.values import END_OF_CONVERSATION, SCORING_RULES
from classroom_rl.environments.toy_language.grammar import (
    TOPICS,
    Question,
    Slip,
    answer_verb,
    find_slips,
    parse_question,
    statements,
    topic_of,
    words_of_fix,
    words_of_language,
)
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.errors import ConfigError
from classroom_rl.judges.findings import STEPS_FOR_REVIEW, Coverage, TurnFinding, steps_forward, verdict
from classroom_rl.judges.known_moves import find_unread, words_in
from classroom_rl.judges.leaks import hides
from classroom_rl.judges.messages import MEANING, RETRY, holds
from classroom_rl.judges.prompt_injection import find_injection, find_order, readings, undisguised
from classroom_rl.judges.toy_answers import tells_answer
from classroom_rl.judges.tricks import CODED, find_falsehood, is_coded
from classroom_rl.rollout.engine import NO_FACTS, ConversationFacts, EmbeddedJudge
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.thoughts import visible_text

LONGEST_ACKNOWLEDGEMENT = 14
"""In words. The prompt of the judge model says "under 15"."""

_SENTENCE = re.compile(r"[^.?!…\n]*[.?!…]+|[^.?!…\n]+")
_TASK_STARTS = frozenset("say try tell repeat answer write choose complete rewrite".split())
_FILLERS = frozenset("please now then and".split())
_CORRECTION = re.compile(
    r"\b(?:check|careful|almost|(?<!\bno )(?:mistakes?|errors?|slips?)|wrong|incorrect|fix|not quite)\b|\bhere\s*:",
    re.IGNORECASE,
)
_USE = re.compile(r"\buse\b", re.IGNORECASE)
_KINDS = {
    "tense": re.compile(r"\btenses?\b", re.IGNORECASE),
    "verb ending": re.compile(r"\b(?:verb )?endings?\b", re.IGNORECASE),
    "article": re.compile(r"\barticles?\b", re.IGNORECASE),
    "plural": re.compile(r"\b(?:plurals?|singular)\b", re.IGNORECASE),
    "preposition": re.compile(r"\bprepositions?\b", re.IGNORECASE),
}
_POINTED_AT = re.compile(r"\bhere\s*:\s*[\"'“‘]?([\w-]+)", re.IGNORECASE)
_WORD = re.compile(r"[\w'-]+")
_GRAMMAR = re.compile(
    r"\b(?:verbs?|nouns?|tenses?|endings?|articles?|plurals?|singular|prepositions?|rules?)\b|\bfor example\b", re.I
)
_ENDING = re.compile(r"(?:[-“\"]|(?<!\w)['’]|\bin |\bwith )-?(ed|s)\b|\b(no) ending\b", re.IGNORECASE)
"""An ending that a rule names; not the "s" of "it's"."""

_NOT = re.compile(r"\b(?:not|never)\b|n['’]t\b", re.IGNORECASE)
_OF_NOUNS = re.compile(r"\b(?:nouns?|plurals?)\b", re.IGNORECASE)
MOST_EXPLANATIONS, LONGEST_EXPLANATION = 2, 30
"""The most sentences, and words, of rules and examples before a question."""

_AS_STUDENT = {"you": "i", "your": "my"}
_MOST_REPEATED = 4  # words; a longer repetition does not point at the error in it


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


def coverage(findings: Sequence[TurnFinding], problem: str, room: int | None) -> Coverage:
    """How many questions of the plan were asked, and how many were due.

    The number due is the number of messages that the teacher can write, less one for each slip (the reply to a slip has
    to scaffold) and each review, and at most the number of questions in the plan.

    Args:
        room: the number of messages that the teacher can write. None if unknown: then it is the number that the teacher
            wrote, or enough for the whole lesson if the teacher closed the conversation.

    Raises:
        DataError: if `problem` is not a lesson of the quickstart.
    """
    steps = len(parse_problem(problem).questions)
    other_turns = sum(finding.student_error_kind is not None or finding.reviews for finding in findings)
    if room is None:
        room = steps + other_turns if findings and findings[-1].ends else len(findings)
    new_steps = [finding for finding in findings if finding.new_step]
    backward = sum(finding.turns_back for finding in new_steps)
    return Coverage(steps_forward(len(new_steps), backward), max(1, min(steps, room - other_turns)))


@dataclass(frozen=True)
class _TeacherMessage:
    """A parsed teacher message.

    Attributes:
        text: the part that the student sees; "" if the message is rejected as a whole.
        sentences: its sentences.
        questions: for each sentence the question of the toy language in it, or None.
        ends: whether it closes the conversation.
        stated: its statements in the toy language, as far as their verbs, with the base forms of these.
        foul: why such a message is rejected in any lesson; "" if it is not.
    """

    text: str
    sentences: tuple[str, ...]
    questions: tuple[Question | None, ...]
    ends: bool
    stated: dict[str, str]
    foul: str

    @property
    def lesson_questions(self) -> list[Question]:
        return [question for question in self.questions if question is not None]

    @property
    def own_sentences(self) -> list[str]:
        """The sentences without a question of the lesson."""
        return [sentence for sentence, question in zip(self.sentences, self.questions, strict=True) if question is None]

    @property
    def own_words(self) -> str:
        """The text of `own_sentences`."""
        return " ".join(self.own_sentences)

    @cached_property
    def corrections(self) -> list[str]:
        """Those of `own_sentences` that mention a slip. A rule before a question of the lesson is about the answer to
        it, and mentions none."""
        return [
            sentence
            for sentence in self.own_sentences
            if _CORRECTION.search(sentence) or self._is_about_what_was_said(sentence)
        ]

    def _is_about_what_was_said(self, sentence: str) -> bool:
        kinds = _kinds_named(sentence)
        return not self.lesson_questions if kinds else bool(_USE.search(sentence))

    def before(self, index: int) -> str:
        """The words of the sentence at `index` before its lesson question; the whole sentence if it has none."""
        sentence, question = " ".join(self.sentences[index].split()), self.questions[index]
        return sentence if question is None else sentence[: sentence.lower().rfind(question.text.lower())]

    @cached_property
    def tasks(self) -> list[int]:
        """The indices of the sentences that set a task. If there are none, the last hint counts as the task."""
        tasks = [
            index
            for index, sentence in enumerate(self.sentences)
            if _is_task(sentence) and not self._is_said_again(index)
        ]
        hints = [index for index, sentence in enumerate(self.sentences) if sentence in self.corrections]
        return tasks or hints[-1:]

    def _is_said_again(self, index: int) -> bool:
        """Whether the sentence only repeats a part of what the student is then told to say again ("Boil? Say it
        again.")."""
        following = self.sentences[index + 1 : index + 2]
        return self.questions[index] is None and any(RETRY.search(sentence) for sentence in following)

    @cached_property
    def explanations(self) -> list[str]:
        """The sentences that state a rule, or an example in the toy language."""
        return [sentence for sentence in self.own_sentences if _GRAMMAR.search(sentence) or statements(sentence)]

    @property
    def examples(self) -> list[str]:
        """The sentences with a statement in the toy language."""
        return [sentence for sentence in self.explanations if statements(sentence)]


def _is_task(sentence: str) -> bool:
    words = [word for word in _WORD.findall(sentence.lower()) if word not in _FILLERS]
    return sentence.endswith("?") or bool(_TASK_STARTS.intersection(words[:1]))


def _kinds_named(text: str) -> set[str]:
    return {kind for kind, pattern in _KINDS.items() if pattern.search(text)}


def _read_message(text: str, order: str) -> _TeacherMessage:
    """The message, after an earlier one that holds `order` (see `find_injection`)."""
    foul, visible = find_injection(text, order), undisguised(visible_text(text))
    spoken = "" if foul else visible.replace(END_OF_CONVERSATION, "\n")
    sentences = tuple(sentence.strip() for sentence in _SENTENCE.findall(spoken) if sentence.strip())
    return _TeacherMessage(
        text=spoken,
        sentences=sentences,
        questions=tuple(parse_question(sentence) for sentence in sentences),
        ends=END_OF_CONVERSATION in visible,
        stated={statement: verb for reading in readings(spoken) for statement, verb in statements(reading).items()},
        foul=foul,
    )


class _LessonProgress:
    """The questions that the teacher has asked so far, compared with the plan."""

    def __init__(self, problem: str):
        self._plan = parse_problem(problem).questions
        self._shown: set[Question] = set()
        self._asked: set[Question] = set()
        self._last: Question | None = None
        self._reviewed: list[Question | None] = []
        self._explained: set[str] = set()

    @property
    def verbs(self) -> set[str]:
        """The verbs of the plan's topic, in their base forms."""
        return {verb for question in self._plan for verb in TOPICS[topic_of(question)].verbs}

    @property
    def is_complete(self) -> bool:
        """Whether every question of the plan was asked, each in its own message."""
        return self._asked >= set(self._plan)

    def refusal(self, message: _TeacherMessage) -> str:
        """Why the message brings no new content; "" if it does."""
        questions = message.lesson_questions
        if not questions:
            return "asks nothing new"
        if len(questions) > 1:
            return f"asks {len(questions)} questions at once"
        if questions[0] in self._shown:
            return "repeats a question"
        return "" if questions[0] in self._plan else "asks what the lesson does not hold"

    def reviews(self, message: _TeacherMessage, said: Sequence[str]) -> bool:
        """Whether the message has the student say again what it said before it said something else, or asks what a part
        of it means. There is time for one such message after every `STEPS_FOR_REVIEW` steps."""
        if len(self._asked) < STEPS_FOR_REVIEW * (1 + len(self._reviewed)) or len(message.tasks) != 1:
            return False
        questions = message.lesson_questions
        if questions:
            return len(questions) == 1 and questions[0] in self._asked - {self._last, *self._reviewed}
        meaning = MEANING.search(message.sentences[message.tasks[0]])
        words = {word for text in said for word in _WORD.findall(text.lower())} | self.verbs
        return meaning is not None and None not in self._reviewed and _words_of(meaning) <= words

    def turns_back(self, message: _TeacherMessage) -> bool:
        """Whether its question comes before an already asked question in the plan."""
        positions = [self._plan.index(question) for question in self._shown if question in self._plan]
        return bool(positions) and self._plan.index(message.lesson_questions[0]) < max(positions)

    def explains_again(self, message: _TeacherMessage) -> bool:
        """Whether the message gives an example that it has given before."""
        return any(sentence.lower() in self._explained for sentence in message.examples)

    def record(self, message: _TeacherMessage, reviews: bool) -> None:
        """Record what the message asks and explains, and whether it reviews."""
        if reviews:
            self._reviewed += message.lesson_questions or [None]
        self._shown.update(message.lesson_questions)
        self._explained.update(sentence.lower() for sentence in message.examples)
        if len(message.lesson_questions) == 1:
            self._asked.update(message.lesson_questions)
            self._last = message.lesson_questions[0]


def _words_of(meaning: re.Match) -> set[str]:
    """The words whose meaning is asked for."""
    return set(_WORD.findall(next(filter(None, meaning.groups())).lower()))


def analyse(conversation: Sequence[dict[str, str]], problem: str) -> list[TurnFinding]:
    """One finding for each teacher message. Messages are {"role": "teacher" | "student", "content"}.

    Raises:
        DataError: if `problem` is not a lesson of the quickstart.
    """
    lesson = _LessonProgress(problem)
    findings = []
    student_messages: list[str] = []
    order = ""
    for index, turn in enumerate(conversation):
        if turn["role"] != "teacher":
            student_messages.append(turn["content"])
            continue
        replies_to = index - 1 if index > 0 and conversation[index - 1]["role"] == "student" else None
        message = _read_message(turn["content"], order)
        order = order or find_order(turn["content"])
        findings.append(_judge_message(index, replies_to, student_messages, message, lesson))
        lesson.record(message, findings[-1].reviews)
    return findings


def _judge_message(
    index: int, replies_to: int | None, said: Sequence[str], message: _TeacherMessage, lesson: _LessonProgress
) -> TurnFinding:
    """The finding on a message, after the student has `said` these messages."""
    student_text = "" if replies_to is None else said[-1]
    slips = find_slips(student_text)
    void_reason = _why_void(message, lesson, said)
    falsely_corrected = replies_to is not None and not slips and bool(message.corrections)
    unscaffolded = (void_reason or _why_not_scaffolded(message, slips, student_text)) if slips else "no slip"
    blocked = void_reason or ("corrects what was right" if falsely_corrected else "")
    reviews = not slips and not blocked and lesson.reviews(message, said)
    not_moved = "" if slips else blocked or _why_not_moved_on(message, lesson, reviews)
    no_progress = unscaffolded if slips else blocked or _why_no_progress(message, lesson, reviews)
    task_final = len(message.tasks) == 1 and message.tasks[0] == len(message.sentences) - 1 and not blocked
    prefix = f"error ({slips[0].kind}: {slips[0].word}) – " if slips else ""
    forward_reason = (unscaffolded or "scaffolded") if slips else (not_moved or "moves on")
    return TurnFinding(
        index=index,
        replies_to=replies_to,
        student_error_kind=slips[0].kind if slips else None,
        scaffolded=not unscaffolded,
        void=bool(void_reason),
        falsely_corrected=falsely_corrected,
        sets_task=bool(message.tasks),
        task_final=task_final,
        moved_on=replies_to is not None and not slips and not not_moved,
        progressed=replies_to is not None and not no_progress,
        new_step=not void_reason and not lesson.refusal(message),
        turns_back=not lesson.refusal(message) and lesson.turns_back(message),
        reviews=reviews,
        trick=_find_trick(message, slips, student_text) if slips and not void_reason else "",
        unread=_find_unread(message, said),
        ends=message.ends,
        task_reason=prefix + _say_task(message, blocked, unscaffolded if slips else ""),
        forward_reason="" if replies_to is None else prefix + forward_reason,
        momentum_reason="" if replies_to is None else prefix + (no_progress or "goes forward"),
    )


def _why_void(message: _TeacherMessage, lesson: _LessonProgress, said: Sequence[str]) -> str:
    """Why the message counts for nothing; "" if it counts."""
    if message.foul:
        return message.foul
    if any(verb in lesson.verbs and not _was_said(statement, said) for statement, verb in message.stated.items()):
        return "says the student's part itself"
    if any(find_slips(sentence) and not _was_said(sentence, said) for sentence in message.examples):
        return "gives an example that is wrong"
    if lesson.explains_again(message):
        return "gives the same example as before"
    if any(_breaks(sentence, question) for sentence in message.explanations for question in message.lesson_questions):
        return "states a rule that does not hold"
    if message.ends and not lesson.is_complete:
        return "ends before the lesson is through"
    text = " ".join(message.before(index) for index in range(len(message.sentences)))
    if any(tells_answer(text, question, said) for question in message.lesson_questions):
        return "hands the answer over"
    return ""


def _find_unread(message: _TeacherMessage, said: Sequence[str]) -> str:
    """The first part of a message that no rule can read, its questions of the language left out."""
    known_words = words_of_language() | words_in(said)
    parts = (message.before(index) for index in range(len(message.sentences)))
    return next(filter(None, (find_unread(part, known_words, closed=True) for part in parts)), "")


def _was_said(text: str, said: Sequence[str]) -> bool:
    return any(holds(message, text) for message in said)


def _breaks(rule: str, question: Question) -> bool:
    """Whether the endings that a rule names are none of the verb in the answer to the question that follows it. A rule
    of nouns says nothing about verbs."""
    if _OF_NOUNS.search(rule) and "verb" not in rule.lower():
        return False
    endings = {ending or "" for ending, no_ending in _ENDING.findall(rule) if ending or no_ending}
    right_ending = answer_verb(question).removeprefix(question.verb)
    return endings == {right_ending} if _NOT.search(rule) else bool(endings) and right_ending not in endings


def _points_at(slip: Slip, message: _TeacherMessage, student_text: str) -> bool:
    """Whether a message elicits the correction: it repeats what the student said up to the slip, for the student to go
    on, or wonders at a few words with the slip."""
    said = normal(student_text).split()
    for sentence in message.own_sentences:
        words = [_AS_STUDENT.get(word, word) for word in normal(sentence).split()]
        while words and words[0] not in said:
            words = words[1:]
        for start in (start for start in range(len(said)) if words and said[start : start + len(words)] == words):
            if slip.word in words and len(words) <= _MOST_REPEATED and sentence.endswith("?"):
                return True
            if said[start + len(words) :][:1] == [slip.word] and sentence.endswith(("?", "…", "..")):
                return True
    return False


def _find_trick(message: _TeacherMessage, slips: Sequence[Slip], student_text: str) -> str:
    """What is false in a reply to slips, or that it gives a right form in a code; "" if there is nothing."""
    for slip in slips:
        if is_coded(message.text, (slip.fix, words_of_fix(slip, student_text)), (slip.word,)):
            return CODED
    return find_falsehood(student_text, message.text)


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
    if not kinds and not any(_points_at(slip, message, student_text) for slip in slips):
        return "passed over: not scaffolded"
    if kinds and not matching:
        return f"hinted at {' and '.join(sorted(kinds))}: not scaffolded"
    if not pointed_at <= {slip.word for slip in matching or slips}:
        return f"pointed at {', '.join(sorted(pointed_at))}: not scaffolded"
    if not message.tasks or message.lesson_questions:
        return "hinted and then asked something else: not scaffolded"
    return ""


def _why_not_moved_on(message: _TeacherMessage, lesson: _LessonProgress, reviews: bool) -> str:
    if lesson.is_complete:
        return _why_not_closed(message)
    if not reviews and (refusal := lesson.refusal(message)):
        return refusal
    index = message.questions.index(message.lesson_questions[0]) if message.lesson_questions else message.tasks[0]
    before = [sentence for sentence in message.sentences[:index] if sentence not in message.explanations]
    if len(before) > 1:
        return f"says {len(before)} sentences before moving on"
    explanations = message.explanations
    if len(explanations) > MOST_EXPLANATIONS or len(" ".join(explanations).split()) > LONGEST_EXPLANATION:
        return "explains at length"
    if len(_WORD.findall(" ".join([*before, message.before(index)]))) > LONGEST_ACKNOWLEDGEMENT:
        return "acknowledges at length"
    return ""


def _why_not_closed(message: _TeacherMessage) -> str:
    """Why the message is no farewell: one or two sentences and no task; "" if it is one."""
    return "" if 1 <= len(message.sentences) <= 2 and not message.tasks else "goes on after the last question"


def _why_no_progress(message: _TeacherMessage, lesson: _LessonProgress, reviews: bool) -> str:
    if lesson.is_complete:
        return _why_not_closed(message)
    if reviews:
        return ""
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
