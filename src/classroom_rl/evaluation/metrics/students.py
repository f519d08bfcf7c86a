"""Six dimensions of a simulated student, from finished conversations of language lessons or maths problems: it errs as
drawn, keeps to what it knows, reacts to hints, stays in its role, talks like the students of a reference, and learns
over turns. Rules decide; what they cannot tell is left out, and a figure without a value says what it needs.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, linear_regression
from typing import Any

from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.environments.toy_language.grammar import parse_sentence
from classroom_rl.evaluation.dialogue import PERSONAS, Dialogues
from classroom_rl.evaluation.metrics.language import ErrorLabels
from classroom_rl.evaluation.metrics.maths import InitialSolutions
from classroom_rl.judges.feedback import feedback_kind
from classroom_rl.judges.messages import (
    ParsedPlan,
    answers,
    flips_role,
    holds,
    parrots,
    questions_asked,
    read_message,
    read_plan,
)
from classroom_rl.judges.moves.classifier import STOPWORDS, require_sklearn
from classroom_rl.judges.moves.rules import (
    LOOKS_AGAIN,
    confirms,
    is_actionable,
    last_number,
    numbers,
    tells,
    treats_as_wrong,
    words,
)
from classroom_rl.judges.readings import Exchange
from classroom_rl.judges.reference_answers import (
    Reference,
    gives_wrong_result,
    has_answered,
    names_answer,
    read_reference,
)
from classroom_rl.rollout.intervals import LEAST_LESSONS, Estimate, mean_with_ci
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.thoughts import visible_text

TWO_SAMPLE = "told from the reference's by a classifier"
WORDS, VOCABULARY = "words per message", "own words that the reference's students use"
_ERRORS, _REFERENCE = "rules or labels that tell right from wrong", "a reference"
FIGURES: dict[str, tuple[str, str]] = {
    "errors found minus drawn": ("errs as drawn", f"drawn personas (error_student, correct_student), and {_ERRORS}"),
    "right or wrong as drawn": ("errs as drawn", f"drawn personas (error_student, correct_student), and {_ERRORS}"),
    "errors (maths: of results)": ("errs as drawn", _ERRORS),
    "first result is the attempt's": ("errs as drawn", "maths, with the text of the student's attempt before it"),
    "keeps to what it knows": ("keeps to what it knows", "a lesson's plan, or a wrong attempt with the right answer"),
    "changes after a hint": ("reacts to hints", "a lesson's plan or an answer, and hints after wrong messages"),
    "changes after praise alone": ("reacts to hints", "a lesson's plan or an answer, and praise of wrong messages"),
    "speaks as the teacher": ("stays in its role", "student's messages"),
    "repeats the teacher's words": ("stays in its role", "student's messages"),
    WORDS: ("talks like the reference", "student's messages"),
    VOCABULARY: ("talks like the reference", _REFERENCE),
    TWO_SAMPLE: ("talks like the reference", f"{_REFERENCE}, and {LEAST_LESSONS} problems on each side"),
    "right at the first message": ("learns over turns", _ERRORS),
    "right at the last message": ("learns over turns", _ERRORS),
    "rise of right per message": ("learns over turns", f"{_ERRORS}, for two messages of a conversation"),
}
"""Figure → its dimension, and what it needs to be measured. All but words per message are shares, or differences of
shares."""

_SIGNED = ("errors found minus drawn", "rise of right per message")
_FOLDS, _MOST_MESSAGES = 5, 2000


@dataclass(frozen=True)
class Talk:
    """A conversation whose student is measured.

    Attributes:
        problem: the text of the problem; intervals are over problems.
        turns: (whether the tutor speaks, visible text).
        personas: the persona drawn for each turn; None where none was drawn.
        answer: the right answer of a maths problem; "" if there is none.
        attempt: the student's attempt before the conversation; "" if its text is unknown.
        attempt_failed: whether that attempt, or most of several, was wrong; None if unknown.
        labels: position of a student's turn → whether a judge found an error in it.
    """

    problem: str
    turns: Sequence[tuple[bool, str]]
    personas: Sequence[str | None]
    answer: str = ""
    attempt: str = ""
    attempt_failed: bool | None = None
    labels: Mapping[int, bool] = field(default_factory=dict)

    @cached_property
    def plan(self) -> ParsedPlan:
        return read_plan(self.problem)

    @cached_property
    def reference(self) -> Reference | None:
        """The parsed answer of a maths problem; None in a language lesson, or if there is no answer."""
        return read_reference(self.answer) if self.answer and not self.plan.items else None

    def said(self, before: int | None = None, tutor: bool = False) -> list[str]:
        """The messages of the student, or of the tutor, before a position."""
        return [text for is_tutor, text in self.turns[:before] if is_tutor == tutor]

    @cached_property
    def right(self) -> dict[int, bool | None]:
        """Position of each student's message → whether it is right: without an error, or in maths with the right
        result. None if nobody knows, and for a message of maths that gives no result."""
        return {
            position: self._right(position, text)
            for position, (is_tutor, text) in enumerate(self.turns)
            if not is_tutor
        }

    def _right(self, position: int, text: str) -> bool | None:
        if self.reference is not None:
            is_right = has_answered(self.reference, [text])
            return True if is_right else False if gives_wrong_result(self.reference, [text]) else None
        error = self.plan.find_error(text)
        error = self.labels.get(position) if error is None else error
        return None if error is None else not error

    @cached_property
    def right_so_far(self) -> dict[int, bool]:
        """The number of a student's message, from 0 → whether it is right; in maths whether the student has given the
        answer by then. Without those of which nobody knows."""
        right: Iterable[bool | None] = self.right.values()
        if self.reference is not None:
            messages = self.said()
            right = [has_answered(self.reference, messages[: number + 1]) for number in range(len(messages))]
        return {number: is_right for number, is_right in enumerate(right) if is_right is not None}


def talk_of(record: ConversationRecord, labels: ErrorLabels | None, initial: InitialSolutions | None) -> Talk:
    """A conversation of an evaluation. Arguments as in `EvaluationResult`."""
    turns = [(turn.role == "teacher", visible_text(turn.text)) for turn in record.turns]
    own_labels = {
        position: error for (conversation, position), error in (labels or {}).items() if conversation == record.id
    }
    grades = [solution.grade for solution in (initial or {}).get(record.problem_id, [])]
    personas = [turn.persona for turn in record.turns]
    talk = Talk(
        record.problem, turns, personas, record.answer, attempt_failed=_mostly_failed(grades), labels=own_labels
    )
    return _with_opening_attempt(talk, record.type)


def talks_of(dialogues: Dialogues) -> list[Talk]:
    """The conversations of a file. Rows of others may have the problem's text as `problem` or `question`; the answer as
    `answer`, or as the last number of `ground_truth` or `solution`; and an attempt as `student_incorrect_solution`."""
    talks = []
    for (problem, turns), row in zip(dialogues.conversations, dialogues.rows, strict=True):
        text = next((row[key] for key in ("problem", "question") if isinstance(row.get(key), str)), problem)
        solution = next((row[key] for key in ("ground_truth", "solution") if isinstance(row.get(key), str)), "")
        attempt = row.get("student_incorrect_solution")
        attempt = attempt if isinstance(attempt, str) else ""
        grades = [entry["grade"] for entry in json.loads(row.get("initial_solutions") or "[]")]
        answer = str(row.get("answer") or last_number(solution))
        talk = Talk(text, turns, row[PERSONAS], answer, attempt, True if attempt else _mostly_failed(grades))
        talks.append(_with_opening_attempt(talk, str(row.get("type"))))
    return talks


def _mostly_failed(grades: Sequence[float]) -> bool | None:
    return fmean(grades) < 0.5 if grades else None


def _with_opening_attempt(talk: Talk, kind: str) -> Talk:
    """The talk of a conversation that the student's attempt opened: the attempt is none of its messages."""
    if kind != ConversationType.ATTEMPTED or not talk.turns or talk.turns[0][0]:
        return talk
    attempt = talk.turns[0][1]
    is_right = None if talk.reference is None else has_answered(talk.reference, [attempt])
    later = {position - 1: error for position, error in talk.labels.items() if position}
    return Talk(
        talk.problem,
        talk.turns[1:],
        talk.personas[1:],
        talk.answer,
        attempt,
        None if is_right is None else not is_right,
        later,
    )


