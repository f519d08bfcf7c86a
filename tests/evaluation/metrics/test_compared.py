"""The figures of a comparison and of post-tests, worked out by hand, and the same in every table."""

from collections.abc import Sequence

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.evaluation.metrics.compared import FIGURES, figures_by_lesson, judged_by_lesson, post_test_figures
from classroom_rl.evaluation.report.tables import MEASURES, POST_TEST_LABELS, measurement_table
from classroom_rl.judges.post_test.records import GIVEN, PRODUCED, ExamAnswer, LedgerEntry, PostTest
from classroom_rl.rollout.tokens import Turn
from tests.support.synthetic_run import record_of, scored


def test_the_rubrics_findings_are_counted_by_lesson_on_the_right_side():
    wrong, right = "Last week I cook an egg in the kitchen.", "Last week I cooked an egg in the kitchen."
    problem = "Lesson: food, cook, last week\nPlan: you, sister, brother, friends, parents"
    texts = ["Hi! What did you cook last week?", wrong, "Check the tense here: cook. Say it again.", right]
    texts += ["Check the tense here: cooked. Say it again.", wrong, "Good! What did your sister cook last week?"]
    turns = [Turn("teacher" if index % 2 == 0 else "student", text) for index, text in enumerate(texts)]
    record = record_of(problem, turns, [scored(1, 0.5, 5)], reward=0.7)
    figures = judged_by_lesson([record])
    lesson = record.problem_id
    assert figures["scaffolded"] == {lesson: [1.0, 0.0]} and figures["falsely_corrected"] == {lesson: [1.0]}
    assert figures["scores/forward_progression_score"] == {lesson: [0.5]}


# Post-tests --------------------------------------------------------------------------------------------------------

LESSONS = [render_problem(Lesson("food", verb, "every day", ("you",))) for verb in ("cook", "order", "boil")]


def with_test(
    problem: str, outcomes: Sequence[str], knew: bool | None, student: Sequence[bool] = ()
) -> ConversationRecord:
    ledger = tuple(LedgerEntry("i", "c", outcome, 0, knew) for outcome in outcomes)
    answers = [ExamAnswer("ledger", i, "q", "a", entry.known) for i, entry in enumerate(ledger)]
    answers += [ExamAnswer("student", i, "q", "a", right) for i, right in enumerate(student)]
    record = record_of(problem, [Turn("teacher", "Hi.")])
    return record.model_copy(update={"post_test": PostTest(ledger, tuple(answers))})


RECORDS = [
    with_test(LESSONS[0], [PRODUCED, PRODUCED], False, [True, False]),
    with_test(LESSONS[0], [PRODUCED, GIVEN], False),
    with_test(LESSONS[1], [GIVEN, GIVEN], True),
    record_of(LESSONS[2], [Turn("teacher", "Hi.")]),  # without a post-test: it counts for nothing
]


def test_the_figures_of_post_tests() -> None:
    figures = post_test_figures(RECORDS)
    assert {name: (estimate["mean"], estimate["n"]) for name, estimate in figures.items()} == {
        "ledger": (0.5, 3),
        "student": (0.5, 1),
        "knew": (1 / 3, 3),
        "given": (0.5, 3),
        "learned": (0.75, 2),
    }
    assert figures["ledger"]["ci95"] is None, "two lessons"
    assert post_test_figures(RECORDS[3:]) == {}


def test_every_figure_stands_in_the_tables_of_one_tutor_and_of_several() -> None:
    paths = {measure.path[1] for measure in MEASURES if measure.path[0] == "post_test"}
    keys = {key.removeprefix("post_test/") for key in FIGURES if key.startswith("post_test/")}
    assert paths == keys == set(POST_TEST_LABELS) == set(post_test_figures(RECORDS))
    by_lesson, _ = figures_by_lesson(RECORDS)
    assert sorted(map(tuple, by_lesson["post_test/ledger"].values())) == [(0.0,), (1.0, 0.5)]
    about = {"tutor": "t", "policy": {"run_id": "r", "version": 0}, "problems": 3, "seconds": 1.0, "paid": {}}
    about |= {"num_samples_per_problem": 1, "server_url": None, "seed": 1, "engine": {"name": "e", "version": "v"}}
    text = measurement_table(about | {"sampled": {"post_test": post_test_figures(RECORDS)}})
    assert "Post-test: known after it (ledger)" in text and "50.0 %" in text
