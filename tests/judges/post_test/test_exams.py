"""The exams: what is asked, what the student that the program holds answers, and how answers are graded."""

import asyncio
from collections.abc import Iterator

import pytest

from classroom_rl.config.base import GenerationConfig, PostTestConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.post_test_turn import answers_from_ledger
from classroom_rl.errors import DataError
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.post_test.exams import ANSWER, EmbeddedExaminer, check_exams, examiner_of
from classroom_rl.rollout.post_test import GIVEN, MISSED, PRODUCED, LedgerEntry
from classroom_rl.rollout.problem import PostTestMaterial, Problem, SiblingProblem, Step
from classroom_rl.rollout.prompts import render
from tests.judges.post_test.test_ledger import CINEMA, FRENCH, WORLDS, every_world


@pytest.fixture
def checker() -> Iterator[AnswerChecker]:
    made = AnswerChecker(workers=1)
    yield made
    made.shutdown()


def entries(world, known: set[int]) -> list[LedgerEntry]:
    count = len(world.exam.ledger([]))
    return [LedgerEntry(f"i{i}", "c", PRODUCED if i in known else (GIVEN, MISSED)[i % 2]) for i in range(count)]


@every_world
def test_the_student_that_the_program_holds_knows_what_the_ledger_has_evidence_for(world, checker) -> None:
    """Its answers are graded as a model's are, and its score is the share of items with evidence."""
    count = len(world.exam.ledger([]))
    for known in ([], [0], list(range(count))):
        answers = asyncio.run(answers_from_ledger(world.exam, entries(world, set(known)), checker))
        assert {answer.item for answer in answers if answer.right} == set(known)
        assert sum(answer.right for answer in answers) / len(answers) == len(known) / count
        assert answers == asyncio.run(answers_from_ledger(world.exam, entries(world, set(known)), checker))


@every_world
def test_every_item_is_asked_equally_often(world) -> None:
    asked = [question.item for question in world.exam.questions()]
    assert len({asked.count(item) for item in range(len(world.exam.ledger([])))}) == 1


def test_what_is_asked() -> None:
    first = {name: world.exam.questions()[0].text for name, world in WORLDS.items()}
    meaning = FRENCH["chunks"][0]["meaning"]
    assert first["past"] == "What did you cook last week?"
    assert first["French"] == f'How do you say this in French: "{meaning}"? Answer with the phrase alone.'
    assert first["maths"].startswith("A cinema has 20 rows") and first["maths"].endswith("alone: the roles in total.")


def test_a_talk_in_english_is_asked_with_its_own_questions() -> None:
    row = {"lesson_aim": "The learner can talk.", "chunks": [], "next_lessons": []}
    row["chunks"] = [{"phrase": "I eat bread.", "meaning": "what you eat", "use": "the verb eat"}]
    problem = Problem.of(render(str(ROOT / "prompt_templates/small_tutor/lesson.txt"), **row))
    assert [each.text for each in EmbeddedExaminer().exam(problem).questions()] == ["Tell me, what you eat?"]


def test_no_question_and_no_cue_gives_its_item_away() -> None:
    for world in WORLDS.values():
        for question, entry in zip(world.exam.questions(), world.exam.ledger([]), strict=False):
            assert world.produces[question.item] not in question.text
            assert world.exam.ledger([_told(question.text), _told(entry.cue)])[question.item].outcome == MISSED


def _told(text: str):
    from classroom_rl.rollout.tokens import Turn

    return Turn("teacher", text)


@pytest.mark.parametrize(
    ("text", "right"),
    [("\\boxed{550}", True), ("So \\boxed{550.0} people", True), ("550", False), ("\\boxed{766}", False)],
)
def test_maths_is_graded_by_the_box(checker: AnswerChecker, text: str, right: bool) -> None:
    """The answer of the problem itself is wrong of its sibling."""
    exam = EmbeddedExaminer().exam(CINEMA)
    asked = exam.questions()[-1]
    assert exam.ledger([])[asked.item].item == ANSWER
    assert asyncio.run(exam.is_right(asked, text, checker)) is right


def test_at_most_so_many_siblings_are_asked() -> None:
    siblings = tuple(SiblingProblem(f"Sibling {i}", str(i)) for i in range(5))
    problem = Problem.of("p", "1", PostTestMaterial((), siblings))
    assert [each.text for each in EmbeddedExaminer(2).exam(problem).questions()] == ["Sibling 0", "Sibling 1"]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem.of("What is 2 + 2?", "4"), "has no sibling problems"),
        (Problem.of("What is 2 + 2?", "", CINEMA.material), "has no answer"),
    ],
)
def test_a_problem_without_a_post_test_is_refused_before_anything_is_played(problem: Problem, words: str) -> None:
    on = GenerationConfig(post_test=PostTestConfig(enable=True))
    with pytest.raises(DataError, match=f"generation.post_test.enable is true.*{words}.*sibling_problems_column"):
        check_exams(on, [CINEMA, problem])
    check_exams(on, [CINEMA, *(world.problem for world in WORLDS.values())])
    check_exams(EvalConfig().generation, [problem])  # off
    assert examiner_of(GenerationConfig()) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": [Step("a", "1"), Step("a", "2")]}, "the same name"),
        ({"steps": [Step("", "1")]}, "no name"),
        ({"siblings": [SiblingProblem("", "1")]}, "no text"),
        ({"siblings": [SiblingProblem("p", " ")]}, "no answer"),
        ({"steps": [Step("a", "1")], "siblings": [SiblingProblem("p", "1")]}, "has the steps"),
    ],
)
def test_material_that_does_not_fit_together_is_refused(given, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PostTestMaterial(**{name: tuple(value) for name, value in given.items()})