def values_of(talk: Talk) -> Iterator[tuple[str, float]]:
    """The values of the figures of one conversation that need no reference."""
    for position, is_right in talk.right.items():
        text, previous = talk.turns[position][1], _tutor_at(talk, position - 1) or ""
        flips, repeats = flips_role(text, previous, talk.plan), parrots(text, previous)
        yield "speaks as the teacher", flips
        yield "repeats the teacher's words", repeats
        yield WORDS, len(text.split())
        persona = talk.personas[position]
        if is_right is not None:
            yield "errors (maths: of results)", not is_right
            if persona in (ERROR_PERSONA, CORRECT_PERSONA):
                is_drawn_wrong = persona == ERROR_PERSONA
                yield "errors found minus drawn", float(not is_right) - float(is_drawn_wrong)
                yield "right or wrong as drawn", is_right != is_drawn_wrong
        if talk.plan.items and not flips and not repeats:
            yield "keeps to what it knows", _keeps_to_lesson(talk, position)
        reply = None if is_right is True or position + 2 not in talk.right else _tutor_at(talk, position + 1)
        if reply is not None and (reaction := _reaction(talk, position, reply)):
            yield reaction
    if talk.reference is not None:
        yield from _values_of_attempt(talk)
    yield from _values_of_learning(talk.right_so_far)


