"""Figures of language lessons that need no judge: they are computed from the text of the messages and the personas.
They mean nothing if the simulated student does not follow its persona, which is checked as well.

Each figure is a mean over messages, turns or conversations. Its interval is bootstrapped over lessons.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from classroom_rl.config.values import ERROR_PERSONA, RULES_VERSION
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.feedback import (
    GIVING_KINDS,
    KINDS,
    falsely_corrects,
    feedback_kind,
    hands_over,
    repairs,
    shows_uptake,
)
from classroom_rl.judges.messages import (
    RETRY,
    ParsedPlan,
    answers,
    flips_role,
    holds,
    is_english,
    parrots,
    questions_asked,
    read_message,
    read_plan,
)
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.statistics import ByLesson, counted_share
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.thoughts import visible_text

CORRECT_PERSONA = "correct_student"
MIN_FAITHFUL_SHARE = 0.8
"""At least this share of a persona's turns must do what the persona says."""

MAX_STRAYING_SHARE = 0.05
"""At most this share of the student's turns may speak as the teacher, and at most this share may repeat its words."""

STUDENT_SHARES = ("error_persona", "correct_persona", "role_flips", "parroting")
"""The shares of a student's fidelity."""


@dataclass(frozen=True)
class StudentTurn:
    """A student's turn: its persona, whether it holds an error (None if unknown), whether it speaks as the teacher
    (`flips`), and whether it repeats the teacher's words (`parrots`)."""

    persona: str | None
    error: bool | None
    flips: bool
    parrots: bool


def student_turns(record: ConversationRecord, errors: Mapping[int, bool | None] | None = None) -> list[StudentTurn]:
    """What the rules find in each of the student's messages; whether it holds an error says `errors` by its position
    or, without them, the rules of the quickstart's language."""
    plan, turns, previous = read_plan(record.problem), [], ""
    for position, turn in enumerate(record.turns):
        text = visible_text(turn.text)
        if turn.role == "student":
            error = plan.find_error(text) if errors is None else errors[position]
            turns.append(StudentTurn(turn.persona, error, flips_role(text, previous, plan), parrots(text, previous)))
        previous = text
    return turns


def student_fidelity(turns: Iterable[StudentTurn], labelled_by: str) -> dict[str, Any]:
    """Measure how faithful the student was to its personas.

    Args:
        labelled_by: what decided which turns hold an error: "rules", "judge", or "nobody".

    Returns:
        `error_persona` and `correct_persona`: {"share", "n"} of turns that do what the persona says; `role_flips` and
        `parroting`: {"share", "n"} of all turns; `trusted`: False if a share is beyond its threshold, None if no turn
        could be checked for errors; `warnings`: sentences.
    """
    all_turns = list(turns)
    fidelity: dict[str, Any] = {
        "labelled_by": labelled_by,
        "error_persona": counted_share(turn.error for turn in all_turns if turn.persona == ERROR_PERSONA),
        "correct_persona": counted_share(
            None if turn.error is None else not turn.error for turn in all_turns if turn.persona == CORRECT_PERSONA
        ),
        "role_flips": counted_share(turn.flips for turn in all_turns),
        "parroting": counted_share(turn.parrots for turn in all_turns),
    }
    warnings = [text for _, text in out_of_bounds(fidelity)]
    shares = [fidelity[name]["share"] for name in ("error_persona", "correct_persona")]
    trusted = False if warnings else None if all(share is None for share in shares) else True
    return fidelity | {"trusted": trusted, "warnings": warnings}


