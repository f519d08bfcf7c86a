"""Tests of plots/supervision.png: what each panel draws of a run's metrics, and that a run without a supervisor has
none."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from classroom_rl.results.panels import SUPERVISION_PANELS, changes, moving_average, passes_of, shares_of_categories
from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import RunData, load_run
from tests.support.synthetic_run import step_line, write_training

REWARD, VALID, CATEGORIES, CROSS_ENTROPY, CHANGES = SUPERVISION_PANELS


def run_of(*more: dict) -> RunData:
    """A run with a line of metrics for each argument; the reward of step n is n / 10."""
    lines = [step_line(step, step / 10, **extra) for step, extra in enumerate(more, start=1)]
    return RunData(Path("run"), lines=lines)


def drawn(panel, data: RunData) -> Axes:
    axes = Figure().subplots()
    assert panel(axes, data)
    return axes


def lines_of(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()}


def test_the_moving_average_is_over_a_step_and_the_nine_before_it():
    points = [(float(step), float(value)) for step, value in enumerate([10, 0, *[1] * 9, 12])]
    average = dict(moving_average(points))
    assert average[0] == 10 and average[1] == 5, "fewer at the beginning"
    assert average[9] == pytest.approx(1.8), "10, 0 and eight times 1, over 10"
    assert average[10] == pytest.approx(0.9), "the 10 has left, the 0 has not"
    assert average[11] == pytest.approx(2.1), "nine times 1 and 12"
    assert moving_average([]) == []


def test_changes_are_from_step_to_step():
    assert changes([(1, 0.5), (2, 0.75), (4, 0.25)]) == [0.25, -0.5]
    assert changes([(1, 0.5)]) == []


def test_passes_are_marked_where_they_ran():
    more = [{"supervision/valid_share": 0.5, "corrections/passes": 1.0} for _ in range(6)]
    more[2]["corrections/pass_examples"], more[5]["corrections/pass_examples"] = 12, 30
    more[4]["corrections/pass_examples"] = 0  # too few waited
    data = run_of(*more)
    assert passes_of(data) == [3, 6]
    for panel in (REWARD, VALID):
        lines = [line for line in drawn(panel, data).get_lines() if line.get_linestyle() == "--"]
        assert [line.get_xdata()[0] for line in lines] == [3, 6]
        assert [line.get_label().startswith("_") for line in lines] == [False, True], "one entry in the legend"


def test_the_reward_and_its_average():
    lines = lines_of(drawn(REWARD, run_of(*[{"supervision/valid_share": 1.0}] * 4)))
    assert lines["each step"] == [(step, pytest.approx(step / 10)) for step in (1, 2, 3, 4)]
    assert lines["mean of the last 10 steps"][-1] == (4, pytest.approx(0.25))


def test_valid_messages_and_those_without_a_verdict():
    data = run_of({"supervision/valid_share": 0.5, "supervision/no_verdict_share": 0.25}, {})
    lines = lines_of(drawn(VALID, data))
    assert lines["valid"] == [(1, 0.5)] and lines["without a verdict"] == [(1, 0.25)]


def test_categories_are_stacked_the_most_frequent_first():
    name = "supervision/category/{}".format
    data = run_of(
        {name("leak"): 0.1, name("task"): 0.3, name("length"): 0.0},
        {},  # a step that trained on the same batch again
        {name("leak"): 0.1, name("format"): 0.25, name("length"): 0.0},
    )
    steps, shares = shares_of_categories(data)
    assert steps == [1, 3]
    assert shares == {"task": [0.3, 0.0], "format": [0.0, 0.25], "leak": [0.1, 0.1]}, "length never occurred"
    assert list(shares) == ["task", "format", "leak"]
    axes = drawn(CATEGORIES, data)
    tops = {part.get_label(): part.get_paths()[0].get_extents().y1 for part in axes.collections}
    assert tops == {"task": pytest.approx(0.3), "format": pytest.approx(0.3), "leak": pytest.approx(0.4)}
    assert len({to_hex(part.get_facecolor()[0]) for part in axes.collections}) == 3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["leak", "format", "task"], "as stacked"


def test_a_single_step_has_bars():
    axes = drawn(CATEGORIES, run_of({"supervision/category/leak": 0.1, "supervision/category/task": 0.3}))
    assert [(bar.get_y(), bar.get_height()) for bar in axes.patches] == [
        (0, pytest.approx(0.3)),
        (pytest.approx(0.3), pytest.approx(0.1)),
    ]


def test_cross_entropy_of_steps_and_of_passes():
    lines = lines_of(drawn(CROSS_ENTROPY, run_of({"corrections/ce_loss": 2.0}, {"corrections/pass_loss": 1.5})))
    assert lines["each step, running mean"] == [(1, 2.0)] and lines["at the end of a pass"] == [(2, 1.5)]
    assert drawn(CROSS_ENTROPY, run_of({"corrections/ce_loss": 0.0})).get_ylim() == (0, 1)


def test_the_histogram_counts_every_change():
    lines = [step_line(step, reward) for step, reward in enumerate([0.0, 0.5, 0.4, 0.4, 0.9])]
    lines[0]["supervision/valid_share"] = 1.0
    axes = drawn(CHANGES, RunData(Path("run"), lines=lines))
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()) for bar in axes.patches]
    assert sum(height for _, _, height in bars) == 4
    assert bars[-1][1] == pytest.approx(0.5) and bars[-1][2] == 2, "+0.5 twice, at the right end"
    assert sum(height for low, _, height in bars if low < -1e-9) == 1, "−0.1 once"
    assert lines_of(axes)["mean +0.2250"]


def test_a_run_without_a_supervisor_has_no_such_plot(tmp_path: Path):
    data = run_of({}, {})
    assert not any(panel(Figure().subplots(), data) for panel in SUPERVISION_PANELS)
    write_training(tmp_path, data.lines)
    assert "supervision.png" not in [path.name for path in write_plots(load_run(tmp_path))]
    write_training(tmp_path, [{**line, "supervision/valid_share": 0.5} for line in data.lines])
    path = tmp_path / "plots" / "supervision.png"
    assert path in write_plots(load_run(tmp_path)) and imread(path).shape[0] > 900, "three panels"
