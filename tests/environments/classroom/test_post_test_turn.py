"""The post-test in the classroom: asked without the transcript, graded and rewarded."""

from dataclasses import replace

import pytest

from classroom_rl.config.base import GenerationConfig, PostTestConfig
from classroom_rl.config.load import ROOT
from classroom_rl.config.values import LEDGER, PHASED, STUDENT
from classroom_rl.environments.classroom.metrics import batch_metrics
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.errors import DataError
from classroom_rl.judges.post_test.records import GIVEN, PRODUCED
from classroom_rl.rollout.problem import PostTestMaterial, SiblingProblem, Step
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room
from tests.support.supervised_room import DrawnTeacher

PROBLEM = render_problem(Lesson("food", "cook", "every day", ("you", "your sister")))
LINES = [  # the teacher's messages; the second gives the second answer away
    "Hi! What do you cook every day?",
    "Good! What does your sister cook every day? Say: Every day my sister cooks a cake in the kitchen.",
    "Good!",
]
SAID = ["Every day I cook an egg in the kitchen.", "Every day my sister cooks a cake in the kitchen."]
MATERIAL = PostTestMaterial(
    (Step("the roles", "806"),),
    tuple(
        SiblingProblem(f"{rows} rows of 21 roles, 50 empty. How many people?", str(rows * 21 - 50), (step,))
        for rows in (20, 30)
        for step in (Step("the roles", str(rows * 21)),)
    ),
)


def asking(generation: GenerationConfig, **post_test) -> GenerationConfig:
    path = str(ROOT / "prompt_templates/post_test/quickstart.txt")
    options = PostTestConfig(**{"enable": True, "prompt_path": path, "max_tokens_per_answer": 40} | post_test)
    return replace(generation, post_test=options)


def in_lesson(room: Room, answers: list[str]) -> None:
    """Script the lesson, and the student's answers to the post-test."""
    room.teacher = DrawnTeacher(room.tokenizer, [LINES[0], "", LINES[1], "", LINES[2]])
    room.student = DrawnTeacher(room.tokenizer, ["", SAID[0], "", SAID[1], "", answers])


def prompts_of_student(room: Room) -> list[str]:
    return [room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls]


def play(room: Room, generation: GenerationConfig, **request) -> ConversationRecord:
    return room.play(generation, **{"problems": [PROBLEM], "answers": [""]} | request)[0]


def test_the_ledger_and_both_students_answers_are_recorded(room: Room, generation: GenerationConfig) -> None:
    in_lesson(room, ["Every day I cook a melon in the garden.", "Every day my sister cook a cake on the bus."])
    record = play(room, asking(generation, ask_student=True))
    assert [(entry.outcome, entry.turn) for entry in record.post_test.ledger] == [(PRODUCED, 1), (GIVEN, 2)]
    assert [(answer.student, answer.item, answer.right) for answer in record.post_test.answers] == [
        *((LEDGER, 0, True), (LEDGER, 1, False)),
        *((STUDENT, 0, True), (STUDENT, 1, False)),
    ]
    assert record.post_test.answers[2].text == "Every day I cook a melon in the garden."
    known, unknown = prompts_of_student(room)[2:]
    assert "make no mistake" in known and "What do you cook every day?" in known
    assert "Make one error" in unknown and "What does your sister cook every day?" in unknown
    assert not any(text in known + unknown for text in (*SAID, "Hi!", "Good!")), "asked without the transcript"


def test_without_the_key_nothing_is_tested_and_nobody_is_asked(room: Room, generation: GenerationConfig) -> None:
    in_lesson(room, [])
    record = play(room, generation)
    assert record.post_test is None and len(room.student.calls) == 2
    assert not any(name.startswith("post_test") for name in batch_metrics([record]))
    assert "post_test" not in generation.identity() and "post_test" in asking(generation).identity()
    assert not generation.post_test.enable


@pytest.mark.parametrize(("scored_by", "reward"), [(LEDGER, 0.5), (STUDENT, 1.0)])
def test_the_reward_counts_the_answers_of_the_student_that_is_configured(
    room: Room, generation: GenerationConfig, scored_by: str, reward: float
) -> None:
    in_lesson(room, SAID)  # the model answers both, whatever it was told
    room.reward_weights = {"post_test": 2.0}
    record = play(room, asking(generation, ask_student=True, scored_by=scored_by))
    assert record.rewards == {"post_test": reward} and record.reward == 2 * reward


def test_with_phases_it_comes_while_the_student_is_awake(room: Room, generation: GenerationConfig) -> None:
    in_lesson(room, SAID)
    room.reward_weights = {"post_test": 1.0, "pedagogical": 1.0}
    record = play(room, replace(asking(generation, ask_student=True), schedule=PHASED))
    assert record.post_test.score(STUDENT) == 1.0
    assert room.woken[:2] == [("judge",), ("student",)]


def test_it_does_not_change_the_solutions(room: Room, generation: GenerationConfig) -> None:
    """Their seeds and their prompts are the same with a post-test before them and without."""
    room.reward_weights = {"end_rm": 1.0}
    request = {"problems": ["26 rows of 31 roles, 40 empty?"], "answers": ["766"], "fixed_seeds": True}
    request["post_test_material"] = [MATERIAL]
    calls = []
    for number, options in enumerate((generation, asking(generation, ask_student=True))):
        room.student = ScriptedEngine(room.tokenizer, lambda _: "Hello.")
        room.play(options, request_id=f"r{number}", **request)
        calls.append([(prompt, sampling.seed) for prompt, sampling, _ in room.student.calls])
    plain, with_test = calls
    assert plain[-2:] == with_test[-2:] and len(with_test) == len(plain) + 4
    assert len({seed for _, seed in with_test}) == len(with_test), "every answer has a seed of its own"


def test_a_maths_problem_is_tested_by_its_siblings(room: Room, generation: GenerationConfig) -> None:
    """A step that the student found counts on every sibling; the answer, which the teacher told, on none."""
    lines = iter(["How many roles are there?", "Yes. The answer is 766.", "Bye."])
    room.teacher = ScriptedEngine(room.tokenizer, lambda _: next(lines))
    room.student = ScriptedEngine(room.tokenizer, lambda _: "There are 806.")
    room.reward_weights = {"post_test": 1.0}
    record = room.play(
        asking(generation, siblings=2),
        problems=["26 rows of 31 roles, 40 empty. How many people?"],
        answers=["766"],
        post_test_material=[MATERIAL],
    )[0]
    assert [entry.outcome for entry in record.post_test.ledger] == [PRODUCED, GIVEN]
    questions = [answer.question.splitlines()[0] for answer in record.post_test.answers]
    assert questions == [sibling.problem for sibling in MATERIAL.siblings for _ in range(2)]
    assert [answer.right for answer in record.post_test.answers] == [True, False, True, False]
    assert record.reward == 0.5


@pytest.mark.parametrize("material", [None, [PostTestMaterial()]])
def test_a_problem_that_nothing_can_be_asked_about_is_refused(room: Room, generation, material) -> None:
    with pytest.raises(DataError, match="has no sibling problems"):
        room.play(asking(generation), post_test_material=material)
