"""Figures of trained readers in evaluations, comparisons and reports."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import DataError
from classroom_rl.evaluation.compare import summarise_comparison
from classroom_rl.evaluation.metrics.readings import read_by_lesson, reading_metrics
from classroom_rl.evaluation.playing import EvaluationResult
from classroom_rl.evaluation.report.build import render_report
from classroom_rl.evaluation.report.comparison import comparison_text, write_comparison_report
from classroom_rl.evaluation.report.tables import comparison_table, measurement_table
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.moves.stored import load_readers
from classroom_rl.judges.readings import Exchange
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.tokens import Turn
from classroom_rl.viewer.metrics import RunMetrics
from tests.judges.conftest import data, folder  # noqa: F401
from tests.support.dutch_lesson import ASK, ERR, PLAN, RIGHT, SAID, WRONG
from tests.support.evaluated_server import ScriptedServer as _ScriptedServer
from tests.support.evaluated_server import config, server  # noqa: F401
from tests.support.scripted_readers import TRUST, ScriptedReaders, always, has_question_mark
from tests.support.synthetic_run import record_of, scored, write_evaluation

IN_REPORTS = "question: κ 0.50 [0.40, 0.60] with people on a set"


def language_record(index: int, *replies: str) -> ConversationRecord:
    """A lesson on `PLAN`: an opening, then each reply after a right answer and an error in turn."""
    turns = [Turn("teacher", ASK)]
    for number, reply in enumerate(replies):
        turns += [Turn("student", (SAID, WRONG)[number % 2], (RIGHT, ERR)[number % 2]), Turn("teacher", reply)]
    return record_of(PLAN, turns, index=index, reward=0.5)


def contains(word: str) -> Callable[[Exchange], bool]:
    return lambda exchange: word in exchange.message


def test_language_figures_by_hand():
    readers = ScriptedReaders(
        question=has_question_mark, correction=contains("No"), treats_as_wrong=contains("No"), telling=always
    )
    records = [language_record(0, "No!", "No, why?"), language_record(1, "Good. And?", "Good.", "Fine.")]
    figures = {label: sum(values.values(), []) for label, values in read_by_lesson(records, readers).items()}
    assert figures == {
        "question": [0, 1, 1, 0, 0],  # every reply; the opening replies to nobody
        "treats_as_wrong": [1, 0, 0],  # replies to right answers
        "correction": [1, 0],  # replies to errors
    }
    targets = {exchange.target for label, exchange in readers.asked if label == "question"}
    assert targets == {SAID}, "the phrase that the student tried to say"


def test_maths_figures_have_the_answer_and_what_was_said_before():
    messages = (("student", "I get 10."), ("teacher", "It is 12."), ("student", "Yes."), ("teacher", "Bye."))
    record = record_of("5 + 7?", [Turn(role, text, None) for role, text in messages], reward=0.5)
    record = record.model_copy(update={"answer": "12"})
    readers = ScriptedReaders(reveals_answer=lambda exchange: exchange.target in exchange.message, question=always)
    assert read_by_lesson([record], readers) == {"reveals_answer": {record.problem_id: [1.0, 0.0]}}
    (_, first), (_, second) = readers.asked
    assert first == Exchange("It is 12.", "I get 10.", "12", ("5 + 7?",))
    assert second.before == ("5 + 7?", "I get 10.", "It is 12.")


def test_each_figure_comes_with_its_trust():
    records = [language_record(0, "Why?"), language_record(1, "Good.")]
    metrics = reading_metrics(records, ScriptedReaders(question=has_question_mark))
    question = metrics["labels"]["question"]
    assert metrics["version"] == "readers.scripted"
    assert (question["mean"], question["n"], question["trust"]) == (0.5, 2, TRUST.as_json())


def test_an_evaluation_measures_and_prints_them(
    config: EvalConfig,  # noqa: F811
    server: _ScriptedServer,  # noqa: F811
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
):
    assert "readings" not in evaluate(config)["sampled"] and "reader" not in capsys.readouterr().out
    config.generation.readers_path = str(folder)
    config.logging.save_dir += "-with-readers"
    metrics = evaluate(config)
    readings = metrics["sampled"]["readings"]
    assert set(readings["labels"]) == {"question", "hint", "correction", "treats_as_wrong", "confirmation"}
    assert readings["version"] == load_readers(folder).version
    assert all(0 <= figure["mean"] <= 1 and figure["n"] > 0 for figure in readings["labels"].values())
    assert metrics == json.loads((Path(config.logging.save_dir) / "metrics.json").read_text())
    printed = capsys.readouterr().out
    line = f"hint: {load_readers(folder).trust['hint']}"
    assert "Replies with hint (reader)" in printed
    assert line in printed and "with people on CIMA, base rate" in line


def test_an_evaluation_with_readers_that_are_damaged_plays_nothing(
    config: EvalConfig,  # noqa: F811
    server: _ScriptedServer,  # noqa: F811
    tmp_path: Path,
):
    config.generation.readers_path = str(tmp_path)
    with pytest.raises(DataError, match="readers.json"):
        evaluate(config)
    assert not server.requests


def test_the_report_of_a_run_shows_the_figures_with_their_trust(tmp_path: Path):
    for when, reply in (("before", "Good."), ("after", "Why?")):
        verdicts = {"verdicts": [scored(1, 1, 1)]}
        records = [language_record(index, reply).model_copy(update=verdicts) for index in range(3)]
        metrics = write_evaluation(tmp_path / "eval" / when, {"sampled": records})
        metrics["sampled"]["readings"] = reading_metrics(records, ScriptedReaders(question=has_question_mark))
        (tmp_path / "eval" / when / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    run = load_run(tmp_path)
    for text in (comparison_table(run), render_report(run)):
        assert "Replies with question (reader)" in text and IN_REPORTS in text
    assert measurement_table(metrics).count("Read by trained readers (readers.scripted)") == 1


def test_a_comparison_has_a_row_for_each_label(config: EvalConfig, tmp_path: Path):  # noqa: F811
    about = {"seed": 1, "problems": 2, "num_samples_per_problem": 1, "tutor": "x", "policy": {}, "engine": {}}
    about |= {"server_url": None, "seconds": 0.0}
    arms = {
        name: EvaluationResult(about, [("sampled", language_record(index, reply)) for index in range(2)])
        for name, reply in (("base", "Good."), ("trained", "Why?"))
    }
    sampled = replace(config, samplings=["sampled"])
    metrics = summarise_comparison(sampled, arms, readers=ScriptedReaders(question=has_question_mark))
    means = {name: figures["read/question"]["mean"] for name, figures in metrics["sampled"]["figures"].items()}
    assert means == {"base": 0.0, "trained": 1.0}
    assert metrics["sampled"]["readings"]["labels"] == {"question": {"trust": TRUST.as_json()}}
    path = write_comparison_report(tmp_path, metrics, {name: arm.records for name, arm in arms.items()})
    for text in (comparison_text(metrics), path.read_text(encoding="utf-8")):
        assert "Replies with question (reader)" in text and IN_REPORTS in text
    without_readers = summarise_comparison(sampled, arms)
    assert "readings" not in without_readers["sampled"] and "reader" not in comparison_text(without_readers)


def test_the_page_names_the_readers(tmp_path: Path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train_rl.yaml").write_text("generation: {readers_path: mine}\n", encoding="utf-8")
    assert ("readers", "mine") in RunMetrics(tmp_path).facts()
