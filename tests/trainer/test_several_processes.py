"""Training in several processes: ZeRO-2 and ZeRO-3 on the CPU, with real launches on a tiny model."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import DataError
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.server.schemas import Health
from classroom_rl.trainer.checkpoints import last_checkpoint
from classroom_rl.trainer.run import train
from tests.conftest import ROOT, RunningServer, free_port, quickstart_overrides
from tests.support.offline_trainer import save_tiny_model
from tests.support.replay_server import Batches, Replay, recorded_batches, served
from tests.support.supervised_batches import with_supervision
from tests.system.test_distributed import in_processes
from tests.trainer.test_sharded_save import weights_in

_STEPS = 3
# Three groups of four on two processes: the second group is split between them. The reference model and the large steps
# make the loss depend on the weights, the small limit on the gradient's norm makes clipping count.
_TRAINING = [
    "train.number_of_problems_per_batch=3",
    "train.num_samples_per_problem=4",
    "train.per_device_train_batch_size=2",
    "train.beta=0.1",
    "train.learning_rate=3e-3",
    "train.max_grad_norm=0.05",
    f"train.max_steps={_STEPS}",
    f"logging.save_steps={_STEPS}",
]
_LAUNCH = (sys.executable, "-m", "classroom_rl.launch.accelerate_launch", "--config_file")


def launch(
    accelerate_config: str, overrides: list[str], timeout_s: float = 600, kind: str = "deepspeed", **environment: str
) -> subprocess.CompletedProcess:
    command = [*_LAUNCH, f"config/{kind}/{accelerate_config}.yaml", "--main_process_port", str(free_port())]
    command += ["train_rl.py", *overrides]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environment}
    )


def run_training(launcher: str | None, overrides: list[str], kind: str = "deepspeed") -> None:
    """A training in this process, without accelerate's launch, or one with a configuration of accelerate's."""
    if launcher is None:
        train(load(TrainRLConfig, "train_rl", overrides, check_train_rl))
        return
    done = launch(launcher, overrides, kind=kind)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-4000:]


def metrics_of(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def gathered_by_deepspeed(run_folder: Path) -> dict[str, torch.Tensor]:
    """The weights that DeepSpeed puts together from what each process left in the checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(run_folder / "checkpoints" / f"checkpoint-{_STEPS}"))


def assert_published_are_the_gathered(run_folder: Path) -> None:
    published, gathered = weights_in(policy_path(run_folder, _STEPS)), gathered_by_deepspeed(run_folder)
    assert set(published) == set(gathered) - {"lm_head.weight"}  # tied to the embeddings
    for name, weight in published.items():
        assert torch.equal(weight, gathered[name]), name
    trained = weights_in(run_folder / "model")
    assert set(trained) == set(published) and all(torch.equal(trained[name], published[name]) for name in trained)


def assert_movement_is_that_of(now: dict[str, torch.Tensor], then: dict[str, torch.Tensor], run_folder: Path) -> None:
    """What the trainer wrote down of how far its parameters moved is what their files say."""
    movement = json.loads((run_folder / "learning.json").read_text())["figures"]["movement"]
    moved, norm = (
        sum(tensor.double().square().sum() for tensor in tensors) ** 0.5
        for tensors in ([now[name] - then[name] for name in then], then.values())
    )
    assert movement["relative_norm"] == pytest.approx(float(moved / norm), rel=1e-5) and moved > 0
    assert movement["compared"] == movement["of"] == sum(tensor.numel() for tensor in then.values())


def assert_moved_alike(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], then: dict[str, torch.Tensor]
) -> None:
    """Each tensor's two movements differ by at most a thousandth of the movement. Single weights may differ by more of
    theirs: Adam divides by a gradient's size, so where only rounding is left of a sum, they move either way."""
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        assert (found[name] - weight).norm() <= 1e-3 * (weight - then[name]).norm(), name


@dataclass
class Recorded:
    """A run with two processes, ZeRO-3 and a real server, and the conversations that it trained on."""

    run_folder: Path
    policy: PolicyVersion
    health: Health
    batches: Batches

    def replay(self, run_folder: Path, batches: Batches, refuse: Callable[[int], None] = lambda _: None) -> Replay:
        """A server of the run in `run_folder`."""
        return Replay(self.health.model_copy(update={"run_folder": str(run_folder)}), batches, refuse)


