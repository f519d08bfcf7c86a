"""Figures of a supervisor: worked out by hand, and in every table and page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.evaluation.compare import summarise_comparison
from classroom_rl.evaluation.metrics.supervision import supervised_difference, supervision_figures
from classroom_rl.evaluation.playing import EvaluationResult
from classroom_rl.evaluation.report.build import render_report
from classroom_rl.evaluation.report.comparison import comparison_text, write_comparison_report
from classroom_rl.evaluation.report.tables import comparison_table, measurement_table
from classroom_rl.evaluation.run import evaluate
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.tokens import Turn
from tests.support.evaluated_server import ScriptedServer, reviewed
from tests.support.synthetic_run import record_of, scored, write_evaluation

FINE, LEAK, SILENT = Review(True, "", 0.0), Review(False, "leak", -2.0), Review(error="no answer")


def teacher(*reviews: Review | None, drafts: tuple[Draft, ...] = (), replaced: bool = False) -> list[Turn]:
    return [Turn("teacher", "Go on.", review=review, drafts=drafts, replaced=replaced) for review in reviews]


def rewarded(**lessons: list[float]) -> list[ConversationRecord]:
    return [record_of(name, [], reward=reward) for name, rewards in lessons.items() for reward in rewards]


# By hand -----------------------------------------------------------------------------------------------------------


def test_the_difference_is_paired_by_lesson():
    figures = supervised_difference(
        {
            "sampled": rewarded(a=[0.0, 0.5], b=[0.5], c=[0.9]),
            "greedy": rewarded(a=[1.0], b=[1.0]),
            "supervised": rewarded(a=[0.75, 0.75], b=[0.5]),
        }
    )
    # a: 0.75 − 0.25; b: 0.5 − 0.5; c has no supervised conversation. Two of two signs give a mean as far from 0.
    assert figures == {
        "reward": {
            "tutor": "supervised",
            "against": "sampled",
            "mean": 0.25,
            "ci95": None,
            "p": 1.0,
            "p_holm": 1.0,
            "lessons": 2,
        }
    }
    assert supervised_difference({"sampled": rewarded(a=[0.0]), "greedy": rewarded(a=[1.0])}) == {}
    assert supervised_difference({"supervised": rewarded(a=[0.0])}) == {}


def test_the_reviews_of_a_sampling_as_shares():
    retried = teacher(FINE, drafts=(Draft("A.", 2, LEAK),))
    replaced = teacher(LEAK, drafts=(Draft("A.", 2, LEAK),), replaced=True)
    opening = [Turn("teacher", "Hi!", given=True), Turn("student", "Hello.")]
    records = [record_of("a", [*opening, *retried]), record_of("b", [*teacher(FINE, SILENT), *replaced])]
    figures = supervision_figures(records)
    # Reviews: a LEAK FINE; b FINE SILENT LEAK. Turns: a 1, written twice; b 3, one of them replaced.
    assert figures["valid"] == {"mean": 0.5, "ci95": None, "n": 4}
    assert figures["no_verdict"] == {"mean": pytest.approx(0.2), "ci95": None, "n": 5}
    assert figures["retried"]["mean"] == 0.25 and figures["replaced"]["mean"] == 0.25 and figures["replaced"]["n"] == 4
    assert supervision_figures([record_of("a", teacher(None))]) == {}


# In an evaluation, in a report, in a comparison --------------------------------------------------------------------


def test_a_supervised_evaluation_beside_one_without(config: EvalConfig, server: ScriptedServer, capsys):
    server.review = reviewed
    config.samplings = ["sampled", "supervised"]
    metrics = evaluate(config)
    difference = metrics["supervised_minus_sampled"]["reward"]
    low, high = difference["ci95"]  # all lessons differ alike, so only the bounds of a reward say how far off it may be
    assert difference["mean"] == pytest.approx(-0.1) and -0.3 < low < -0.1 < high < 0.1
    assert difference["lessons"] == 20 and difference["p"] < 0.001
    assert metrics["supervised"]["supervision"]["valid"]["mean"] == 1.0 and "supervision" not in metrics["sampled"]
    printed = capsys.readouterr().out
    assert "Reward with the supervisor against without it, lesson by lesson: −0.100 [−0.2" in printed
    assert "] p < 0.001, 20 lessons." in printed
    assert printed.split("\n\n")[1].splitlines()[0].split() == ["sampled", "supervised"]
    assert "Messages that the supervisor called valid" in printed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was measured before and after, with and without its supervisor: +0.5 before it, +0.1 after it."""
    for when, alone, helped in (("before", 0.2, 0.7), ("after", 0.8, 0.9)):
        sides = {
            name: [record_of(f"lesson {i}", [], [scored(1, 1, 1)], index=i, reward=reward) for i in range(4)]
            for name, reward in (("sampled", alone), ("supervised", helped))
        }
        folder = tmp_path / "eval" / when
        metrics = write_evaluation(folder, sides) | {"supervised_minus_sampled": supervised_difference(sides)}
        (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return tmp_path


def test_the_report_shows_both_samplings_and_their_difference(run: Path):
    data = load_run(run)
    sentence = "Before training. Reward with the supervisor against without it, lesson by lesson: +0.500 p"
    for text in (comparison_table(data), render_report(data)):
        assert sentence in text and "After training. Reward with the supervisor" in text
    page = render_report(data)
    assert '<th class="group" colspan="3" scope="colgroup">Supervised</th>' in page
    assert "nobody supervises a tutor that is used" in page
    assert "Held-out lessons, supervised" in comparison_table(data)


def test_an_evaluation_without_a_supervisor_says_nothing_of_one(tmp_path: Path):
    records = rewarded(a=[0.5], b=[0.5])
    metrics = write_evaluation(tmp_path / "eval" / "after", {"sampled": records, "greedy": records})
    data = load_run(tmp_path)
    assert "upervis" not in measurement_table(metrics) + comparison_table(data) + render_report(data)


def test_in_a_comparison_every_tutor_has_its_difference(config: EvalConfig, tmp_path: Path):
    about = {"seed": 1, "problems": 2, "num_samples_per_problem": 1, "tutor": "x", "policy": {}, "engine": {}}
    about |= {"server_url": None, "seconds": 0.0}
    arms = {
        name: EvaluationResult(
            about,
            [("sampled", record) for record in rewarded(a=[0.25], b=[0.25])]
            + [("supervised", record) for record in rewarded(a=[helped], b=[0.25])],
        )
        for name, helped in (("base", 0.75), ("trained", 0.25))
    }
    metrics = summarise_comparison(replace(config, samplings=["sampled", "supervised"]), arms)
    means = {name: difference["reward"]["mean"] for name, difference in metrics["supervised_minus_sampled"].items()}
    assert means == {"base": 0.25, "trained": 0.0}
    line = "base: Reward with the supervisor against without it, lesson by lesson: +0.250 p = 1.000, 2 lessons"
    assert line in comparison_text(metrics)
    page = write_comparison_report(tmp_path, metrics, {name: arm.records for name, arm in arms.items()})
    assert "With and without a supervisor" in page.read_text() and "base: Reward with the sup" in page.read_text()
    unsupervised = {name: replace(arm, records=arm.records[:2]) for name, arm in arms.items()}
    metrics = summarise_comparison(replace(config, samplings=["sampled"]), unsupervised)
    assert "supervised_minus_sampled" not in metrics and "supervisor" not in comparison_text(metrics)