def _tutor_at(talk: Talk, position: int) -> str | None:
    """The tutor's message at a position; None if there is none."""
    return talk.turns[position][1] if 0 <= position < len(talk.turns) and talk.turns[position][0] else None


def _values_of_attempt(talk: Talk) -> Iterator[tuple[str, float]]:
    """Whether a student whose attempt failed solves the problem at once, and whether it comes with that attempt."""
    if talk.attempt_failed and talk.right:  # a lesson that the tutor ends at once has no message of the student
        yield "keeps to what it knows", not next(iter(talk.right.values()))
    with_number = next((text for text in talk.said() if last_number(text)), None)
    if last_number(talk.attempt) and with_number is not None:
        result = {number.value for number in numbers(last_number(talk.attempt))}
        yield "first result is the attempt's", result <= {number.value for number in numbers(with_number)}


def _keeps_to_lesson(talk: Talk, position: int) -> bool:
    """Whether a message keeps to the lesson so far. In the quickstart: a sentence of its language, right or wrong, that
    answers no planned question before it was asked. In other plans: at most one phrase that nobody has said before."""
    text, tutor = talk.turns[position][1], talk.said(position, tutor=True)
    if talk.plan.lesson is not None:
        ahead = answers(text, talk.plan.lesson) - set().union(*map(questions_asked, tutor))
        return parse_sentence(text) is not None and not ahead
    earlier_texts = [earlier_text for _, earlier_text in talk.turns[:position]]
    phrases_said = [planned.text for planned in talk.plan.phrases if holds(text, planned.text)]
    return sum(not any(holds(earlier_text, phrase) for earlier_text in earlier_texts) for phrase in phrases_said) <= 1


def _reaction(talk: Talk, position: int, reply: str) -> tuple[str, float] | None:
    """Whether the student changes its answer after the tutor's reply to a message that is not known to be right: after
    a hint (feedback; in maths a question, a task, or words that ask to look again), or after praise alone. None after
    other replies, and where there is no answer to change."""
    wrong, answer = talk.turns[position][1], talk.turns[position + 2][1]
    exchange = Exchange(reply, wrong)
    if talk.plan.items:
        is_hint = feedback_kind(wrong, reply, talk.plan) != "none"
        is_bare = not read_message(reply).tasks
        changed = normal(answer) != normal(wrong)
    elif talk.reference is not None:
        if names_answer(talk.reference, reply, talk.problem):
            return None
        is_hint = is_actionable(exchange) or treats_as_wrong(exchange) or LOOKS_AGAIN.search(reply) is not None
        is_bare = not tells(exchange)
        results = [[number.value for number in numbers(text)][-1:] for text in (wrong, answer)]
        if not results[0]:
            return None
        changed = bool(results[1]) and results[0] != results[1]
    else:
        return None
    if is_hint:
        return "changes after a hint", changed
    return ("changes after praise alone", changed) if confirms(exchange) and is_bare else None


def _values_of_learning(known: Mapping[int, bool]) -> Iterator[tuple[str, float]]:
    if known:
        ends = list(known.values())
        yield "right at the first message", ends[0]
        yield "right at the last message", ends[-1]
    if len(known) > 1:
        yield "rise of right per message", linear_regression(list(known), list(map(float, known.values()))).slope


def _messages(talks: Sequence[Talk]) -> Iterator[tuple[Talk, str, set[str]]]:
    """Each student's message with the content words of the problem and of the tutor before it: its topic."""
    for talk in talks:
        topic = set(words(talk.problem)) - STOPWORDS
        for is_tutor, text in talk.turns:
            if is_tutor:
                topic |= set(words(text)) - STOPWORDS
            else:
                yield talk, text, set(topic)


def vocabulary(talks: Sequence[Talk]) -> dict[str, set[str]]:
    """Word → the problems on which a student uses it of itself: words of the topic and numbers do not count."""
    problems: dict[str, set[str]] = defaultdict(set)
    for talk, text, topic in _messages(talks):
        for word in _own_words(text, topic):
            problems[word].add(talk.problem)
    return problems


def _own_words(text: str, topic: set[str]) -> list[str]:
    return [word for word in words(text) if word not in topic and not any(map(str.isdigit, word))]