def out_of_bounds(fidelity: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Each share of a student's fidelity that is beyond its threshold, with a warning."""
    expectations = {
        "error_persona": "turns asked to err hold an error",
        "correct_persona": "turns asked to be right hold none",
    }
    for name, meaning in expectations.items():
        share = fidelity[name]["share"]
        if share is not None and share < MIN_FAITHFUL_SHARE:
            yield name, f"only {share:.0%} of the {meaning} (at least {MIN_FAITHFUL_SHARE:.0%} should)"
    for name, meaning in {"role_flips": "speak as the teacher", "parroting": "say the teacher's words back"}.items():
        share = fidelity[name]["share"]
        if share is not None and share > MAX_STRAYING_SHARE:
            yield name, f"{share:.0%} of the student's turns {meaning} (at most {MAX_STRAYING_SHARE:.0%} may)"


# Figures of the tutor ----------------------------------------------------------------------------------------------


Values = dict[str, list[float]]
"""Figure → the values that it is the mean of."""
ErrorLabels = Mapping[tuple[str, int], bool]
"""(conversation id, position of a student's turn) → whether a judge found an error in it."""


def conversation_figures(
    record: ConversationRecord, labels: ErrorLabels | None = None
) -> tuple[Values, list[StudentTurn]]:
    """Compute the figures of one conversation, and what the rules find in its student's turns.

    Whether a student's turn holds an error is decided by rules where they know the language (the quickstart's), else
    by the judge's `labels`. A turn without a label is left out of all figures about errors. If `labels` is None, the
    turn's persona decides.
    """
    plan, texts = read_plan(record.problem), [visible_text(turn.text) for turn in record.turns]
    errors = errors_in(record, plan, labels)
    values: Values = {}
    for name, value in chain(
        _message_figures(record, texts, errors, plan),
        _reaction_figures(texts, errors, plan),
        _whole_figures(record, texts, plan),
    ):
        values.setdefault(name, []).append(float(value))
    # Without labels `errors` may fall back on the persona, which cannot prove that the persona was followed.
    return values, student_turns(record, None if labels is None else errors)


def errors_in(
    record: ConversationRecord, plan: ParsedPlan, labels: ErrorLabels | None = None
) -> dict[int, bool | None]:
    """Position of each student's turn → whether the turn holds an error; None if that is unknown. See
    `conversation_figures`."""
    errors: dict[int, bool | None] = {}
    for position, turn in enumerate(record.turns):
        if turn.role == "student":
            has_error = plan.find_error(visible_text(turn.text))
            if has_error is None:
                has_error = turn.persona == ERROR_PERSONA if labels is None else labels.get((record.id, position))
            errors[position] = has_error
    return errors


def _message_figures(
    record: ConversationRecord, texts: Sequence[str], errors: Mapping[int, bool | None], plan: ParsedPlan
) -> Iterator[tuple[str, float]]:
    """The figures of each message that the teacher wrote itself."""
    for position, turn in enumerate(record.turns):
        if turn.role == "student" or turn.given:
            continue
        text, earlier = texts[position], [texts[index] for index in errors if index < position]
        message = read_message(text)
        yield "teacher_words", message.words
        yield "tasks_per_message", len(message.tasks)
        if message.tasks:
            yield "ends_with_task", message.ends_with_task
        yield "in_english", is_english(message.text)
        error = errors.get(position - 1)  # of the student's last message; None in the teacher's first one
        if error:
            kind = feedback_kind(earlier[-1], text, plan)
            yield from ((f"feedback/{known_kind}", kind == known_kind) for known_kind in KINDS)
            yield "hands_over", kind in GIVING_KINDS
        elif error is False or position - 1 not in errors:
            gives_away = hands_over(
                text, lambda form, earlier=earlier: any(holds(reply, form) for reply in earlier), plan
            )
            yield "hands_over", gives_away
        if error is False:
            yield "false_corrections", falsely_corrects(text)


def _reaction_figures(
    texts: Sequence[str], errors: Mapping[int, bool | None], plan: ParsedPlan
) -> Iterator[tuple[str, float]]:
    """Uptake and repair, the student's reactions to the teacher's replies to errors."""
    for position, error in errors.items():
        if error and position + 2 in errors:  # the student's next turn, after the teacher's reply
            wrong, reply, answer = texts[position : position + 3]
            kind = feedback_kind(wrong, reply, plan)
            yield "uptake", shows_uptake(wrong, kind, answer, plan)
            yield "repair", repairs(wrong, kind, answer, plan)


def _whole_figures(record: ConversationRecord, texts: Sequence[str], plan: ParsedPlan) -> Iterator[tuple[str, float]]:
    """The figures of the conversation as a whole."""
    texts_of_roles = {
        role: [text for text, turn in zip(texts, record.turns, strict=True) if turn.role == role] for role in _ROLES
    }
    words = {role: sum(len(text.split()) for text in role_texts) for role, role_texts in texts_of_roles.items()}
    if sum(words.values()):
        yield "talk_ratio", words["teacher"] / sum(words.values())
    introduced, produced = plan_progress(plan, texts_of_roles["teacher"], texts_of_roles["student"])
    if plan.items:
        yield "plan_introduced", introduced / plan.items
        yield "plan_produced", produced / plan.items
    seen_tasks: set[str] = set()
    for text in texts_of_roles["teacher"]:
        task = read_message(text).task_text
        yield "repeats", bool(task) and normal(task) in seen_tasks and not RETRY.search(task)
        seen_tasks.add(normal(task))


_ROLES = ("teacher", "student")


def plan_progress(plan: ParsedPlan, teacher: Sequence[str], student: Sequence[str]) -> tuple[int, int]:
    """How many items of the plan the teacher introduced (said or showed the phrase, asked the question), and how many
    the student produced (said the phrase verbatim, answered the question without an error)."""
    if plan.lesson:
        planned = {question.text for question in plan.lesson.questions}
        asked = set().union(*map(questions_asked, teacher)) & planned
        answered = set().union(*(answers(text, plan.lesson) for text in student)) & planned
        return len(asked), len(answered)
    introduced = sum(any(holds(text, phrase.text) for text in teacher) for phrase in plan.phrases)
    return introduced, sum(any(holds(text, phrase.text) for text in student) for phrase in plan.phrases)


def tutor_figures(
    records: Sequence[ConversationRecord], labels: ErrorLabels | None = None
) -> tuple[ByLesson, dict[str, Any]]:
    """Compute the figures of a tutor's conversations, and the student's fidelity; `labels` as in
    `conversation_figures`."""
    by_lesson: ByLesson = {}
    students: list[StudentTurn] = []
    for lesson, group in group_by_problem(records).items():
        for record in group:
            figures, turns = conversation_figures(record, labels)
            students += turns
            for name, values in figures.items():
                by_lesson.setdefault(name, {}).setdefault(lesson, []).extend(values)
    by_rules = any(read_plan(record.problem).lesson for record in records)
    labelled_by = "rules" if by_rules else "judge" if labels else "nobody"
    if labels is not None and labelled_by == "nobody":
        by_lesson.pop("hands_over", None)  # unlabelled replies are left out, and openings alone would be another figure
    labelled_ids = None if labels is None or by_rules else {conversation for conversation, _ in labels}
    unlabelled = 0 if labelled_ids is None else sum(record.id not in labelled_ids for record in records)
    return by_lesson, student_fidelity(students, labelled_by) | {"unlabelled": unlabelled}


def language_metrics(records: Sequence[ConversationRecord], labels: ErrorLabels | None = None) -> dict[str, Any]:
    """The part of metrics.json about language: `language` (figure → estimate), `fidelity`, and `rules_version`."""
    by_lesson, fidelity = tutor_figures(records, labels)
    language = {name: mean_with_ci(values) for name, values in by_lesson.items()}
    return {"language": language, "fidelity": fidelity, "rules_version": RULES_VERSION}
