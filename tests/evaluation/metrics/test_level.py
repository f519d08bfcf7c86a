"""Levels in evaluations: figures and slopes worked out by hand; tables, a report, a comparison, a training's log."""

import json
from pathlib import Path

import pytest

from classroom_rl.environments.classroom.lesson_plans import level_table, read_plans
from classroom_rl.environments.classroom.metrics import level_metrics
from classroom_rl.evaluation.dialogue import main
from classroom_rl.evaluation.metrics.compared import FIGURES, figures_by_lesson
from classroom_rl.evaluation.metrics.level import LEVEL_LABELS, level_by_lesson, level_figures
from classroom_rl.evaluation.report.build import render_report
from classroom_rl.evaluation.report.level_chart import level_chart
from classroom_rl.evaluation.report.tables import comparison_table
from classroom_rl.judges.difficulty import LevelRules
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.tokens import Turn
from classroom_rl.system.shipped import ROOT
from tests.support.synthetic_run import record_of, write_evaluation

EASY, HALF, HARD = (
    "What do you eat?",
    "What do you eat? I consume what I consume in there.",
    "Zebras consume xylophones now.",
)
PLAN = "Language: English\nLevel: A1\nLesson"


@pytest.fixture
def rules(tmp_path: Path) -> LevelRules:
    path = tmp_path / "words.csv"
    path.write_text("word,level\n" + "".join(f"{word},A1\n" for word in "what do you eat i in there now".split()))
    return LevelRules(str(path))


def talk(*texts: str) -> list[Turn]:
    pairs = [[Turn("student", "I eat."), Turn("teacher", text)] for text in texts]
    return [Turn("teacher", "Hello!", given=True), *(turn for pair in pairs for turn in pair)]


def test_figures_of_a_conversation_worked_by_hand(rules: LevelRules):
    figures = level_figures(PLAN, talk(EASY, HALF, HARD), rules)
    # HALF: 1 of 8 different words above A1, so (0.20 − 1/8) / 0.15; its sentences have 4 and 7 words. HARD: 3 of 4.
    scores = [1.0, pytest.approx((0.2 - 1 / 8) / 0.15), 0.0]
    assert figures["score"] == scores and figures["words_above"] == [0, pytest.approx(1 / 8), 0.75]
    assert figures["slope/score"] == [pytest.approx(-0.5)] and figures["slope/words_above"] == [pytest.approx(0.375)]
    assert [figures[f"score_of_message/{number}"] for number in (1, 2, 3)] == [[score] for score in scores]
    assert figures["measured"] == [1, 1, 1] and figures["zipf"] == [] and "slope/zipf" not in figures
    with_repeats = level_figures(PLAN, talk(EASY, HALF, EASY, EASY, HARD), rules)
    assert with_repeats["score"] == [1.0, scores[1], 0, 0, 0] and with_repeats["score_of_new"] == scores
    assert with_repeats["slope/score_of_new"] == [pytest.approx(-3 / 13)], "messages keep their numbers"
    two = level_figures(PLAN, talk(EASY, HARD), rules)
    assert not [name for name in two if name.startswith("slope/")], "two messages make no line"
    assert level_figures("Language: Thai\nLevel: A1", talk(EASY), rules)["measured"] == [0.0]
    assert set(figures) - {f"score_of_message/{number}" for number in (1, 2, 3)} <= set(LEVEL_LABELS)


def test_table_report_and_comparison_show_the_level(rules: LevelRules, tmp_path: Path):
    sides = {"before": (EASY, HALF, HARD), "after": (EASY, "I eat what you eat.", "Do you eat in there?")}
    for when, texts in sides.items():
        records = [record_of(f"{PLAN} {n}", talk(*texts), index=n, reward=0.5) for n in range(8)]
        folder = tmp_path / "eval" / when
        metrics = write_evaluation(folder, {"sampled": records, "greedy": records})
        by_lesson = level_by_lesson(records, rules)
        metrics["sampled"]["level"] = {name: mean_with_ci(values) for name, values in by_lesson.items()}
        (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    data = load_run(tmp_path)
    chart = level_chart(data)
    assert chart.x == "message" and [label for *_, label in chart.marks][2].startswith(
        "message 3, before training: 0.000"
    )
    assert "message 3, after training: 1.000" in [label for *_, label in chart.marks][5]
    assert "Level of a conversation&#39;s messages" in render_report(data) and ">message</text>" in render_report(data)
    (line,) = [line for line in comparison_table(data).splitlines() if "Level: change of the score per message" in line]
    assert "−0.500" in line and "+0.500" in line
    figures, _ = figures_by_lesson(records, level=rules)
    assert figures["level/score"][records[0].problem_id] == [1.0, 1.0, 1.0] and "level/slope/score" in FIGURES
    (tmp_path / "eval" / "before" / "metrics.json").unlink()
    assert "level/score" not in figures_by_lesson(records)[0]


def test_the_log_of_a_training_has_both_halves():
    records = [record_of("a", []), record_of("a", [])]
    records[0].turn_rewards = {"level": [1.0, 0.5, 0.2, None, 0.0]}
    records[1].turn_rewards = {"level": [0.4]}
    assert level_metrics(records) == {"level/first_half": 0.75, "level/second_half": 0.1}
    assert level_metrics(records[1:]) == level_metrics([record_of("a", [])]) == {}


def test_any_file_of_conversations_is_measured_with_a_level(rules: LevelRules, tmp_path: Path, capsys):
    path = tmp_path / "talks.jsonl"
    turns = [{"role": turn.role, "text": turn.text} for turn in talk(EASY, HALF, HARD)[1:]]
    path.write_text("".join(json.dumps({"problem": str(n), "turns": turns}) + "\n" for n in range(6)), encoding="utf-8")
    assert main([str(path), "--word-list", rules.word_list, "--level", "A1"]) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "Level: change of the score per message" in line
    ]
    assert "-0.50" in line
    assert (
        main([str(path), "--word-list", rules.word_list]) == 2
        and "generation.level.of_lessons" in capsys.readouterr().err
    )
    assert main([str(path)]) == 0 and "Level:" not in capsys.readouterr().out


def test_phrases_of_lesson_plans_by_level(rules: LevelRules):
    plans = read_plans(ROOT / "data" / "english_lessons" / "test.jsonl")
    table = level_table([*plans, plans[0].model_copy(update={"target_language": "Japanese"})], rules.word_list)
    assert "A1, words_above" in table and "left out            1 plans in Japanese" in table