def two_sample(one: Sequence[Talk], other: Sequence[Talk]) -> Estimate:
    """The classifier two-sample test (Lopez-Paz and Oquab, "Revisiting Classifier Two-Sample Tests", ICLR 2017): how
    often a classifier tells from a message which of two groups of students wrote it. 0.5: they cannot be told apart.

    Logistic regression on tf-idf of words and pairs of words, and on the length; numbers and words of the topic have
    placeholders, so that other problems alone make no difference. Of the larger side as many messages are drawn as the
    smaller has, at most `_MOST_MESSAGES`. The accuracy is that of messages on problems that the classifier was not
    fitted to.

    Raises:
        ConfigError: without scikit-learn.
    """
    sides = [[(talk.problem, _tokens(text, topic)) for talk, text, topic in _messages(side)] for side in (one, other)]
    if min(len({problem for problem, _ in side}) for side in sides) < LEAST_LESSONS:
        return mean_with_ci({})
    require_sklearn()
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline

    size = min(*map(len, sides), _MOST_MESSAGES)
    messages = [message for side in sides for message in random.Random(0).sample(side, size)]
    problems, texts = zip(*messages, strict=True)
    labels = [0] * size + [1] * size
    ngrams = TfidfVectorizer(
        tokenizer=str.split, token_pattern=None, lowercase=False, ngram_range=(1, 2), sublinear_tf=True
    )
    model = make_pipeline(ngrams, LogisticRegression(solver="liblinear", random_state=0))
    folds = StratifiedGroupKFold(_FOLDS, shuffle=True, random_state=0)
    predictions = cross_val_predict(model, texts, labels, groups=problems, cv=folds)
    hits: dict[str, list[float]] = defaultdict(list)
    for problem, label, prediction in zip(problems, labels, predictions, strict=True):
        hits[problem].append(float(label == prediction))
    return mean_with_ci(hits)


def _tokens(text: str, topic: set[str]) -> str:
    message_words = words(text)
    tokens = ["<n>" if word[0].isdigit() else "<topic>" if word in topic else word for word in message_words]
    return " ".join([*tokens, f"<length_{len(message_words).bit_length()}>"])  # in powers of two


def measure_students(talks: Sequence[Talk], reference: Sequence[Talk] | None = None) -> dict[str, Any]:
    """The figures of a student, each with its interval over problems.

    Args:
        reference: conversations of the students that it should talk like, of whose words those on other problems count.
            For the reference itself give `talks`: the classifier then tells its problems' one half from the other.

    Returns:
        `figures`: figure → estimate, of those that can be measured; `needs`: figure → what the others need;
        `right_by_message`: the share right at the first, second, … message; `conversations`, `messages`, `problems`.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    by_message: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for talk in talks:
        for name, value in values_of(talk):
            values[name][talk.problem].append(float(value))
        for number, is_right in talk.right_so_far.items():
            by_message[number][talk.problem].append(float(is_right))
    if reference is not None:
        reference_vocabulary = vocabulary(reference)
        for talk, text, topic in _messages(talks):
            in_vocabulary = [
                bool(reference_vocabulary.get(word, set()) - {talk.problem}) for word in _own_words(text, topic)
            ]
            values[VOCABULARY][talk.problem] += map(float, in_vocabulary)
    figures = {name: mean_with_ci(values[name], (-1.0, 1.0) if name in _SIGNED else None) for name in FIGURES}
    if reference is not None:
        figures[TWO_SAMPLE] = two_sample(*(halves(talks) if reference is talks else (talks, reference)))
    measured = {name: estimate for name, estimate in figures.items() if estimate["n"]}
    return {
        "conversations": len(talks),
        "problems": len({talk.problem for talk in talks}),
        "messages": sum(len(talk.said()) for talk in talks),
        "figures": measured,
        "needs": {name: needs for name, (_, needs) in FIGURES.items() if name not in measured},
        "right_by_message": [mean_with_ci(by_message[number]) for number in sorted(by_message)],
    }


def halves(talks: Sequence[Talk]) -> tuple[list[Talk], list[Talk]]:
    """The conversations on one half of the problems, drawn at random, and those on the other."""
    problems = sorted({talk.problem for talk in talks})
    half = set(random.Random(0).sample(problems, len(problems) // 2))
    return [talk for talk in talks if talk.problem in half], [talk for talk in talks if talk.problem not in half]


def differs(estimate: Estimate | None, reference: Estimate | None, name: str) -> bool:
    """Whether a figure is clearly another one than the reference's: the intervals do not touch; of the classifier,
    whether its interval is above 0.5."""
    interval, reference_interval = ((side or {}).get("ci95") for side in (estimate, reference))
    if name == TWO_SAMPLE:
        return interval is not None and interval[0] > 0.5
    return None not in (interval, reference_interval) and (
        interval[0] > reference_interval[1] or interval[1] < reference_interval[0]
    )
