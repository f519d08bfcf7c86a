"""summary.json and report.html, on run folders made without a model."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from classroom_rl.environments.marooned.config import RUN_VIEW as MAROONED
from classroom_rl.environments.toy_language.scripts import ideal
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
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.tokens import Turn
from classroom_rl.viewer.metrics import RunMetrics
from tests.evaluation.report.conftest import CONFIG, conversations
from tests.support.scripted_teachers import ignores_errors
from tests.support.synthetic_run import FAILED, record_of, scored, step_line, write_evaluation, write_training

# The summary -------------------------------------------------------------------------------------------------------


def test_the_summary_has_the_agreed_shape(run: Path):
    seconds = {"sft": 100.0, "server_start": 30.0, "rollout": 81.0, "eval": 55.0, "total": 333.0}
    summary = write_summary(run, seconds)
    assert json.loads((run / "summary.json").read_text()) == summary
    assert list(summary) == ["learning", "heldout", "training", "engine", "mismatch"]
    assert summary["learning"]["verdict"] == "learned" and "rose by" in summary["learning"]["reasons"][0]
    assert list(summary["heldout"]) == ["before", "after"]
    for samplings in summary["heldout"].values():
        assert list(samplings) == ["sampled", "greedy"]
        for figures in samplings.values():
            assert {name: list(value) for name, value in figures.items()} == {
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


# The page ----------------------------------------------------------------------------------------------------------


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
    for text in ("tiny &lt;tutor&gt;", "first &lt;try&gt;", "vllm 0.32.0", "8 lessons × 4 conversations", "6 min 40 s"):
        assert text in page
    assert "Did the tutor learn? Yes." in page
    assert render_report(load_run(run)) == page, "the same folder always gives the same page"


def test_a_rubrics_criterion_gets_a_line_in_its_chart(tmp_path: Path):
    for further in ({}, {"judge/warmth_score": 0.25}):
        write_training(tmp_path, [step_line(step, 0.5, **further) for step in range(1, 41)], CONFIG)
        assert ("Warmth: 0.25" in render_report(load_run(tmp_path))) == bool(further)


PLAIN = {"student_personas_prompts_paths": {"plain_student": "student.txt"}}


@pytest.mark.parametrize(
    ("generation", "page_text", "fact"),
    [
        ({"student_error_rate": 0.25}, "25 % of its turns", "0.25"),
        ({"student_error_rate": {"a": 1, "error_student": 3}}, "75 % of its", "0.75"),
        ({"student_error_rate": 0.2, **PLAIN}, None, None),
        ({"student_error_rate": {"plain_student": 1.0}, **PLAIN}, None, None),
    ],
)
def test_how_often_the_student_errs(run: Path, generation: dict, page_text: str | None, fact: str | None):
    write_training(run, [step_line(1, 0.5)], CONFIG | {"generation": generation})
    page = render_report(load_run(run))
    assert ("Student errs in" in page) == (page_text is not None) and (page_text or "") in page
    assert dict(RunMetrics(run).facts()).get("error turns") == fact


def test_the_training_s_reward_and_held_out_lessons_have_charts_of_their_own(run: Path):
    lines = [step_line(step, 0.3 - step / 20, reward_std=0.5) for step in range(1, 11)]
    write_training(run, lines, CONFIG)
    training, held_out = charts(load_run(run))[:2]
    assert (training.title, held_out.title) == ("Reward", "Reward on held-out lessons")
    assert not training.marks and {mark[1] for mark in held_out.marks} == {held_out.left, held_out.right}
    assert [label for _, label in held_out.mark_legend] == ["sampled", "greedy"] and len(held_out.marks) == 4
    assert float(training.y_ticks[0][1]) <= -0.7, "the band below 0 is on the chart"


def test_what_apis_cost_stands_there_with_their_failures(run: Path):
    lines = [{"judge/calls": 95, "judge/failed_calls": 31, "judge/cost_usd": 0.1}, {"judge/cost_usd": 0.0}]
    lines += [{"judge/calls": 1000, "judge/failed_calls": 2, "judge/cost_usd": 0.3774, "student/cost_usd": 0.0}]
    write_training(run, [step_line(step, 0.5, **line) for step, line in enumerate(lines, 1)], CONFIG)
    paid_for = "judge $0.4774 for 1,095 requests, of which 33 failed"
    assert dict(facts(load_run(run)))["Paid in training"] == paid_for in render_report(load_run(run))


@pytest.mark.parametrize(
    ("pleases", "said"),
    [
        ([0.0, 1.0, 0.0], "learns to please, from step 2 (guard/student_…)"),
        ([0.0, 0.0], "no sign of pleasing"),
        ([], None),
    ],
)
def test_a_student_that_learns_to_please_is_named(run: Path, pleases: list[float], said: str | None):
    lines = [step_line(step, 0.5, **{"guard/student_pleases": value}) for step, value in enumerate(pleases, 1)]
    write_training(run, lines or [step_line(1, 0.5)], CONFIG)
    assert dict(facts(load_run(run))).get("Trained student") == said
    assert (said or "Trained student") in render_report(load_run(run)) or said is None


def test_each_of_several_rewards_and_the_environment_s_own_figures_have_charts(run: Path):
    rewards = {"rewards/found/mean": 0.2, "rewards/my:short/mean": 0.5, "turn_rewards/my:brief/mean": -0.1}
    panel = MAROONED.panels[0]
    write_training(run, [step_line(1, 0.5, **rewards | {panel.lines[0][0]: 0.3})], CONFIG | {"environment": "marooned"})
    by_title = {chart.title: chart for chart in charts(load_run(run))}
    assert [label for _, label in by_title["The rewards in the sum"].legend] == ["found", "my:short", "my:brief"]
    assert [label for _, label in by_title[panel.title].legend] == [panel.lines[0][1]]
    write_training(run, [step_line(1, 0.5, **{"rewards/pedagogical/mean": 0.5})], CONFIG)
    assert not by_title.keys() - {chart.title for chart in charts(load_run(run))} ^ {
        "The rewards in the sum",
        panel.title,
    }


def test_the_rules_judge_stands_there_with_the_version_of_its_rules(run: Path):
    write_training(run, [step_line(1, 0.5)], CONFIG | {"judge_model": {"model_name_or_path": "rules"}})
    notes = run / "config" / "train_rl.environment.json"
    notes.write_text(json.dumps({"rules_version": "3"}), encoding="utf-8")
    assert ("Judge", "rules, version 3") in facts(load_run(run))
    notes.unlink()
    assert ("Judge", "rules") in facts(load_run(run)), "a run from before the version was recorded"
    unjudged = CONFIG | {"generation": {"number_judge_attempts": 0}, "judge_model": {"model_name_or_path": "rules"}}
    write_training(run, [step_line(1, 0.5)], unjudged)
    assert "Judge" not in dict(facts(load_run(run)))
    write_training(run, [step_line(1, 0.5)], CONFIG | {"environment": "my_game"})
    assert not {"Judge", "Student"} & dict(facts(load_run(run))).keys()


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a < b\tc\r\nd", "a &lt; b\tc\nd"),
        ("<think>x", '<span class="token">&lt;think&gt;</span>x'),
        ("<|im_end|>", '<span class="token">&lt;|im_end|&gt;</span>'),
        ("\x00", '<span class="token">U+0000</span>'),
    ],
)
def test_special_tokens_and_controls_are_spelled_out(text: str, shown: str):
    assert as_text(text) == shown


def test_turns_are_marked_with_persona_error_and_reaction(run: Path):
    page = render_report(load_run(run))
    section = page.split("Before training</h4>")[1]
    before, after = section.split("After training</h4>")[:2]
    assert "asked to err" in before and "asked to be right" in before and "no error" in before
    assert "not scaffolded</span>" in before and "not scaffolded</span>" not in after.split("</details>")[0]
    assert '<span class="chip good" dir="auto">scaffolded</span>' in after
    assert "passed over: not scaffolded" in before, "the judge's reasons"
    assert re.search(r'<span class="chip bad" dir="auto">(tense|verb ending|article|plural|preposition): ', before)


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
    assert answer(load_run(run))[0] == "Yes."
    swapped, same = tmp_path / "swapped", tmp_path / "same"
    good, bad = conversations(ideal), conversations(ignores_errors)
    for folder, sides in ((swapped, (good, bad)), (same, (good, good))):
        for name, records in zip(("before", "after"), sides, strict=True):
            write_evaluation(folder / "eval" / name, {"sampled": records})
    worse, equal = answer(load_run(swapped)), answer(load_run(same))
    assert worse[0] == equal[0] == "No evidence of it."
    assert "fell by" in worse[1][0] and "did not change by more than chance" in equal[1][0]


def test_the_command_writes_summary_page_and_table(run: Path, capsys):
    write_summary(run, {"sft": 100.0, "total": 500.0})
    (run / "report.html").unlink(missing_ok=True)
    assert main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert "Held-out lessons, sampled" in printed and "report.html" in printed
    training = json.loads((run / "summary.json").read_text())["training"]
    assert training["seconds"]["sft"] == 100.0 and training["seconds_total"] == 500.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (470.2, "7 min 50 s"), (None, None)]
)
def test_durations(seconds: float | None, text: str | None):
    assert format_duration(seconds) == text
