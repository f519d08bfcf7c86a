"""bfloat16 through DeepSpeed, as on GPUs: four combinations that cover every pair of {ZeRO-2, ZeRO-3} × {gradient
checkpointing or not} × {all weights, an adapter}, three quickstart steps each, the last one after a resume. An engine
starts either for adapters or for whole weights, so two combinations at a time share a server."""

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from classroom_rl.config.train_rl import TrainConfig
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.trainer.checkpoints import last_checkpoint
from tests.conftest import RunningServer, running_server
from tests.trainer.test_lora_runs import judged, move_adapter_run  # noqa: F401
from tests.trainer.test_several_processes import launch, metrics_of
from tests.trainer.test_sharded_save import weights_in

_STEPS, _SAVED_AT = 3, 2
_TRAINING = [
    "train.dtype=bfloat16",
    f"train.optimizer={TrainConfig().optimizer}",  # the quickstart has one of its own
    "train.beta=0.05",
    "train.learning_rate=3e-3",
    "train.per_device_train_batch_size=4",
    f"logging.save_steps={_SAVED_AT}",
]
COMBINATIONS = {
    "all weights": (("zero2_2CPU", False), ("zero3_2CPU", True)),
    "adapter": (("zero2_2CPU", True), ("zero3_2CPU", False)),
}
"""What is trained: accelerate's configuration, and whether gradients are recomputed."""


def test_the_combinations_hold_every_pair() -> None:
    values = (("all weights", "adapter"), ("zero2_2CPU", "zero3_2CPU"), (False, True))
    flat = [(trained, *run) for trained, runs in COMBINATIONS.items() for run in runs]
    for first, second in combinations(range(3), 2):
        assert {(run[first], run[second]) for run in flat} == set(product(values[first], values[second]))


@pytest.fixture(scope="module", params=COMBINATIONS)
def server(
    request: pytest.FixtureRequest,
    world: Path,
    judged: list[str],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningServer]:
    """For one kind of what is trained; its judge tells all conversations apart."""
    lora = ["teacher_model.lora={enable: true, rank: 6, alpha: 24}"] if request.param == "adapter" else []
    with running_server(world, tmp_path_factory.mktemp("bf16"), *judged, *lora) as running:
        yield running


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
def test_three_steps_in_bfloat16_with_a_resume(
    server: RunningServer, number: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    accelerate_config, recomputed = COMBINATIONS[request.node.callspec.params["server"]][number]
    folder = server.run_folder
    (tmp_path / "other").mkdir()
    move_adapter_run(folder, tmp_path / "other")
    options = [*server.overrides, *_TRAINING, f"train.gradient_checkpointing={recomputed}"]
    published = []
    for steps in (_SAVED_AT, _STEPS):
        done = launch(accelerate_config, [*options, f"train.max_steps={steps}"])
        assert done.returncode == 0, done.stderr[-4000:]
        if steps == _SAVED_AT:
            assert Path(last_checkpoint(folder / "checkpoints")).name == f"checkpoint-{_SAVED_AT}"
        published.append(weights_of(policy_path(folder, _SAVED_AT)))
    assert server.client.health().policy.version == _STEPS
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.05 for line in lines)  # the engine is float32
    assert all(line["reward_std"] > 0.01 and line["grad_norm"] > 0 for line in lines)
    assert lines[-1]["kl"] > 1e-5 > abs(lines[0]["kl"]), "the reference stays as it was, also over the resume"

    before, taken_up = published
    assert all(torch.equal(taken_up[name], before[name]) for name in before), "published again before the next batch"
    last = weights_of(policy_path(folder, _STEPS))
    assert {weight.dtype for weight in last.values()} == {torch.bfloat16}
    assert any(not torch.equal(last[name], before[name]) for name in before), (
        "the step after the resume changed nothing"
    )
    saved = weights_of(folder / "adapter") if (folder / "adapter").exists() else weights_in(folder / "model")
    assert set(saved) == set(last) and all(torch.equal(saved[name], last[name]) for name in saved)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """An adapter's weights, or a model's."""
    adapter = folder / "adapter_model.safetensors"
    return load_file(adapter) if adapter.is_file() else weights_in(folder)