@pytest.fixture(scope="module")
def recorded(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The run begins with nothing of another one in the server's folder, and leaves nothing there."""
    run_folder = tmp_path_factory.mktemp("zero3")
    move_run(server.run_folder, tmp_path_factory.mktemp("other"))
    done = launch("zero3_2CPU", [*server.overrides, *_TRAINING])
    move_run(server.run_folder, run_folder)
    assert done.returncode == 0, done.stderr[-4000:]
    health = server.client.health()
    return Recorded(run_folder, health.policy, health, recorded_batches(run_folder, _STEPS, processes=2))


def move_run(source: Path, target: Path) -> None:
    for name in ("run_id", "metrics.jsonl", "rollouts", "policy", "checkpoints", "model"):
        if (source / name).exists():
            shutil.move(source / name, target / name)


@dataclass
class OneProcess:
    """A training in one process on the recorded batches."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def marked(recorded: Recorded) -> Batches:
    """The recorded batches with marks that differ: an untrained teacher earns nothing to learn from."""
    batches = [[record.model_copy(deep=True) for record in batch] for batch in recorded.batches]
    for batch in batches:
        for index, record in enumerate(batch):
            record.reward = index * 7 % 5 / 4
            record.rewards = dict.fromkeys(record.rewards, record.reward)
    return batches


@pytest.fixture(scope="module")
def one_process(
    recorded: Recorded, marked: Batches, world: Path, tmp_path_factory: pytest.TempPathFactory
) -> OneProcess:
    run_folder = tmp_path_factory.mktemp("alone")
    with served(recorded.replay(run_folder, marked)) as port:
        run_training(None, [*quickstart_overrides(run_folder, world / "blank", world, port), *_TRAINING])
    losses = [line["loss"] for line in metrics_of(run_folder)]
    return OneProcess(losses, weights_in(policy_path(run_folder, _STEPS)))


def test_engine_loads_what_zero3_publishes(recorded: Recorded) -> None:
    run_id = (recorded.run_folder / "run_id").read_text()
    assert recorded.policy == PolicyVersion(run_id, _STEPS)
    lines = metrics_of(recorded.run_folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["mismatch/mean_abs_logprob_diff"] < 0.002 and line["sampling/sampling_logp_difference/max"] < 0.02
        assert line["seconds/rollout"] > 0 and line["seconds/publish"] > 0
    for step, batch in enumerate(recorded.batches):
        policies = {turn.policy for record in batch for turn in record.turns if turn.role == "teacher"}
        assert policies == {PolicyVersion(run_id, step)}
    assert last_checkpoint(recorded.run_folder / "checkpoints"), "what DeepSpeed wrote is taken up, not refused"
    assert_published_are_the_gathered(recorded.run_folder)


def test_group_on_two_processes_has_one_schedule(recorded: Recorded) -> None:
    """The second of the three groups: two of its conversations were sampled by either process."""
    for step, batch in enumerate(recorded.batches):
        assert len({record.problem for record in batch}) == 3
        group = batch[4:8]
        assert [record.request_id.rpartition("-")[0] for record in group] == [
            f"{recorded.policy.run_id}-step{step:06d}-rank{rank}of2" for rank in (0, 0, 1, 1)
        ]
        assert len({(record.problem_id, record.type, record.student_name) for record in group}) == 1
        longest = max(group, key=lambda record: len(record.turns))
        for record in group:
            assert [t.persona for t in record.turns] == [t.persona for t in longest.turns][: len(record.turns)]


@pytest.mark.parametrize(  # ZeRO-3 trains as one process does with uneven rows, too
    "accelerate_config", ["zero2_2CPU", pytest.param("zero3_2CPU", marks=pytest.mark.full)]
)
def test_two_processes_train_as_one_does(
    accelerate_config: str, recorded: Recorded, marked: Batches, one_process: OneProcess, world: Path, tmp_path: Path
) -> None:
    replay = recorded.replay(tmp_path, marked)
    with served(replay) as port:
        overrides = [*quickstart_overrides(tmp_path, world / "blank", world, port), *_TRAINING]
        done = launch(accelerate_config, overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr and done.stderr.count("the trained model is in") == 1
    assert [policy.version for policy in replay.loaded] == [0, 1, 2, 3]
    assert [line["loss"] for line in metrics_of(tmp_path)] == pytest.approx(one_process.losses, abs=1e-4)
    assert max(map(abs, one_process.losses)) > 1e-3
    assert_published_are_the_gathered(tmp_path)
    published = weights_in(policy_path(tmp_path, _STEPS))
    blank = weights_in(world / "blank")
    assert_movement_is_that_of(published, blank, tmp_path)
    assert_moved_alike(published, one_process.weights, blank)


@pytest.mark.full
def test_resumed_training_goes_on_as_if_uninterrupted(
    recorded: Recorded, marked: Batches, one_process: OneProcess, world: Path, tmp_path: Path
) -> None:
    with served(recorded.replay(tmp_path, marked)) as port:
        overrides = [*quickstart_overrides(tmp_path, world / "blank", world, port), *_TRAINING]
        for steps in (_STEPS - 1, _STEPS):
            done = launch("zero3_2CPU", [*overrides, f"logging.save_steps={_STEPS - 1}", f"train.max_steps={steps}"])
            assert done.returncode == 0, done.stderr[-4000:]
    assert [line["loss"] for line in metrics_of(tmp_path)] == pytest.approx(one_process.losses, abs=1e-4)
    for name, weight in weights_in(policy_path(tmp_path, _STEPS)).items():
        assert torch.allclose(weight, one_process.weights[name], rtol=0, atol=1e-4), name


_SUPERVISED = ["supervisor_model.model_name_or_path=rules", "train.turn_credit.mode=to_go"]
_SAME_STEP = ["train.corrections.mode=same_step", "train.corrections.weight=0.5", "train.corrections.rows_per_batch=99"]
_PASS = ["train.corrections.mode=pass", "train.corrections.interval=1", "train.corrections.max_kl=1000"]
_LORA = ["teacher_model.lora.enable=true", "teacher_model.lora.dropout=0"]


@pytest.mark.parametrize(
    ("accelerate_config", "more"),
    [
        ("zero3_2CPU", _SAME_STEP),
        pytest.param("zero2_2CPU", _SAME_STEP, marks=pytest.mark.full),
        pytest.param("zero3_2CPU", _PASS, marks=pytest.mark.full),
        pytest.param("zero2_2CPU", _PASS, marks=pytest.mark.full),
        pytest.param("zero2_2CPU", [*_SAME_STEP, *_LORA], marks=pytest.mark.full),
        pytest.param("zero3_2CPU", [*_SAME_STEP, "train.mu=2", "train.max_steps=6"], marks=pytest.mark.full),
    ],
    ids=["same step", "same step, ZeRO-2", "pass", "pass, ZeRO-2", "LoRA", "mu 2"],
)
def test_rows_of_uneven_number_train_two_processes_as_one(
    accelerate_config: str, more: list[str], recorded: Recorded, marked: Batches, world: Path, tmp_path: Path
) -> None:
    """Drafts and corrections, three times as many on the second process: a row that is lost, or there twice, changes
    loss and weights. One process makes the same optimizer steps over corrections if it takes twice as many at once."""
    batches, weights, lines = with_supervision(marked), [], []
    for processes in (1, 2):
        folder = tmp_path / f"{processes} processes"
        replay = recorded.replay(folder, batches)
        replay.passes = 2 if "train.mu=2" in more else 1
        with served(replay) as port:
            overrides = [*quickstart_overrides(folder, world / "blank", world, port), *_TRAINING, *_SUPERVISED, *more]
            overrides.append(f"train.per_device_train_batch_size={4 // processes}")
            run_training(None if processes == 1 else accelerate_config, overrides)
        weights.append(weights_in(folder / "model"))
        lines.append(metrics_of(folder))
    for name in ("loss", *(f"corrections/{figure}" for figure in ("ce_loss", "rows", "pass_loss", "pass_examples"))):
        alone, together = ([line[name] for line in run_lines if name in line] for run_lines in lines)
        assert together == pytest.approx(alone, abs=1e-4), name
    assert any("corrections/ce_loss" in line or "corrections/pass_loss" in line for line in lines[0])
    for name, weight in weights[0].items():
        assert torch.allclose(weights[1][name], weight, rtol=0, atol=1e-4), name
    if more == _SAME_STEP:
        assert_published_are_the_gathered(folder)
        assert_movement_is_that_of(weights[1], weights_in(world / "blank"), folder)


def refuse_the_second(rank: int) -> None:
    if rank == 1:
        raise DataError("the second process is refused")


def without_verdicts(batches: Batches) -> Batches:
    """As if judging had failed for all conversations of the second process."""
    half = len(batches[0]) // 2
    return [
        [record if index < half else record.model_copy(update={"reward": None}) for index, record in enumerate(batch)]
        for batch in batches
    ]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("one refused", "the second process is refused"),
        pytest.param("no verdicts", "6 of 12 conversations of this batch have no verdict", marks=pytest.mark.full),
        pytest.param("no answer", "did not answer with the 6 conversations of request", marks=pytest.mark.full),
    ],
)
def test_what_fails_on_one_process_stops_all_with_one_message(
    what: str, message: str, recorded: Recorded, marked: Batches, world: Path, tmp_path: Path
) -> None:
    def close(_: int) -> None:
        raise ConnectionResetError

    refuse = {"one refused": refuse_the_second, "no answer": close}.get(what, lambda _: None)
    replay = recorded.replay(tmp_path, without_verdicts(marked) if what == "no verdicts" else marked, refuse)
    with served(replay) as port:
        overrides = [*quickstart_overrides(tmp_path, world / "blank", world, port), *_TRAINING]
        done = launch("zero3_2CPU", [*overrides, "generation.sample_timeout_s=3"])
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1 and message in done.stderr, done.stderr[-4000:]
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_publishing_that_fails_stops_all(recorded: Recorded, marked: Batches, world: Path, tmp_path: Path) -> None:
    """The main process cannot write while the others are handing it their parts of the weights."""
    (tmp_path / "policy").write_text("a file where a folder should be")
    with served(recorded.replay(tmp_path, marked)) as port:
        overrides = [*quickstart_overrides(tmp_path, world / "blank", world, port), *_TRAINING]
        done = launch("zero3_2CPU", overrides)
    assert done.returncode in (1, 2) and str(tmp_path / "policy") in done.stderr, done.stderr[-4000:]


def test_wrong_configuration_is_told_once() -> None:
    done = launch("zero2_2CPU", ["train.mue=2"])
    assert done.returncode == 2
    assert done.stderr.count("Did you mean train.mu?") == 1 and "Traceback" not in done.stderr


def test_a_process_waits_for_one_that_plays_longer_than_computing_may_take(world: Path, tmp_path: Path) -> None:
    """The second process's messages are 50 times as long and come 4 s later, of the 30 s that its request may take;
    beside those, 2 s are granted to any collective operation."""
    program = """
import json, sys, time
from pathlib import Path
from classroom_rl.trainer import arguments
arguments._COMPUTING_S = 2
from accelerate import PartialState
from tests.support import offline_trainer as offline

def play(index, problem):
    record = offline.conversation(index, problem, seed=rank)
    if rank == 1:
        time.sleep(1)
        for name in ("completion_ids", "mask", "logprobs"):
            setattr(record, name, getattr(record, name) * 50)
    return record

waits = ["generation.sample_timeout_s=30", "generation.server_start_timeout_s=1", "generation.load_weights_timeout_s=1"]
waits += ["train.per_device_train_batch_size=2", "train.max_steps=2"]
trainer = offline.offline_trainer(Path(sys.argv[1]), Path(sys.argv[2]), waits, play)
rank = PartialState().process_index
trainer.train()
tokens = int(trainer.state.log_history[0]["completions/max_length"])
print(json.dumps([trainer.state.global_step, tokens, trainer.model.get_input_embeddings().weight.sum().item()]))
"""
    model = save_tiny_model(tmp_path / "model", world / "blank")
    first, second = in_processes(program, 2, str(tmp_path / "run"), str(model))
    assert first == second and first[0] == 2 and first[1] > 500


def test_process_that_is_killed_is_named(tmp_path: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text("import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n")
    program.write_text(program.read_text() + "time.sleep(100)\n")
    command = [*_LAUNCH, "config/deepspeed/zero2_2CPU.yaml", "--main_process_port", str(free_port()), str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + 9
    assert "error: process 1 of the training" in done.stderr and "was ended by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr
