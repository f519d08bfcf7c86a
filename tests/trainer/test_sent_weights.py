"""Whole trainings whose weights go from memory to memory (`train.publish_through: nccl`), over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from classroom_rl.config.checks import check_machines, check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from tests.conftest import ROOT, free_port, quickstart_overrides
from tests.support.receiving_servers import ReceivingBatches
from tests.support.replay_server import served
from tests.trainer.test_fsdp import STEPS, TRAINING, play
from tests.trainer.test_several_processes import metrics_of, run_training
from tests.trainer.test_sharded_save import weights_in

SENT = "train.publish_through=nccl"


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        (None, ""),
        pytest.param("2CPU", "fsdp", marks=pytest.mark.full),
        pytest.param("zero3_2CPU", "deepspeed", marks=pytest.mark.full),
    ],
    ids=["one process", "FSDP2", "ZeRO-3"],
)
def test_every_version_is_sent_and_again_if_the_server_restarts(
    launcher: str | None, kind: str, world: Path, tmp_path: Path
) -> None:
    """The server restarts while it plays the second batch, and has initial weights then."""
    folder = tmp_path / "run"
    folder.mkdir()
    server = ReceivingBatches(str(folder), play, restarts_at=1)
    with served(server) as port:
        overrides = [*quickstart_overrides(folder, world / "blank", world, port), *TRAINING]
        run_training(launcher, [*overrides, SENT, f"train.max_steps={STEPS}"], kind=kind)
    assert [version for version, _ in server.versions] == [0, 1, 1, 2, 3]
    assert server.loaded == [], "nothing came through files"
    repeated = server.versions[1][1], server.versions[2][1]
    assert all(torch.equal(weight, repeated[1][name]) for name, weight in repeated[0].items())
    assert versions_on_disk(folder) == ["v000003"], "the last one"
    _, received = server.versions[-1]
    written = weights_in(policy_path(folder, STEPS))
    assert set(received) == set(written)
    assert all(torch.equal(received[name], weight) for name, weight in written.items())
    first = weights_in(world / "blank")
    assert any((server.versions[-1][1][name] - weight).abs().max() > 1e-3 for name, weight in first.items())


@pytest.mark.full
def test_a_training_with_real_engines_starts_and_resumes(world: Path, tmp_path: Path) -> None:
    """The second launch has a new server. It finds version 2 on disk, before the trainer sends it."""
    folder = tmp_path / "run"
    learns = ["train.reward_weights={tests.support.own_rewards:brevity: 1}", "train.learning_rate=3e-3"]
    overrides = [*quickstart_overrides(folder, world / "blank", world, free_port()), *learns, SENT]
    overrides.append("logging.save_steps=2")
    for steps in (2, 3):
        command = [sys.executable, "-m", "classroom_rl.launch.cli", *overrides, f"train.max_steps={steps}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = metrics_of(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.002 for line in metrics)
    events = [event for event in read_journal(folder / JOURNAL_NAME) if event["event"] == "weights"]
    assert [event["version"]["version"] for event in events] == [0, 1, 2, 2, 3]
    assert len({event["weights"] for event in events}) == 4, "the weights moved"
    assert versions_on_disk(folder) == ["v000002", "v000003"]


def versions_on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "policy").iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("teacher_model.lora.enable=true", "engines load adapters from files: set train.publish_through=disk"),
        ("generation.colocate=true", "Set train.publish_through=memory, or give the server GPUs of its own"),
    ],
)
def test_what_cannot_be_sent_is_refused(more: str, said: str) -> None:
    sent = ["--config-name", "quickstart", SENT]
    assert load(TrainRLConfig, "train_rl", sent, check_train_rl).train.publish_through == "nccl"
    with pytest.raises(ConfigError, match=said):
        load(TrainRLConfig, "train_rl", [*sent, more], check_train_rl)


def test_on_several_machines_the_first_one_has_to_reach_all_servers() -> None:
    overrides = ["generation.server_urls=[http://127.0.0.1:8005,http://127.0.0.1:8005]"]
    config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", SENT, *overrides], check_train_rl)
    check_machines(config, 1, 2)
    with pytest.raises(ConfigError, match="http://127.0.0.1:8005 means each machine's own"):
        check_machines(config, 2, 2)
    config.generation.server_urls = ["http://10.0.0.1:8005", "http://10.0.0.2:8005"]
    check_machines(config, 2, 2)
