"""Tests of supervision.json (first and last batches by hand, what the intervals are over, passes and examples), and of
the rows of reviews that trackers show."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.results.run_folder import load_run
from classroom_rl.results.supervision_summary import (
    REVIEW_COLUMNS,
    SupervisionSummary,
    describe_supervision,
    review_rows,
    summarise_supervision,
    write_supervision,
)
from classroom_rl.rollout.reviews import Draft, Review
from classroom_rl.rollout.tokens import Turn
from tests.support.synthetic_run import record_of, step_line, write_training

LEAK = Review(False, "leak", -2.0, "It gives the answer away.", "What did she eat?")
FINE, SILENT = Review(True, "", 0.0), Review(error="no answer")


def said(*reviews: Review) -> list[Turn]:
    return [Turn("teacher", "…", review=review) for review in reviews]


def run_of(folder: Path, batches: list[dict], config: dict | None = None, lines: list[dict] | None = None) -> Path:
    """A run folder: in each batch, by lesson, (reward, turns) of its conversations."""
    for step, lessons in enumerate(batches):
        records = [
            record_of(lesson, turns, reward=reward).model_copy(update={"step": step})
            for lesson, conversations in lessons.items()
            for reward, turns in conversations
        ]
        write_rollouts(folder, step, 0, records)
    default = [
        step_line(step, 0.1 * step, **{"supervision/valid_share": 0.5}) for step in range(1, 1 + max(2, len(batches)))
    ]
    write_training(folder, lines or default, config)
    return folder


def summary_of(folder: Path) -> SupervisionSummary:
    summary = summarise_supervision(load_run(folder))
    assert summary is not None
    return summary


def test_the_first_batches_against_the_last(tmp_path: Path):
    first = {"a": [(0.0, said(LEAK, FINE))], "b": [(0.4, said(LEAK, SILENT))]}
    between = {"a": [(9.0, said(FINE))], "b": [(9.0, said(FINE))]}
    last = {"a": [(1.0, said(FINE, FINE))], "b": [(0.6, said(FINE, FINE, LEAK, FINE)), (None, said())]}
    summary = summary_of(run_of(tmp_path, [first, between, last]))  # 3 batches: one on each side
    assert summary.batches == 1
    assert {name: figure.over for name, figure in summary.figures.items()} == dict.fromkeys(
        ("reward", "valid", "process_reward"), "lessons"
    )
    reward, valid, process = summary.figures.values()
    assert reward.first == {"mean": 0.2, "ci95": None, "n": 2}
    assert reward.last == {"mean": 0.8, "ci95": None, "n": 2}
    assert valid.first == {"mean": pytest.approx(1 / 3), "ci95": None, "n": 3}, "no verdict counts as nothing"
    assert valid.last["mean"] == pytest.approx(5 / 6) and valid.last["n"] == 6
    # a: (−2 + 0) / 2; b: −2 alone. After it a: 0; b: −2 / 4.
    assert process.first == {"mean": -1.5, "ci95": None, "n": 2}
    assert process.last == {"mean": -0.25, "ci95": None, "n": 2}


def test_rejected_drafts_count_as_messages_and_a_replaced_one_once(tmp_path: Path):
    retried = Turn("teacher", "…", review=FINE, drafts=(Draft("…", 3, LEAK), Draft("…", 3, SILENT)))
    replaced = Turn("teacher", "…", review=LEAK, drafts=(Draft("…", 3, LEAK),), replaced=True)
    batch = {"a": [(0.0, [retried, Turn("student", "…")])], "b": [(0.0, [replaced])]}
    summary = summary_of(run_of(tmp_path, [batch, batch]))
    assert summary.figures["valid"].first["mean"] == pytest.approx(1 / 3), "valid: 1; leaks: 2"
    assert summary.figures["process_reward"].first["mean"] == -1.0, "of what was paid: 0 and −2"


def test_at_most_ten_batches_on_a_side(tmp_path: Path):
    batches = [{"a": [(float(step), said(FINE))], "b": [(float(step), said(FINE))]} for step in range(24)]
    summary = summary_of(run_of(tmp_path, batches))
    assert summary.batches == 10
    reward = summary.figures["reward"]
    assert (reward.first["mean"], reward.last["mean"]) == (4.5, 18.5), "0 to 9 and 14 to 23"
    assert reward.first["n"] == reward.last["n"] == 20


def test_without_rollouts_the_intervals_are_over_steps(tmp_path: Path):
    shares = [0.0, 0.5, None, 0.5, 1.0]
    lines = [
        step_line(step, 0.0, **({} if share is None else {"supervision/valid_share": share}))
        for step, share in enumerate(shares)
    ]
    write_training(tmp_path, lines)
    valid = summary_of(tmp_path).figures["valid"]
    assert valid.over == "steps"
    assert valid.first == {"mean": 0.25, "ci95": None, "n": 2}
    assert valid.last == {"mean": 0.75, "ci95": None, "n": 2}
    assert "process_reward" not in summary_of(tmp_path).figures


def test_one_lesson_has_no_interval_over_lessons(tmp_path: Path):
    batch = {"a": [(0.5, said(FINE))]}
    figure = summary_of(run_of(tmp_path, [batch] * 4)).figures["reward"]
    assert figure.over == "steps" and figure.first["mean"] == pytest.approx(0.15), "the lines' 0.1 and 0.2"


def test_passes_and_their_examples(tmp_path: Path):
    lines = [step_line(step, 0.0, **{"supervision/valid_share": 1.0, "corrections/rows": 3}) for step in range(4)]
    lines[1] |= {"corrections/pass_examples": 12, "corrections/pass_loss": 2.0, "corrections/passes": 1}
    lines[2] |= {"corrections/passes": 1, "corrections/ce_loss": 9.0}
    lines[3] |= {"corrections/pass_examples": 30, "corrections/pass_loss": 1.5, "corrections/passes": 2}
    write_training(tmp_path, lines)
    summary = summary_of(tmp_path)
    assert (summary.passes, summary.examples, summary.final_loss) == (2, 42, 1.5)


def test_a_pass_after_the_last_step_is_counted(tmp_path: Path):
    """A step's `corrections/passes` is recorded before the pass that follows the step."""
    lines = [
        step_line(step, 0.0, **{"supervision/valid_share": 1.0, "corrections/passes": passes})
        for step, passes in enumerate((0, 0, 1, 1))
    ]
    for line, examples in ((lines[1], 12), (lines[3], 30)):
        line |= {"corrections/pass_examples": examples, "corrections/pass_loss": 1.5}
    write_training(tmp_path, lines)
    summary = summary_of(tmp_path)
    assert (summary.passes, summary.examples) == (2, 42)


def test_corrections_in_the_same_step_are_counted_without_passes(tmp_path: Path):
    lines = [
        step_line(
            step, 0.0, **{"supervision/valid_share": 1.0, "corrections/rows": step, "corrections/ce_loss": 3 - step}
        )
        for step in range(3)
    ]
    write_training(tmp_path, lines, {"train": {"corrections": {"mode": "same_step"}}})
    summary = summary_of(tmp_path)
    assert (summary.passes, summary.examples, summary.final_loss) == (0, 3, 1.0)
    write_training(tmp_path, lines, {"train": {"corrections": {"mode": "pass"}}})  # too few for a pass so far
    summary = summary_of(tmp_path)
    assert (summary.passes, summary.examples, summary.final_loss) == (0, 0, None)


def test_the_file_holds_the_summary_and_the_text_says_it(tmp_path: Path):
    first = {"a": [(0.0, said(LEAK))], "b": [(0.4, said(FINE))]}
    last = {"a": [(1.0, said(FINE))], "b": [(0.6, said(FINE))]}
    summary = write_supervision(run_of(tmp_path, [first, last]))
    assert json.loads((tmp_path / "supervision.json").read_text()) == asdict(summary)
    assert describe_supervision(summary).splitlines() == [
        "What the supervisor saw, in the first and the last batch:",
        "  Reward: 0.200 (n = 2) → 0.800 (n = 2), intervals over lessons.",
        "  Valid messages: 50.0% (n = 2) → 100.0% (n = 2), intervals over lessons.",
        "  Process reward: −1.000 (n = 2) → 0.000 (n = 2), intervals over lessons.",
        "  Corrections: 0 passes, 0 examples trained on.",
    ]


def test_a_run_without_a_supervisor_has_no_such_file(tmp_path: Path):
    write_training(tmp_path, [step_line(1, 0.5), step_line(2, 0.5)])
    assert write_supervision(tmp_path) is None
    assert not (tmp_path / "supervision.json").exists()


def rows_of(*turns: Turn) -> list[dict]:
    record = record_of("lesson", turns).model_copy(update={"step": 5})
    return [dict(zip(REVIEW_COLUMNS, row, strict=True)) for row in review_rows([record])]


def test_a_message_that_was_heard_as_it_was_written():
    [row] = rows_of(
        Turn("teacher", "Hi!", given=True), Turn("student", "Hello."), Turn("teacher", "Eggs!", review=LEAK)
    )
    assert row == {
        "step": 5,
        "conversation": "c-0000",
        "turn": 2,
        "draft": "Eggs!",
        "valid": False,
        "category": "leak",
        "penalty": -2.0,
        "critique": "It gives the answer away.",
        "correction": "What did she eat?",
        "heard": "Eggs!",
    }


def test_a_message_that_was_written_again_has_a_row_for_each_draft():
    rows = rows_of(Turn("teacher", "And?", review=FINE, drafts=(Draft("Eggs!", 3, LEAK), Draft("Eggs?", 3, LEAK))))
    assert [(row["draft"], row["valid"], row["heard"]) for row in rows] == [
        ("Eggs!", False, "And?"),
        ("Eggs?", False, "And?"),
        ("And?", True, "And?"),
    ]
    assert rows[2]["correction"] is None and rows[2]["category"] == ""


def test_a_replaced_message_is_shown_as_its_draft_once():
    text = LEAK.correction
    [row] = rows_of(Turn("teacher", text, review=LEAK, drafts=(Draft("Eggs!", 3, LEAK),), replaced=True))
    assert (row["draft"], row["valid"], row["correction"], row["heard"]) == ("Eggs!", False, text, text)


def test_without_a_verdict_the_reason_is_shown():
    [row] = rows_of(Turn("teacher", "Hm.", review=Review(error="the supervisor did not answer")))
    assert (row["valid"], row["penalty"], row["critique"]) == (None, None, "the supervisor did not answer")


def test_conversations_without_a_supervisor_have_no_rows():
    assert rows_of(Turn("teacher", "Hi!"), Turn("student", "Hello.")) == []
