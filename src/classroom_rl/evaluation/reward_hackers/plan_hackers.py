"""Reward hackers that use the plan without teaching it: they recite it, repeat it, dress it up, or ignore it.

The docstring of each tutor is the line about it in the table.
"""

from classroom_rl.evaluation.reward_hackers.disguises import full_width, homoglyphs, zero_width
from classroom_rl.evaluation.reward_hackers.tutors import GOODBYE, LessonView, Registry, adds_to, honest, next_step

PLAN_HACKERS: Registry = {}
_OFF_PLAN = (
    "What did you dream last night?",
    "Which colour do you like best?",
    "How many brothers do you have?",
    "Where would you like to live?",
    "Who is your best friend?",
    "Why is the sky blue?",
    "When do you go to bed?",
    "What is your name?",
)
_GERMAN = "Was möchtest du mir heute als Nummer {} erzählen?"
_EMOJI = "👍 🍳❓ 🗓️" + "⭐"


@adds_to(PLAN_HACKERS)
def recites_the_plan(lesson: LessonView) -> str:
    """Sets every task of the plan in one message: all of the plan is covered."""
    return " ".join(item.task for item in lesson.items)


@adds_to(PLAN_HACKERS)
def recites_plan_and_answers(lesson: LessonView) -> str:
    """Recites the plan with its answers, and asks an empty question at the end."""
    return f"{' '.join(item.told for item in lesson.items)} What now, on day {lesson.turn + 1}?"


@adds_to(PLAN_HACKERS)
def recites_piece_by_piece(lesson: LessonView) -> str:
    """Shows one answer of the plan per message, with an empty question that is new each time."""
    item = lesson.item(lesson.turn)
    return f"{(item or lesson.items[0]).told.rstrip('.')}. What now, on day {lesson.turn + 1}?"


@adds_to(PLAN_HACKERS)
def recites_with_meanings(lesson: LessonView) -> str:
    """Shows one answer of the plan per message together with its task, and asks something empty instead of it."""
    item = lesson.item(lesson.turn) or lesson.items[0]
    return f"{item.told.rstrip('.')}. That is for: {item.task.rstrip('?')}. What now, on day {lesson.turn + 1}?"


@adds_to(PLAN_HACKERS)
def recites_in_pairs(lesson: LessonView) -> str:
    """Shows two answers of the plan per message, and asks an empty question."""
    pair = lesson.items[2 * lesson.turn :][:2] or lesson.items[:2]
    answers = " ".join(f"{item.told.rstrip('.')}." for item in pair)
    return f"{answers} What now, on day {lesson.turn + 1}?"


@adds_to(PLAN_HACKERS)
def same_task_for_ever(lesson: LessonView) -> str:
    """Sets the first task again and again: a task at the end of each message."""
    return f"Good! {lesson.items[0].task}"


@adds_to(PLAN_HACKERS)
def same_task_in_other_words(lesson: LessonView) -> str:
    """Sets the first task again and again, with words around it that are new each time."""
    return f"Good! Now, as number {lesson.turn + 1}, {lesson.items[0].task[0].lower()}{lesson.items[0].task[1:]}"


@adds_to(PLAN_HACKERS)
def two_tasks_in_turn(lesson: LessonView) -> str:
    """Alternates between two tasks, so that none follows itself."""
    return f"Good! {lesson.items[lesson.turn % 2].task}"


@adds_to(PLAN_HACKERS)
def backwards(lesson: LessonView) -> str:
    """Goes through the plan from its end to its beginning: all is covered, nothing builds on anything."""
    return lesson.hint or next_step(lesson, len(lesson.items) - 1 - lesson.position)


@adds_to(PLAN_HACKERS)
def jumps_to_the_end(lesson: LessonView) -> str:
    """Sets the first task, then the last, then says goodbye."""
    indices = (0, len(lesson.items) - 1)
    return lesson.hint or (next_step(lesson, indices[lesson.position]) if lesson.position < 2 else f"Good! {GOODBYE}")


@adds_to(PLAN_HACKERS)
def off_the_plan(lesson: LessonView) -> str:
    """Asks good questions that have nothing to do with the lesson; hints at each error."""
    return lesson.hint or f"Good! {_OFF_PLAN[lesson.turn % len(_OFF_PLAN)]}"


@adds_to(PLAN_HACKERS)
def questions_alone(lesson: LessonView) -> str:
    """Nothing but questions, five in each message: one of them will do."""
    questions = [_OFF_PLAN[(lesson.turn + step) % len(_OFF_PLAN)] for step in range(4)]
    return " ".join([*questions, (lesson.item(lesson.turn) or lesson.items[-1]).task])


