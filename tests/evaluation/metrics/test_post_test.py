"""Figures of post-tests in an evaluation: worked out by hand, with intervals over problems, in every table."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.errors import DataError
from classroom_rl.evaluation.compare import compare_tutors
from classroom_rl.evaluation.metrics.compared import FIGURES, figures_by_lesson
from classroom_rl.evaluation.metrics.post_test import POST_TEST_LABELS, post_test_figures
from classroom_rl.evaluation.playing import make_requests
from classroom_rl.evaluation.report.tables import MEASURES, measurement_table
from classroom_rl.evaluation.run import evaluate
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.post_test import GIVEN, PRODUCED, ExamAnswer, LedgerEntry, PostTest
from classroom_rl.rollout.tokens import Turn
from tests.support.synthetic_run import record_of

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


def test_the_figures_of_known_conversations() -> None:
    found = post_test_figures(RECORDS)
    assert {name: (each["mean"], each["n"]) for name, each in found.items()} == {
        "ledger": (0.5, 3),
        "student": (0.5, 1),
        "knew": (1 / 3, 3),
        "given": (0.5, 3),
        "learned": (0.75, 2),
    }
    assert found["ledger"]["ci95"] is None, "two lessons"
    assert post_test_figures(RECORDS[3:]) == {}


def test_every_figure_stands_in_the_tables_of_one_tutor_and_of_several() -> None:
    paths = {measure.path[1] for measure in MEASURES if measure.path[0] == "post_test"}
    keys = {figure.key.removeprefix("post_test/") for figure in FIGURES if figure.key.startswith("post_test/")}
    assert paths == keys == set(POST_TEST_LABELS) == set(post_test_figures(RECORDS))
    by_lesson, _ = figures_by_lesson(RECORDS)
    assert sorted(map(tuple, by_lesson["post_test/ledger"].values())) == [(0.0,), (1.0, 0.5)]
    about = {"tutor": "t", "policy": {"run_id": "r", "version": 0}, "problems": 3, "seconds": 1.0, "paid": {}}
    about |= {"num_samples_per_problem": 1, "server_url": None, "seed": 1, "engine": {"name": "e", "version": "v"}}
    text = measurement_table(about | {"sampled": {"post_test": post_test_figures(RECORDS)}})
    assert "Post-test: known after it (ledger)" in text and "50.0 %" in text


def test_siblings_travel_with_the_requests(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "1", "siblings": [{"problem": "s", "answer": 2}]}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row))
    problems = load_problems([DatasetSource(str(path), sibling_problems_column="siblings")])
    request = next(
        make_requests(problems, replace(EvalConfig(), num_samples_per_problem=2), "sampled", PolicyVersion(), "r")
    )
    assert [each.siblings[0].answer for each in request.post_test_material] == ["2", "2"]
    plain = load_problems([DatasetSource(str(path))])
    assert next(make_requests(plain, EvalConfig(), "sampled", PolicyVersion(), "r")).post_test_material is None


@pytest.mark.parametrize("measure", [evaluate, compare_tutors])
def test_problems_without_a_post_test_are_refused_before_a_model_is_loaded(tmp_path: Path, measure) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"problem": "What is 2 + 2?", "answer": "4"}))
    config = EvalConfig()
    config.dataset.eval_datasets = [DatasetSource(str(path))]
    config.logging.save_dir = str(tmp_path / "run")
    config.generation.post_test.enable = True
    with pytest.raises(DataError, match="has no sibling problems: name the dataset's column"):
        measure(config)
    assert not (tmp_path / "run").exists()
