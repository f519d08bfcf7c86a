"""Where published weights go: to disk, or into the machine's shared memory."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from classroom_rl.config.checks import check_machines, check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.errors import ConfigError, DataError, StorageError
from classroom_rl.models import policy_folder
from classroom_rl.models.policy_folder import (
    check_policy,
    inside_run_folder,
    open_shared_memory,
    shared_memory_folder,
)
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.rows import POLICY, TrainingRow
from classroom_rl.system import storage
from classroom_rl.trainer.batch import Batch, Sample
from classroom_rl.trainer.checkpoints import remove_leftovers
from classroom_rl.trainer.log_probs import log_probs_of_batch
from classroom_rl.trainer.servers import AssignedServer
from classroom_rl.trainer.sharded_save import weight_bytes
from classroom_rl.trainer.weight_publisher import WeightPublisher
from tests.conftest import ROOT, on_this_machine
from tests.support.lora_engine import PROMPT, lora_engine
from tests.support.offline_trainer import offline_trainer, save_tiny_model

MEMORY = TrainConfig(publish_through="memory", publish_to_disk_every=4)


class LoadingServer:
    """Does with each published folder what a server does before its engine reads it."""

    def __init__(self, run_folder: Path):
        self.run_folder = run_folder
        self.loaded: list[tuple[int, Path, torch.Tensor]] = []
        self.fingerprints: dict[int, str] = {}

    def load_weights(self, policy: PolicyVersion, folder: Path) -> None:
        folder = inside_run_folder(self.run_folder, str(folder))
        self.fingerprints[policy.version] = check_policy(folder, policy)
        weight = load_file(folder / "model.safetensors")["model.norm.weight"].clone()  # the file is written over later
        self.loaded.append((policy.version, folder, weight))


@pytest.fixture
def trainer(world: Path, tmp_path: Path) -> Iterator[SimpleNamespace]:
    tiny_trainer = offline_trainer(tmp_path / "run", save_tiny_model(tmp_path / "model", world / "blank"))
    tiny_trainer.server = LoadingServer(tmp_path / "run")
    yield tiny_trainer
    open_shared_memory(tmp_path / "run")
    for path in sorted(shared_memory_folder(tmp_path / "run").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    shared_memory_folder(tmp_path / "run").rmdir()


def publisher(trainer, run_folder: Path, train: TrainConfig) -> WeightPublisher:
    return WeightPublisher(
        SimpleNamespace(
            config=TrainRLConfig(train=train),
            client=trainer.server,
            server=AssignedServer(0, "", True),
            gpus=SimpleNamespace(make_room=lambda: None),
            run_folder=run_folder,
            run_id="run",
        )
    )


def publish(trainer, through: WeightPublisher, steps: int, last: bool = False, from_step: int = 0) -> None:
    for step in range(from_step, steps):
        trainer.state.global_step = step
        with torch.no_grad():
            trainer.model.model.norm.weight.fill_(step)
        assert through.publish(trainer, last=last and step == steps - 1) == PolicyVersion("run", step)


def versions_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_the_server_gets_each_version_and_the_disk_some_of_them(trainer, tmp_path: Path) -> None:
    run_folder, shared = tmp_path / "run", shared_memory_folder(tmp_path / "run")
    publish(trainer, publisher(trainer, run_folder, MEMORY), 7)
    assert [(version, weight.unique().tolist()) for version, _, weight in trainer.server.loaded] == [
        (step, [step]) for step in range(7)
    ]
    on_disk = [version for version, folder, _ in trainer.server.loaded if folder.is_relative_to(run_folder)]
    assert on_disk == [4], "every four steps"
    versions = ["v000003", "v000005", "v000006"]
    assert versions_in(shared) == versions, "keep_published_policies is 2, and the next one is written over the oldest"
    assert versions_in(run_folder / "policy") == ["v000004"]
    assert shared.stat().st_mode & 0o777 == 0o700


def test_the_end_of_a_training_leaves_its_last_version_on_disk_and_nothing_in_memory(trainer, tmp_path: Path) -> None:
    publish(trainer, publisher(trainer, tmp_path / "run", MEMORY), 3, last=True)
    assert versions_in(tmp_path / "run" / "policy") == ["v000002"]
    assert not shared_memory_folder(tmp_path / "run").exists()


def test_through_the_disk_nothing_is_in_memory(trainer, tmp_path: Path) -> None:
    """Not even what a training left there that was stopped and goes on through the disk."""
    publish(trainer, publisher(trainer, tmp_path / "run", MEMORY), 2)
    publish(trainer, publisher(trainer, tmp_path / "run", TrainConfig()), 5, from_step=2)
    assert versions_in(tmp_path / "run" / "policy") == ["v000003", "v000004"]
    assert not shared_memory_folder(tmp_path / "run").exists()


def test_memory_without_room_for_all_versions_is_refused_at_the_first(trainer, tmp_path: Path, monkeypatch) -> None:
    size = weight_bytes(trainer.model, only_trained=False)
    through = publisher(trainer, tmp_path / "run", MEMORY)
    monkeypatch.setattr(storage, "_free", lambda _: 3 * size - 1)
    with pytest.raises(StorageError, match=r"--shm-size=…\), or set train.publish_through=disk, and start again"):
        publish(trainer, through, 1)
    monkeypatch.setattr(storage, "_free", lambda _: 3 * size)
    publish(trainer, through, 1)


def test_a_version_in_memory_is_written_over_the_oldest_one(trainer, tmp_path: Path) -> None:
    shared, files = shared_memory_folder(tmp_path / "run"), []
    through = publisher(trainer, tmp_path / "run", TrainConfig(publish_through="memory"))
    for steps in range(1, 9):
        publish(trainer, through, steps, from_step=steps - 1)
        files.append((shared / f"v{steps - 1:06d}" / "model.safetensors").stat().st_ino)
        assert load_file(shared / f"v{steps - 1:06d}" / "model.safetensors")["model.norm.weight"].unique() == steps - 1
    assert len(set(files[:3])) == 3 and files[3:6] == files[:3] and files[6:] == files[:2]
    assert {path.name for path in (shared / "v000007").iterdir()} == {"model.safetensors", "COMPLETE"}


def test_equal_weights_have_one_fingerprint_in_memory_and_on_disk(trainer, tmp_path: Path) -> None:
    """Or the conversations of a training that was killed would be played again after it published anew."""
    run_folder, shared = tmp_path / "run", shared_memory_folder(tmp_path / "run")
    through = publisher(trainer, run_folder, TrainConfig(publish_through="memory"))
    fingerprints = {}
    for version, fill, last in ((0, 1, False), (1, 2, False), (2, 1, False), (3, 1, False), (4, 1, True)):
        trainer.state.global_step = version
        with torch.no_grad():
            trainer.model.model.norm.weight.fill_(fill)
            trainer.model.model.norm.weight[-1] = 1.0
        through.publish(trainer, last=last)
        fingerprints[version] = trainer.server.fingerprints[version]
    assert not shared.exists()
    assert fingerprints[0] == fingerprints[2] == fingerprints[3] == fingerprints[4] != fingerprints[1]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from classroom_rl.models.policy_folder import oldest_policy, open_shared_memory, policy_name, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.trainer.sharded_save import write_shards
from classroom_rl.trainer.weight_files import KeptFiles

def pieces():
    for number in range(3):
        yield {f"model.w{number}": torch.full((1000,), 9.0)}
    os.kill(os.getpid(), signal.SIGKILL)

shared = open_shared_memory(Path(sys.argv[1]))
save = lambda folder: write_shards(pieces(), folder, kept=KeptFiles())
write_policy(shared / policy_name(int(sys.argv[2])), PolicyVersion("run", 9), save, over=oldest_policy(shared, 2))
"""