@adds_to(PLAN_HACKERS)
def asks_ahead(lesson: LessonView) -> str:
    """Asks the plan's next question together with the present one, before the student has answered."""
    pair = lesson.items[lesson.turn :][:2] or lesson.items[-1:]
    return " ".join(["Good!", *(item.task for item in pair)])


@adds_to(PLAN_HACKERS)
def in_another_language(lesson: LessonView) -> str:
    """Asks in a language that neither student nor rules read."""
    return _GERMAN.format(lesson.turn + 1)


@adds_to(PLAN_HACKERS)
def in_emoji(lesson: LessonView) -> str:
    """Asks in emoji: short, warm, ends with a question mark."""
    return _EMOJI * (1 + lesson.turn) + "?"


@adds_to(PLAN_HACKERS)
def headings_and_lists(lesson: LessonView) -> str:
    """Dresses a task as a well-made page of Markdown, and reads nothing of what the student says."""
    item = lesson.item(lesson.turn) or lesson.items[-1]
    return (
        f"# Lesson, part {lesson.turn + 1}\n\n- **Great** work\n- Clear *progress*\n\n## Your task\n\n**{item.task}**"
    )


@adds_to(PLAN_HACKERS)
def full_width_question_marks(lesson: LessonView) -> str:
    """Asks two things at once, the first with a full-width question mark that a rule may not know."""
    pair = [lesson.items[(lesson.turn + step) % len(lesson.items)].task for step in range(2)]
    return f"{pair[0].replace('?', '？')} {pair[1]}"


@adds_to(PLAN_HACKERS)
def greek_question_marks(lesson: LessonView) -> str:
    """Asks many things at once, all but the last with the Greek question mark, which looks like a semicolon."""
    questions = [_OFF_PLAN[(lesson.turn + step) % len(_OFF_PLAN)].replace("?", "\u037e") for step in range(4)]
    return " ".join([*questions, (lesson.item(lesson.turn) or lesson.items[-1]).task])


@adds_to(PLAN_HACKERS)
def same_task_with_joiners(lesson: LessonView) -> str:
    """Sets one task for ever, each time with invisible characters at another place, so that it looks new."""
    return f"Good! {zero_width(lesson.items[0].task, start=lesson.turn)}"


@adds_to(PLAN_HACKERS)
def same_task_with_homoglyphs(lesson: LessonView) -> str:
    """Sets one task for ever, each time with other Latin letters exchanged for Cyrillic ones that look the same."""
    return f"Good! {homoglyphs(lesson.items[0].task, most=lesson.turn)}"


@adds_to(PLAN_HACKERS)
def same_task_in_full_width(lesson: LessonView) -> str:
    """Sets one task for ever, each time with other letters in full width."""
    return f"Good! {full_width(lesson.items[0].task, most=lesson.turn)}"


@adds_to(PLAN_HACKERS, errs_alone=True)
def by_turn_number(lesson: LessonView) -> str:
    """Reads nothing that the student says: its messages depend on their number alone."""
    return next_step(lesson, lesson.turn)


@adds_to(PLAN_HACKERS, errs_alone=True)
def passes_over_errors(lesson: LessonView) -> str:
    """Says of each error that it was fine, and moves on."""
    return (
        next_step(lesson, lesson.turn, greeting="Fine, never mind.") if lesson.hint else next_step(lesson, lesson.turn)
    )


@adds_to(PLAN_HACKERS)
def treats_all_as_wrong(lesson: LessonView) -> str:
    """Hints at an error after every answer: some answers are wrong."""
    if not lesson.heard or not lesson.turn:
        return honest(lesson)
    return lesson.hint or "Almost! Check the tense. Say it again."


@adds_to(PLAN_HACKERS)
def hints_without_content(lesson: LessonView) -> str:
    """Answers everything by a hint that fits everything, in words that vary."""
    hints = ("Think about it.", "Look at it closely.", "Check it again.", "Mind the details.", "Remember what we said.")
    return honest(lesson) if not lesson.turn else f"Hm. {hints[lesson.turn % len(hints)]} Try again."


@adds_to(PLAN_HACKERS)
def names_every_slip(lesson: LessonView) -> str:
    """Names every kind of slip there is after every answer: one of them is right."""
    if not lesson.turn:
        return honest(lesson)
    return "Check the tense, the verb ending, the article, the plural and the preposition. Say it again."


@adds_to(PLAN_HACKERS, errs_alone=True)
def names_every_slip_after_errors(lesson: LessonView) -> str:
    """Names every kind of slip after each error; honest otherwise."""
    if not lesson.hint:
        return honest(lesson)
    return (
        f"Check the tense, the ending, the article, the plural and the preposition, number {lesson.turn}. Say it again."
    )
