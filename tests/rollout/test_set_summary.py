"""Summaries of rollouts worked out by hand, and plots."""

from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl import RolloutSet
from classroom_rl.errors import DataError
from classroom_rl.rollout.step import End
from tests.support.played_rollouts import made


def test_a_summary_counts_what_is_there() -> None:
    cut = made(3, length=4, end=End("truncated", "max_steps"))
    cut = replace(cut, steps=(*cut.steps[:3], replace(cut.steps[3], finish_reason="length", tokens=8)))
    rollouts = RolloutSet([made(0, 1.0, 1), made(1, 0.0, 1), made(2, 0.5, 2, End("terminated", "stop", "won")), cut])
    summary = rollouts.summary()
    assert (summary.rollouts, summary.prompts, summary.not_scored) == (4, 4, 1)
    assert summary.reasons == {"terminated: stop": 2, "terminated: stop (won)": 1, "truncated: max_steps": 1}
    assert summary.steps["distribution"] == {1: 2, 2: 1, 4: 1}
    assert (summary.steps["mean"], summary.steps["min"], summary.steps["max"], summary.steps["total"]) == (2.0, 1, 4, 8)
    assert (summary.rewards["mean"], summary.rewards["n"]) == (0.5, 3)
    assert summary.rewards["ci95"] is None, "of three rollouts"
    assert summary.tokens["total"] == 7 * 3 + 8 and summary.tokens["per_step"]["mean"] == pytest.approx(29 / 8)
    assert (summary.cut["share"], summary.cut["n"]) == (1 / 8, 1)
    assert summary.thoughts == {"closed": 8} and summary.seconds["mean"] == pytest.approx(0.2)
    assert summary.ends["terminated"] == {"share": 0.75, "ci95": None, "n": 3}
    repeated = RolloutSet([made(0, 1.0, 1), made(1, 0.0, 1), made(2, 0.5, 2), cut] * 3).summary().ends["terminated"]
    assert repeated["n"] == 9 and repeated["ci95"] is None, "twelve rollouts on four prompts"
    apart = RolloutSet([made(number, 1.0, 1) for number in range(12)]).summary().ends["terminated"]
    assert apart["ci95"] == pytest.approx([0.77, 1.0], abs=0.04), "twelve of twelve prompts"
    text = str(summary)
    for words in ("4 rollouts on 4 prompts", "75.0 %, 3", "1 max_steps", "rollouts by steps: 1: 2, 2: 1, 4: 1"):
        assert words in text


def test_intervals_are_over_prompts_because_copies_resemble_each_other() -> None:
    """Six prompts, ten copies each, three always solved: sixty independent rollouts would give [0.37, 0.63]."""
    rollouts = RolloutSet(made(number, float(number < 30), prompt=number // 10) for number in range(60))
    assert rollouts.summary().rewards["ci95"] == pytest.approx([0.13, 0.87], abs=0.03)


def test_a_summary_of_nothing_has_no_means() -> None:
    summary = RolloutSet().summary()
    assert (summary.rollouts, summary.steps["mean"], summary.rewards["mean"]) == (0, None, None)
    assert "0 rollouts" in str(summary)
    assert "1 rollout on 1 prompt" in str(RolloutSet([made(0)]).summary())


def test_plots_are_drawn(tmp_path: Path) -> None:
    rollouts = RolloutSet(
        [made(0, 1.0), made(1, None, 3, End("truncated", "max_steps")), made(2, None, 0, End("failed", "error"))]
    )
    paths = rollouts.rescore(lambda rollout: [0.5] * len(rollout.steps)).plot(tmp_path / "plots")
    assert [path.name for path in paths] == ["rewards.png", "steps.png", "ends.png", "by_step.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert [path.name for path in rollouts.rescore(lambda rollout: None).plot(tmp_path / "bare")] == [
        "steps.png",
        "ends.png",
        "by_step.png",
    ]
    with pytest.raises(DataError, match="no rollouts"):
        RolloutSet().plot(tmp_path)


def test_plots_count_steps_from_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    steps, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axes, x, *rest, **more: steps.append([*x]) or plot(axes, x, *rest, **more))
    RolloutSet([made(0, length=3)]).plot(tmp_path)
    assert steps == [[0, 1, 2]]
