"""Tests of summary.json, the tables and report.html, on run folders made without a model."""

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.grammar import Slip
from classroom_rl.environments.toy_language.lessons import make_lessons
from classroom_rl.environments.toy_language.scripts import Teacher, ideal
from classroom_rl.errors import DataError
from classroom_rl.evaluation.report.build import (
    answer,
    as_text,
    charts,
    facts,
    format_duration,
    main,
    render_report,
    write_report,
    write_summary,
)
from classroom_rl.evaluation.report.examples import choose_pairs, describe_slip
from classroom_rl.evaluation.report.tables import compare, comparison_table
from classroom_rl.judges.verdicts import CRITERIA, Criterion
from classroom_rl.results.charts import HEIGHT, Mark, Series, area_chart, line_chart, smooth, thin, ticks
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.tokens import Turn
from classroom_rl.viewer.metrics import RunMetrics
from tests.support.scripted_teachers import ignores_errors, speaks_for_the_student
from tests.support.synthetic_run import FAILED, played, record_of, scored, step_line, write_evaluation, write_training

LESSONS = make_lessons(1)[1][:12]
CONFIG = {
    "seed": 7,
    "teacher_model": {"model_name_or_path": "tiny <tutor>"},
    "train": {"learning_rate": 0.0007, "number_of_problems_per_batch": 8, "num_samples_per_problem": 4},
    "generation": {"student_error_rate": 0.2},
}


