"""Students in six dimensions: scripted ones that are bad in one, files, and whole runs."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from classroom_rl.config.evaluation import check_eval
from classroom_rl.config.values import CORRECT_PERSONA, ERROR_PERSONA
from classroom_rl.environments.toy_language.grammar import answer, inject, parse_question
from classroom_rl.environments.toy_language.lessons import Lesson, make_lessons, render_problem
from classroom_rl.errors import ConfigError
from classroom_rl.evaluation.dialogue import read_dialogues
from classroom_rl.evaluation.metrics.students import (
    FIGURES,
    TWO_SAMPLE,
    Talk,
    differs,
    halves,
    measure_students,
    talk_of,
    talks_of,
    two_sample,
    values_of,
)
from classroom_rl.evaluation.run import evaluate
from classroom_rl.evaluation.students import main
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.sampling_service import SamplingService
from tests.support.configs import loaded
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room
from tests.support.synthetic_run import record_of

ERRS, KEEPS, REACTS, ROLE, TALKS, LEARNS = dict.fromkeys(dimension for dimension, _ in FIGURES.values())
LESSONS = [lesson for lesson in make_lessons(1)[0] if len(lesson.subjects) > 2][:24]


def different(student: list[Talk], reference: list[Talk]) -> set[str]:
    """The dimensions in which a student clearly differs from the reference's."""
    figures, expected = (measure_students(talks, reference)["figures"] for talks in (student, reference))
    return {FIGURES[name][0] for name in FIGURES if differs(figures.get(name), expected.get(name), name)}


# Language ------------------------------------------------------------------------------------------------------------


RISING, FLAT = "eecc", "ecce"
"""Drawn personas of four messages: errors, and correct ones."""


def lesson_talk(lesson: Lesson, drawn: str, said: Callable[..., str] | None = None, errs: str = "") -> Talk:
    """The student errs as drawn, or as `errs` says; `said` replaces its messages."""
    rng = random.Random(lesson.verb)
    first, second, third = (question.text for question in lesson.questions[:3])
    hint = "Nearly. Look at the words again. Say it again."
    lines = [f"Hi! {first}", hint, *((hint, f"Good! {second}") if drawn == RISING else (f"Good! {second}", third))]
    turns: list[Turn] = []
    for number, (persona, behaviour) in enumerate(zip(drawn, errs or drawn, strict=True)):
        question = next(filter(None, map(parse_question, lines[number::-1])))
        kind = ("article", "preposition")[(number + len(lesson.verb)) % 2]
        text = (inject(answer(question, rng, kind), kind, rng) if behaviour == "e" else answer(question, rng)).text
        if said is not None:
            text = said(number, text, lines[number], lesson, turns)
        turns.append(Turn("teacher", lines[number]))
        turns.append(Turn("student", text, {"e": ERROR_PERSONA, "c": CORRECT_PERSONA}[persona]))
    return talk_of(record_of(render_problem(lesson), turns), None, None)


def runs_ahead(number: int, text: str, asked: str, lesson: Lesson, turns: list[Turn]) -> str:
    return answer(lesson.questions[2], random.Random(f"ahead {lesson}")).text if number == 3 else text


def echoes(number: int, text: str, asked: str, lesson: Lesson, turns: list[Turn]) -> str:
    return asked.removeprefix("Good! ") if number == 3 else text


def teaches(number: int, text: str, asked: str, lesson: Lesson, turns: list[Turn]) -> str:
    return f"{text} Well done! Say it again." if number == 3 else text


def insists(number: int, text: str, asked: str, lesson: Lesson, turns: list[Turn]) -> str:
    return turns[1].text if number == 1 else text


LANGUAGE = {
    "as the reference": (RISING, RISING, None, "", set()),
    "always errs": (FLAT, FLAT, None, "eeee", {ERRS}),
    "never errs": (FLAT, FLAT, None, "cccc", {ERRS, LEARNS}),  # it is right from the beginning, and at the end
    "errs at other times": (FLAT, FLAT, None, "ceec", {ERRS, LEARNS}),
    "knows what was not asked": (RISING, RISING, runs_ahead, "", {KEEPS}),
    "ignores a hint": (RISING, RISING, insists, "", {REACTS}),
    "repeats the question": (RISING, RISING, echoes, "", {ROLE, TALKS}),  # a question is another kind of message
    "speaks as the teacher": (RISING, RISING, teaches, "", {ROLE, TALKS}),
    "never learns": (RISING, FLAT, None, "", {LEARNS}),
}


@pytest.mark.parametrize("case", LANGUAGE)
def test_a_student_of_language_differs_in_the_dimension_in_which_it_is_bad(case: str):
    of_reference, drawn, said, errs, expected = LANGUAGE[case]
    reference = [lesson_talk(lesson, of_reference) for lesson in LESSONS]
    dimensions = different([lesson_talk(lesson, drawn, said, errs) for lesson in LESSONS], reference)
    # Errors are seen by the classifier, too: whether it tells them apart is not the subject of those cases.
    assert dimensions - ({TALKS} if errs else set()) == expected


# Maths ---------------------------------------------------------------------------------------------------------------


STEPS = ("Hi! Talk me through your solution.", "Not quite. Can you check the sum?", "What do you get for the tens?")
PLAIN = (
    "I added the apples, so the answer is {}.",
    "Okay, now I think the answer is {}.",
    "Oh, then the answer is {}.",
)
OTHER = ("Reckon mate, them makes the answer {}.", "Blimey, gotta be the answer {}.", "Ta, innit the answer {}.")


def problem(number: int, results: tuple[int, ...], wording: tuple[str, ...] = PLAIN) -> dict[str, Any]:
    """A conversation in MathDial's schema. `results` are the student's, as distances from the right answer."""
    bag, bought = 31 + 2 * number, 102 + 5 * number
    texts = [text.format(bag + bought + distance) for text, distance in zip(wording, results, strict=True)]
    turns = [
        {"role": role, "text": text}
        for pair in zip(STEPS, texts, strict=True)
        for role, text in zip(("teacher", "student"), pair, strict=True)
    ]
    return {
        "question": f"Tom has {bag} apples in a bag and buys {bought} apples. How many apples are there?",
        "ground_truth": f"There are {bag} + {bought} = {bag + bought} apples.\n {bag + bought}",
        "student_incorrect_solution": f"The answer is {bag + bought - 10}.\n {bag + bought - 10}",
        "turns": turns,
    }


def written(path: Path, *arguments: Any) -> Path:
    path.write_text("".join(json.dumps(problem(number, *arguments)) + "\n" for number in range(12)))
    return path


MATHS = {
    "as the reference": (((-10, -9, 0),), set()),
    "insists": (((-10, -10, 0),), {REACTS}),
    "knows everything": (((0, 0, 0),), {ERRS, KEEPS, LEARNS}),
    "never learns": (((-10, -9, -8),), {ERRS, LEARNS}),
    "has other words": (((-10, -9, 0), OTHER), {TALKS}),
    "errs otherwise than its attempt": (((-7, -9, 0),), {ERRS}),
}


@pytest.mark.parametrize("case", MATHS)
def test_a_student_of_maths_differs_in_the_dimension_in_which_it_is_bad(case: str, tmp_path: Path):
    arguments, expected = MATHS[case]
    files = written(tmp_path / "own.jsonl", *arguments), written(tmp_path / "reference.jsonl", (-10, -9, 0))
    student, reference = (talks_of(read_dialogues(file)[0]) for file in files)
    assert different(student, reference) == expected


def test_figures_of_maths_worked_by_hand(tmp_path: Path):
    talks = talks_of(read_dialogues(written(tmp_path / "own.jsonl", (-10, -9, 0)))[0])
    results = measure_students(talks)
    figures = {name: estimate["mean"] for name, estimate in results["figures"].items()}
    assert figures["errors (maths: of results)"] == pytest.approx(2 / 3)
    assert figures["first result is the attempt's"] == figures["keeps to what it knows"] == 1
    assert figures["changes after a hint"] == figures["right at the last message"] == 1
    assert figures["rise of right per message"] == pytest.approx(1 / 2)  # of 0, 0, 1
    assert [share["mean"] for share in results["right_by_message"]] == [0, 0, 1]
    assert "drawn personas" in results["needs"]["errors found minus drawn"]
    assert "reference" in results["needs"][TWO_SAMPLE]


def test_what_is_not_there_is_not_measured():
    """No message of the student, an attempt without a number, a message without a tutor's before it."""
    question = "How many apples?"
    silent = Talk("2 + 3 apples", [(True, "Goodbye.")], [None], "5", "I added 2.", True)
    assert not list(values_of(silent))
    turns = [(True, question), (False, "It is 4."), (False, "Look again: is it 4?"), (False, "It is 5.")]
    values = dict(values_of(Talk("2 + 3 apples", turns, [None] * 4, "5", "No idea.", True)))
    assert {"first result is the attempt's", "changes after a hint"}.isdisjoint(values)
    assert values["keeps to what it knows"] and values["right at the last message"]


