"""A small soak, and how slopes are computed."""

import pytest

from tests.chaos.soak import figures_of, play, slope, wrong_in


def test_a_slope_is_the_change_from_one_value_to_the_next():
    assert slope([7.0] * 40) == {"mean": 0.0, "ci95": [0.0, 0.0], "n": 20}
    assert slope([5 + 3.0 * i for i in range(40)])["mean"] == pytest.approx(3)
    noisy = slope([5 + 0.5 * i + (-1) ** i for i in range(200)])
    assert noisy["ci95"][0] <= 0.5 <= noisy["ci95"][1] and noisy["mean"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("measure", "values", "word"),
    [
        ("fds", [10 + i // 4 for i in range(100)], "file descriptors grow"),
        ("threads", [4 + i for i in range(100)], "threads grow"),
        ("memory_kb", [1e5 + 100 * i for i in range(100)], "memory grows by more than 16 KB"),
        ("seconds", [0.1 + 0.001 * i for i in range(100)], "batches become slower"),
    ],
)
def test_what_grows_is_named(measure, values, word):
    flat = {"fds": [10.0] * 100, "threads": [4.0] * 100, "memory_kb": [1e5] * 100, "seconds": [0.1] * 100}
    assert wrong_in(figures_of(flat) | {"batches": 100}) == []
    (wrong,) = wrong_in(figures_of(flat | {measure: values}) | {"batches": 100})
    assert wrong.startswith(word)


def test_20_batches_leave_no_file_and_no_thread_open(world, tmp_path):
    result = play(tmp_path / "run", world, 20)
    assert result.figures["conversations"] == 20 * 32 and result.figures["journal"] > 0
    for measure in ("fds", "threads"):  # memory still grows here, and times are not compared on a busy machine
        assert result.figures[measure]["slope"]["ci95"][0] <= 0, result.figures[measure]
