"""The figures of a GPU check, and what they are worth."""

import pytest

from classroom_rl.config.train_rl import TrainConfig
from classroom_rl.launch.gpu_check_results import FAILED, OK, PartResult, check_mismatch, shape_figures
from classroom_rl.memory.budget import GIB
from classroom_rl.system.gpu_memory import MemoryWatch

LINE = {
    "time": 1000.0,
    "conversation/teacher_tokens": 30.0,
    "seconds/rollout": 8.0,
    "seconds/publish": 1.5,
    "seconds/train": 4.0,
    "num_tokens": 5e9,
    "mismatch/mean_abs_logprob_diff": 0.001,
}


@pytest.mark.parametrize("large", [0.06, 6.0])
def test_engines_that_sample_from_other_weights_than_the_published_fail_the_check(large: float) -> None:
    lines = [LINE, LINE | {"mismatch/mean_abs_logprob_diff": large}, LINE]
    result = check_mismatch(PartResult("quickstart", OK), lines)
    assert (result.status, result.figures["mismatch"]) == (FAILED, large)
    assert f"differ by {large:.3f} nats per token" in result.reason
    assert check_mismatch(PartResult("quickstart", OK), [LINE]).status == OK


def watched(gib_by_time: dict[float, int]) -> MemoryWatch:
    watch = MemoryWatch(lambda: 0)
    watch.samples = [(moment, used * GIB) for moment, used in gib_by_time.items()]
    return watch


def test_a_steps_figures_by_hand() -> None:
    # rollout from 988 to 996, training from 996 to 1000
    watch = watched({980.0: 9, 989.0: 4, 995.0: 3, 997.0: 5, 999.0: 2, 1001.0: 8})
    moments = {"rollout": 6 * GIB, "backward pass": 7 * GIB, "optimizer step": 5 * GIB}
    train = TrainConfig(number_of_problems_per_batch=4, num_samples_per_problem=2)
    figures = {
        "teacher tokens/s": 30.0,
        "rollout s": 8.0,
        "publish s": 1.5,
        "train s": 4.0,
        "training TFLOP/s": 15.0,
        "rollout peak GiB": 4.0,
        "rollout, by dry_run": 6.0,
        "training peak GiB": 5.0,
        "training, by dry_run": 7.0,
    }
    assert shape_figures([LINE], train, watch, moments, parameters=2000) == figures
    earlier = [LINE | {"time": moment, "seconds/rollout": 1.0, "num_tokens": 1e9} for moment in (950.0, 970.0, 986.0)]
    expected = figures | {"step s": 16.0, "training TFLOP/s": 12.0}
    assert shape_figures([*earlier, LINE], train, watch, moments, parameters=2000) == expected