@pytest.mark.parametrize(("kind", "failed"), [("attempt", True), ("guided", None)])
def test_the_attempt_that_opens_a_lesson_is_no_message_of_it(kind: str, failed: bool | None):
    turns = [Turn("student", "It is 4."), Turn("teacher", "Look again?"), Turn("student", "It is 5.", "x")]
    talk = talk_of(record_of("2 + 3 apples", turns).model_copy(update={"type": kind, "answer": "5"}), None, None)
    assert talk.attempt_failed is failed and talk.attempt == ("It is 4." if failed else "")
    assert talk.said() == ["It is 4.", "It is 5."][bool(failed) :] and len(talk.personas) == len(talk.turns)
    assert not failed or dict(values_of(talk))["first result is the attempt's"] is False


def test_the_classifier_is_at_chance_between_students_that_draw_from_the_same_words():
    words = [f"w{chr(97 + first)}{chr(97 + second)}" for first in range(6) for second in range(6)]
    rng = random.Random(3)
    talks = [
        Talk(f"p{number}", [(True, "Hi"), *((False, " ".join(rng.choices(words, k=8))) for _ in range(4))], [None] * 5)
        for number in range(80)
    ]
    low, high = two_sample(*halves(talks))["ci95"]
    assert low < 0.5 < high < 0.6


# Programs ------------------------------------------------------------------------------------------------------------


def test_recorded_conversations_stand_beside_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture):
    recorded, reference = written(tmp_path / "own.jsonl", (0, 0, 0)), written(tmp_path / "other.jsonl", (-10, -9, 0))
    assert main([str(recorded), "--reference", str(reference)]) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith("  keeps to what it knows")]
    assert row.split()[5] == "0.00" and " *" in row
    assert "not measurable here: errors found minus drawn" in printed
    assert main([str(tmp_path / "none.jsonl")]) == 2 and "no file or folder" in capsys.readouterr().err


def test_students_play_the_same_lessons_one_after_the_other(tokenizer, tmp_path, monkeypatch, capsys):
    lessons = tmp_path / "lessons.jsonl"
    rows = [{"problem": render_problem(lesson), "answer": ""} for lesson in LESSONS[:6]]
    lessons.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "students"

    async def open_service(config, weights, folder: Path) -> SamplingService:
        def student(prompt: str) -> str:
            return "Every day I cooks egg in the kitchen." if "error" in prompt else "Every day I cook an egg."

        room = Room(tokenizer, folder)
        room.student, room.judge = ScriptedEngine(tokenizer, student), RubricJudge()
        room.teacher = ScriptedEngine(tokenizer, lambda _: "Good! What do you say?")
        return room.open(config.generation)

    monkeypatch.setattr("classroom_rl.server.sampling_service.open_service", open_service)
    data = [f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]", f"logging.save_dir={folder}"]
    metrics = evaluate(loaded("eval", "--config-name=students", *data))
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    figures = {name: metrics["sampled"][name]["figures"] for name in ("toy", "never_errs")}
    assert figures["toy"]["right or wrong as drawn"]["mean"] == 1
    assert figures["never_errs"]["errors (maths: of results)"]["mean"] == 0
    assert figures["never_errs"]["errors found minus drawn"]["mean"] < 0
    table = pd.read_parquet(folder / "conversations.parquet")
    personas = {
        name: [turn["persona"] for text in group["turns"] for turn in json.loads(text)]
        for name, group in table.groupby("student")
    }
    assert personas["toy"] == personas["never_errs"], "the same schedule"
    assert "errors found minus drawn" in capsys.readouterr().out
    remeasured = {
        dialogues.name.split()[-2]: measure_students(talks_of(dialogues))
        for dialogues in read_dialogues(folder / "conversations.parquet")
    }
    assert remeasured["toy"]["figures"] == figures["toy"], "the file holds all that is measured"


REFUSED = [
    (["students=[{name: a}, {name: a}]"], "students has one whose name is 'a'"),
    (["students=[{name: reference}]"], "other than reference"),
    (["students=[{name: a, use_openrouter: true, use_gemini: true}]"], "of the student a are both set: choose one"),
    (["students=[]", "reference=x.jsonl"], "no students to compare"),
    (["tutors=[{name: t, model_name_or_path: m}]"], "tutors is set beside students"),
    (["server_url=http://h:1"], "server_url is set beside students"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_be_measured_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        check_eval(loaded("eval", "--config-name=students", *overrides))