def conversations(tutor: Teacher, judged: bool = True) -> list[ConversationRecord]:
    """Two conversations on each lesson, with an error in the first student turn."""
    personas = ["error_student", "correct_student", "correct_student", "correct_student"]
    return [played(tutor, lesson, personas, number, judged) for number, lesson in enumerate(LESSONS) for _ in range(2)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose tutor learned to scaffold."""
    folder = tmp_path / "runs" / "first <try>"
    before, after = conversations(ignores_errors), conversations(ideal)
    write_evaluation(folder / "eval" / "before", {"sampled": before, "greedy": before}, seconds=20.0)
    write_evaluation(folder / "eval" / "after", {"sampled": after, "greedy": after}, seconds=30.0)
    write_training(folder, [step_line(step, 0.5 + step / 100) for step in range(1, 41)], CONFIG)
    return folder


# The summary -----------------------------------------------------------------------------------------------------


def test_the_summary_has_the_agreed_shape(run: Path):
    seconds = {"sft": 100.0, "server_start": 30.0, "rollout": 81.0, "eval": 55.0, "total": 333.0}
    summary = write_summary(run, seconds)
    assert json.loads((run / "summary.json").read_text()) == summary
    assert list(summary) == ["learning", "heldout", "training", "engine", "mismatch"]
    assert summary["learning"]["verdict"] == "learned" and "rose by" in summary["learning"]["reasons"][0]
    assert list(summary["heldout"]) == ["before", "after"]
    for side in summary["heldout"].values():
        assert list(side) == ["sampled", "greedy"]
        for measured in side.values():
            assert {name: list(value) for name, value in measured.items()} == {
                "reward": ["mean", "ci95", "n"],
                "error_turns": ["scaffolded", "n"],
                "clean_turns": ["falsely_corrected", "n"],
            }
    assert summary["heldout"]["before"]["sampled"]["error_turns"]["scaffolded"] == 0.0
    assert summary["heldout"]["after"]["greedy"]["error_turns"]["scaffolded"] == 1.0
    assert summary["heldout"]["after"]["sampled"]["reward"]["n"] == 24
    assert summary["engine"] == {"name": "vllm", "version": "0.32.0"}
    assert summary["mismatch"] == {"mean_abs_logprob_diff": pytest.approx(1e-6)}
    assert summary["training"] == {
        "steps": 40,
        "reward_first": 0.51,
        "reward_last": 0.9,
        "seconds_total": 333.0,
        # rollout as given; publish and train summed over 40 steps of 0.25 s and 1 s
        "seconds": {"sft": 100.0, "server_start": 30.0, "rollout": 81.0, "publish": 10.0, "train": 40.0, "eval": 55.0},
    }


def test_what_nobody_timed_is_null_and_the_evaluations_time_themselves(run: Path):
    training = write_summary(run, {})["training"]
    assert training["seconds"] == {
        "sft": None,
        "server_start": None,
        "rollout": 80.0,
        "publish": 10.0,
        "train": 40.0,
        "eval": 50.0,
    }
    assert training["seconds_total"] == 180.0


def test_a_run_that_was_not_measured_twice_has_no_summary(run: Path):
    (run / "eval" / "after" / "metrics.json").unlink()
    with pytest.raises(DataError, match="eval/after"):
        write_summary(run, {})


def test_cut_lines_repeated_steps_and_missing_rewards_do_no_harm(run: Path):
    lines = [step_line(1, 0.2), step_line(2, 0.3), step_line(2, 0.4), {**step_line(3, 0.0), "reward": float("nan")}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "rew'
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    training = write_summary(run, {})["training"]
    assert (training["steps"], training["reward_first"], training["reward_last"]) == (3, 0.2, 0.4)
    assert training["seconds"]["rollout"] == 6.0
    assert "NaN" not in (run / "summary.json").read_text()
    assert "nan" not in render_report(load_run(run))


# The terminal's table --------------------------------------------------------------------------------------------


def test_the_table_shows_both_sides_and_the_change(run: Path):
    text = comparison_table(load_run(run))
    assert text.count("before") == 2 and "Held-out lessons, greedy" in text
    scaffolded = next(line for line in text.splitlines() if line.startswith("Error turns scaffolded"))
    assert re.split(r"\s{2,}", scaffolded) == ["Error turns scaffolded", "0.0 % n=24", "100.0 % n=24", "+100.0 pp"]
    reward = next(line for line in text.splitlines() if line.startswith("Reward"))
    assert re.search(r"\+0\.\d{3} \[\+0\.\d{3}, \+0\.\d{3}\]$", reward)


def test_less_is_better_where_it_is(run: Path):
    worse = {"mean": -0.1, "ci95": [-0.2, -0.05], "n": 20, "p": 0.01}
    measured = {"reward": {"mean": 0.5}, "clean_turns": {"falsely_corrected": 0.2}, "talk": {"messages": 9.0}}
    improved = {"reward": {"mean": 0.4}, "clean_turns": {"falsely_corrected": 0.1}, "talk": {"messages": 8.0}}
    lines = {line.label: line for line in compare(measured, improved, worse)}
    assert lines["Reward"].verdict == "worse" and str(lines["Reward"].change) == "−0.100 [−0.200, −0.050]"
    assert lines["Clean turns falsely corrected"].verdict == "", "what chance would bring is not known"
    for chance in (worse | {"p": 0.06}, worse | {"ci95": [-0.2, 0.01]}, worse | {"n": 5}, worse | {"ci95": None}, None):
        assert compare(measured, improved, chance)[0].verdict == ""
    assert lines["Messages in a conversation"].verdict == "" and lines["Without a verdict"].is_empty
    assert '<td class="better"><b>+0.' in render_report(load_run(run)), "the reward"


def test_the_table_says_so_where_a_side_is_missing(tmp_path: Path):
    write_evaluation(tmp_path / "eval" / "after", {"greedy": conversations(ideal)})
    rows = [re.split(r"\s{2,}", line) for line in comparison_table(load_run(tmp_path)).splitlines()]
    assert rows[0] == ["Held-out lessons, greedy", "before", "after", "change"]
    assert ["Error turns scaffolded", "–", "100.0 % n=24", "–"] in rows


# Which lessons are shown -----------------------------------------------------------------------------------------


def test_lessons_are_chosen_by_the_change_of_their_reward():
    before = [record_of(f"lesson {i}", [], [scored(1, 1, 10)], reward=0.5) for i in range(9)]
    rewards = [0.9, 0.5, 0.6, 0.4, 0.7, 0.55, 0.1, 0.8, 0.65]
    after = [record_of(f"lesson {i}", [], [scored(1, 1, 10)], reward=reward) for i, reward in enumerate(rewards)]
    after[4] = after[4].model_copy(update={"rejected": True})
    before[3] = before[3].model_copy(update={"reward": None})
    chosen = [(pair.label, pair.title) for pair in choose_pairs(before, after)]
    # Ranked: 0 (+.4) 7 (+.3) 4 8 [2] 5 1 6 (−.4); 3 has no change, for it had no verdict before.
    assert chosen[:4] == [
        ("most gained", "lesson 0"),
        ("most gained", "lesson 7"),
        ("median", "lesson 2"),
        ("least gained", "lesson 6"),
    ]
    assert chosen[4] == ("least gained", "lesson 1")
    assert set(chosen[5:]) == {("rejected or without a verdict", f"lesson {i}") for i in (3, 4)}


def test_a_lesson_is_shown_once_and_equal_changes_have_an_order():
    sides = [conversations(ignores_errors), conversations(ideal)]
    chosen = choose_pairs(*sides)
    assert len({pair.after.problem_id for pair in chosen}) == len(chosen)
    shuffled = [random.Random(3).sample(side, len(side)) for side in sides]
    shuffled = [sorted(side, key=lambda record: record.id) for side in shuffled]
    assert [pair.after.id for pair in choose_pairs(*shuffled)] == [pair.after.id for pair in chosen]


def test_with_one_side_the_rewards_themselves_rank():
    after = [record_of(f"lesson {i}", [], [scored(1, 1, 1)], reward=i / 10) for i in range(6)]
    chosen = choose_pairs([], after)
    assert [(pair.label, pair.title) for pair in chosen][:3] == [
        ("highest reward", "lesson 5"),
        ("highest reward", "lesson 4"),
        ("median", "lesson 2"),
    ]
    assert choose_pairs([], []) == []


# The page --------------------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.opened: list[str] = []
        self.depth: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.opened.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        if tag not in ("meta", "link", "br"):
            self.depth.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.depth.pop() == tag, f"</{tag}> closes something else"

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.opened.append(tag)


def test_the_page_is_whole_and_loads_nothing(run: Path):
    write_summary(run, {"sft": 100.0, "total": 400.0})
    page = write_report(run).read_text(encoding="utf-8")
    tags = _Tags(page)
    assert tags.depth == [], "every tag is closed"
    assert not {"script", "iframe", "img", "object", "embed"} & set(tags.opened)
    assert tags.links == ["data:,"] and "url(" not in page and "@import" not in page and "http" not in page
    assert (run / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert tags.opened.count("svg") == 5
    for said in ("tiny &lt;tutor&gt;", "first &lt;try&gt;", "vllm 0.32.0", "8 lessons × 4 conversations", "6 min 40 s"):
        assert said in page
    assert "Did the tutor learn? Yes." in page
    assert render_report(load_run(run)) == page, "the same folder always gives the same page"


def test_a_further_criterion_gets_a_line_in_its_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = [step_line(step, 0.5, **{"judge/warmth_score": 2.0}) for step in range(1, 41)]
    write_training(tmp_path, lines, CONFIG)
    assert "Warmth" not in render_report(load_run(tmp_path))
    monkeypatch.setitem(CRITERIA, "warmth_score", Criterion("Warmth", 4.0, 0.0))
    assert "Warmth" in render_report(load_run(tmp_path))


@pytest.mark.parametrize(("rate", "said"), [(0.25, "25 % of its turns"), ({"a": 1, "error_student": 3}, "75 % of its")])
def test_how_often_the_student_errs_is_said_for_a_share_and_for_weights(run: Path, rate, said: str):
    write_training(run, [step_line(1, 0.5)], CONFIG | {"generation": {"student_error_rate": rate}})
    assert said in render_report(load_run(run))
    assert ("error turns", f"0.{said[:2]}") in RunMetrics(run).facts()


@pytest.mark.parametrize("rate", [0.2, {"plain_student": 1.0}])
def test_a_student_without_an_error_persona_is_not_said_to_err(run: Path, rate):
    generation = {"student_error_rate": rate, "student_personas_prompts_paths": {"plain_student": "student.txt"}}
    write_training(run, [step_line(1, 0.5)], CONFIG | {"generation": generation})
    assert "Student errs in" not in render_report(load_run(run))
    assert "error turns" not in dict(RunMetrics(run).facts())


def test_the_training_s_reward_and_held_out_lessons_have_charts_of_their_own(run: Path):
    lines = [step_line(step, 0.3 - step / 20, reward_std=0.5) for step in range(1, 11)]
    write_training(run, lines, CONFIG)
    training, held_out = charts(load_run(run))[:2]
    assert (training.title, held_out.title) == ("Reward", "Reward on held-out lessons")
    assert not training.marks and {mark[1] for mark in held_out.marks} == {held_out.left, held_out.right}
    assert [label for _, label in held_out.mark_legend] == ["sampled", "greedy"] and len(held_out.marks) == 4
    assert float(training.y_ticks[0][1]) <= -0.7, "the band below 0 is on the chart"


def test_the_rules_judge_stands_there_with_the_version_of_its_rules(run: Path):
    write_training(run, [step_line(1, 0.5)], CONFIG | {"judge_model": {"model_name_or_path": "rules"}})
    notes = run / "config" / "train_rl.environment.json"
    notes.write_text(json.dumps({"rules_version": "3"}), encoding="utf-8")
    assert ("Judge", "rules, version 3") in facts(load_run(run))
    notes.unlink()
    assert ("Judge", "rules") in facts(load_run(run)), "a run from before the version was recorded"


NASTY = "<script>alert('x')</script> & \"quotes\" مرحبا 🎉 <|im_start|>user\x07 \u202eright to left </div></details>"
LONG = "word " * 4000


def test_whatever_was_said_is_shown_as_text(tmp_path: Path):
    texts = [NASTY, LONG, "", "a" * 20_000]
    turns = [Turn("teacher" if i % 2 == 0 else "student", text, None) for i, text in enumerate(texts)]
    verdict = scored(1, 1, 10)
    verdict = type(verdict)(verdict.rule, 0, scores=verdict.scores, reasons={"task_final_score": NASTY}, raw=NASTY)
    record = record_of(f"Problem {NASTY}\n{NASTY}", turns, [verdict], reward=1.0)
    write_evaluation(tmp_path / "eval" / "after", {"sampled": [record]})
    page = render_report(load_run(tmp_path))
    tags = _Tags(page)
    assert tags.depth == [] and "script" not in tags.opened
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 5, (
        "title, plan (two lines), message, reason"
    )
    assert "مرحبا 🎉" in page and LONG in page and "a" * 20_000 in page and "(says nothing)" in page
    assert '<span class="token">&lt;|im_start|&gt;</span>user' in page
    assert "\x07" not in page and "\u202e" not in page and '<span class="token">U+202E</span>' in page


def test_special_tokens_and_controls_are_spelled_out():
    assert as_text("a < b\tc\r\nd") == "a &lt; b\tc\nd"
    assert as_text("<think>x</think>") == (
        '<span class="token">&lt;think&gt;</span>x<span class="token">&lt;/think&gt;</span>'
    )
    assert as_text("\x00") == '<span class="token">U+0000</span>'


def test_turns_are_marked_with_persona_error_and_reaction(run: Path):
    page = render_report(load_run(run))
    section = page.split("Before training</h4>")[1]
    before, after = section.split("After training</h4>")[:2]
    assert "asked to err" in before and "asked to be right" in before and "no error" in before
    assert "not scaffolded</span>" in before and "not scaffolded</span>" not in after.split("</details>")[0]
    assert '<span class="chip good" dir="auto">scaffolded</span>' in after
    assert "passed over: not scaffolded" in before, "the judge's reasons"
    found = re.search(r'<span class="chip bad" dir="auto">(tense|verb ending|article|plural|preposition): ', before)
    assert found is not None
    assert describe_slip(Slip("tense", "go", "went")) == "tense: go → went"
    assert describe_slip(Slip("article", "egg", "an")) == "article: an egg"


def test_what_the_tutor_says_in_the_students_name_is_visible(tmp_path: Path):
    write_evaluation(tmp_path / "eval" / "before", {"sampled": conversations(speaks_for_the_student)})
    page = render_report(load_run(tmp_path))
    assert '<span class="token">&lt;|im_end|&gt;</span>' in page


def test_rejected_and_unjudged_conversations_are_marked(tmp_path: Path):
    turns = [Turn("teacher", "Hi!"), Turn("student", "Hello.", "simple_student", ended=False)]
    records = [
        record_of("judged", turns, [scored(1, 1, 10)], 0, reward=1.0),
        record_of("rejected", turns, [scored(0, 0, 1)], 1, reward=0.0, rejected=True),
        record_of("unjudged", turns, [FAILED], 2),
    ]
    write_evaluation(tmp_path / "eval" / "after", {"sampled": records})
    page = render_report(load_run(tmp_path))
    assert page.count('badge accepted">accepted') == page.count('badge rejected">rejected') == 1
    assert page.count('badge no-verdict">no verdict') == 1
    assert "I would rather not say." in page and "JudgeOutputError: no JSON" in page
    assert page.count("cut at its token limit") == 3 and "simple_student" in page


def test_a_run_without_evaluations_shows_its_training(tmp_path: Path):
    write_training(tmp_path, [step_line(1, 0.3)])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<svg" in page and "side by side" not in page
    assert "Did the tutor learn? No evidence of it." in page and "not measured on held-out lessons" in page


def test_an_empty_folder_is_refused(tmp_path: Path, capsys):
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        write_report(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "nothing to report" in capsys.readouterr().err
    assert main([]) == 2


def test_the_answer_follows_the_interval_of_the_change(run: Path, tmp_path: Path):
    assert answer(load_run(run)).word == "Yes."
    swapped, same = tmp_path / "swapped", tmp_path / "same"
    good, bad = conversations(ideal), conversations(ignores_errors)
    for folder, sides in ((swapped, (good, bad)), (same, (good, good))):
        for name, records in zip(("before", "after"), sides, strict=True):
            write_evaluation(folder / "eval" / name, {"sampled": records})
    worse, equal = answer(load_run(swapped)), answer(load_run(same))
    assert worse.word == equal.word == "No evidence of it."
    assert "fell by" in worse.reasons[0] and "did not change by more than chance" in equal.reasons[0]


def test_the_command_writes_summary_page_and_table(run: Path, capsys):
    write_summary(run, {"sft": 100.0, "total": 500.0})
    (run / "report.html").unlink(missing_ok=True)
    assert main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert "Held-out lessons, sampled" in printed and "report.html" in printed
    training = json.loads((run / "summary.json").read_text())["training"]
    assert training["seconds"]["sft"] == 100.0 and training["seconds_total"] == 500.0


# Charts ----------------------------------------------------------------------------------------------------------


def test_ticks_are_round_and_cover_the_values():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 3.4) == [0, 1, 2, 3, 4]
    assert ticks(0, 0)[0] == 0 and len(ticks(0, 0)) >= 2
    assert ticks(0, 3.1e-6, 4) == pytest.approx([0, 2e-6, 4e-6])


def test_smoothing_and_thinning_by_hand():
    points = [(1, 0.0), (2, 3.0), (3, 6.0), (4, 0.0)]
    assert smooth(points, 3) == [(1, 1.5), (2, 3.0), (3, 3.0), (4, 3.0)]
    assert smooth(points, 1) == points
    assert thin(points, 2) == [(1.5, 1.5), (3.5, 3.0)]
    assert thin(points, 4) == points


def test_lines_and_marks_stand_where_their_values_are():
    chart = line_chart(
        "x",
        [Series("a", "a", [(0, 0.0), (10, 1.0)])],
        y_range=(0, 1),
        marks=[Mark("m", "held out", "b", 10, 0.5, [0.25, 0.75])],
    )
    assert chart.paths == [("a", "line", f"M{chart.left:g},{chart.bottom:g}L{chart.right:g},{chart.top:g}")]
    colour, x, y, low, high, text = chart.marks[0]
    height = chart.bottom - chart.top
    assert (colour, x, text) == ("b", chart.right, "m: 0.500 [0.250, 0.750]")
    assert [y, low, high] == pytest.approx([chart.bottom - share * height for share in (0.5, 0.25, 0.75)], abs=0.01)
    assert chart.mark_legend == [("b", "held out")] and chart.legend == [("a", "a")]


def test_stacked_areas_stand_on_each_other():
    chart = area_chart("x", [Series("low", "a", [(1, 1.0), (2, 1.0)]), Series("high", "b", [(1, 3.0), (2, 3.0)])])
    middle = HEIGHT - 34 - (chart.bottom - chart.top) / 4
    assert f"{middle:g}" in chart.paths[0][2] and f"{middle:g}" in chart.paths[1][2]
    assert chart.hovers[0][2] == "step 1\nlow: 1\nhigh: 3"
    twice = line_chart("x", [Series("a", "a", [(1, 0.5)], faint=True), Series("a", "a", [(1, 0.7)])])
    assert [strip[2] for strip in twice.hovers] == ["step 1\na: 0.5"]


def test_times_are_said_as_people_say_them():
    assert [format_duration(value) for value in (0, 59.4, 60, 470.2, None)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "7 min 50 s",
        None,
    ]