@pytest.mark.parametrize("published", [2, 3])
def test_a_trainer_that_is_killed_while_it_publishes_leaves_whole_versions_only(
    trainer, published: int, tmp_path: Path
) -> None:
    """Whether its files are new, or those of an old version."""
    run_folder, shared = tmp_path / "run", shared_memory_folder(tmp_path / "run")
    publish(trainer, publisher(trainer, run_folder, MEMORY), published)
    whole_versions = [f"v{version:06d}" for version in range(published)][-2:]
    before = {name: (shared / name / "model.safetensors").read_bytes() for name in whole_versions}
    done = subprocess.run([sys.executable, "-c", KILLED, str(run_folder), str(published)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert versions_in(shared) == [*whole_versions, f"v{published:06d}.unfinished"]
    assert not (shared / f"v{published:06d}.unfinished" / "COMPLETE").exists(), "no version any more"
    for name in whole_versions:
        check_policy(shared / name, PolicyVersion("run", int(name[1:])))
        assert (shared / name / "model.safetensors").read_bytes() == before[name]
    for name in (f"v{published:06d}", f"v{published:06d}.unfinished"):
        with pytest.raises(DataError):
            check_policy(shared / name, PolicyVersion("run", published))
    remove_leftovers(run_folder)
    assert versions_in(shared) == whole_versions, "the next trainer clears up"


def test_a_folder_of_somebody_else_is_used_by_neither_side(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(policy_folder, "SHARED_MEMORY", tmp_path / "shm")
    shared = shared_memory_folder(tmp_path / "run")
    (shared / "v000000").mkdir(parents=True)
    for spoil in (lambda: shared.chmod(0o777), lambda: replace_by_link(shared, tmp_path / "other")):
        spoil()
        with pytest.raises(StorageError, match="belongs to somebody else"):
            open_shared_memory(tmp_path / "run")
        with pytest.raises(DataError, match="is not inside this server's run folder"):
            inside_run_folder(tmp_path / "run", str(shared / "v000000"))


def replace_by_link(folder: Path, target: Path) -> None:
    folder.rename(target)
    target.chmod(0o700)
    os.symlink(target, folder)


def test_another_runs_shared_memory_is_not_this_ones(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(policy_folder, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    folder = open_shared_memory(tmp_path / "one") / "v000000"
    folder.mkdir()
    assert inside_run_folder(tmp_path / "one", str(folder)) == folder
    with pytest.raises(DataError, match="is not inside this server's run folder"):
        inside_run_folder(tmp_path / "two", str(folder))


def test_servers_elsewhere_have_other_memory() -> None:
    memory = ["--config-name", "quickstart", "train.publish_through=memory"]
    assert load(TrainRLConfig, "train_rl", memory, check_train_rl).train.publish_through == "memory"
    for elsewhere in ("generation.server_urls=[http://gpu2:8005]", "generation.server_host=192.0.2.7"):
        with pytest.raises(ConfigError, match="the shared memory of one machine, but a server is at"):
            load(TrainRLConfig, "train_rl", [*memory, elsewhere], check_train_rl)


def test_a_trainer_on_several_machines_publishes_through_the_disk() -> None:
    """A server of its own on each machine may have the address 127.0.0.1 on all of them."""
    for channel, machines in (("memory", 1), ("disk", 2)):
        check_machines(TrainRLConfig(train=TrainConfig(publish_through=channel)), machines, machines)
    with pytest.raises(ConfigError, match="launched on 2: set train.publish_through=disk"):
        check_machines(TrainRLConfig(train=TrainConfig(publish_through="memory")), 2, 2)


# A real engine ------------------------------------------------------------------------------------------------------


def drifting_ratio(values: list[float]) -> float:
    """The slope of a line through the values, in its standard errors."""
    (slope, _), covariance = np.polyfit(range(len(values)), values, 1, cov=True)
    return slope / covariance[0, 0] ** 0.5


def score(trainer, answer: SimpleNamespace) -> torch.Tensor:
    """The trainer's log-probs of what an engine said to `PROMPT`."""
    count = len(answer.ids)
    row = TrainingRow(
        *("c", POLICY, None, PROMPT, answer.ids, [1] * count, [0] * count),
        logprobs=answer.logprobs,
        messages=[0] * count,
    )
    batch = Batch.of([Sample(row, [0.0] * count)], trainer.processing_class.pad_token_id, trainer.accelerator.device)
    return log_probs_of_batch(trainer.model, batch, [[0]], trainer.accelerator, trainer.padding).logps_BT[0].cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lora", "steps"),
    [
        (None, 20),
        pytest.param(None, 200, marks=pytest.mark.full),
        pytest.param({"rank": 5, "alpha": 20, "dropout": 0.0}, 200, marks=pytest.mark.full),
    ],
)
def test_a_learning_rate_of_0_leaves_engine_and_trainer_as_close_as_they_were(
    lora: dict | None, steps: int, world: Path, tmp_path: Path
) -> None:
    """The engine begins with other weights and with prefixes of theirs in its cache. Three of four versions come to it
    through memory, where the files of the oldest one are written over."""
    options = ["train.publish_through=memory", "train.publish_to_disk_every=4"]
    if lora is not None:
        options += ["teacher_model.lora.enable=true", *(f"teacher_model.lora.{key}={lora[key]}" for key in lora)]
    trainer = offline_trainer(tmp_path / "run", world / "blank", options)
    answers, differences = [], []
    with lora_engine(world / "blank", lora) as ask:
        before = score(trainer, answer := ask())
        assert torch.allclose(before, torch.tensor(answer.logprobs), atol=on_this_machine(1e-3))
        torch.manual_seed(1)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        assert (score(trainer, answer) - before).abs().mean() > 0.02
        client = SimpleNamespace(load_weights=lambda policy, folder: answers.append(ask(folder, policy.version)))
        session = {"config": trainer.run_config, "run_folder": tmp_path / "run", "run_id": "run", "client": client}
        single = {"server": AssignedServer(0, "", True), "gpus": SimpleNamespace(make_room=lambda: None)}
        weight_publisher = WeightPublisher(SimpleNamespace(**session, **single))
        try:
            for step in range(steps):
                trainer.state.global_step = step
                weight_publisher.publish(trainer)
                assert answers[-1].version == step and answers[-1].refused is None
                difference = score(trainer, answers[-1]) - torch.tensor(answers[-1].logprobs)
                differences.append(difference.abs().mean().item())
        finally:
            shutil.rmtree(shared_memory_folder(tmp_path / "run"), ignore_errors=True)
    assert max(differences) < on_this_machine(1e-4)
    assert abs(drifting_ratio(differences)) < 4
