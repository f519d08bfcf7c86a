"""Full disks and missing permissions: the message has path, free space and advice, and existing files stay intact.

The errors are the kernel's own: /dev/full, a limit on file sizes, a file where a folder has to be.
"""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from accelerate import Accelerator
from safetensors.numpy import load_file, save_file
from starlette.testclient import TestClient
from transformers import Trainer

import classroom_rl.server.app
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import StorageError
from classroom_rl.models.policy_folder import check_policy, policy_path, write_policy, write_whole
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.store.journal import Journal, read_journal
from classroom_rl.system.storage import refuse_full_disk, storage_errors
from classroom_rl.trainer.session import _open_run_folder
from classroom_rl.trainer.trainer_hooks import AtomicCheckpoints
from tests.models.test_policy_folder import save_model
from tests.support.scripted_room import Room
from tests.trainer.test_batch_player import record

HERE = "http://127.0.0.1:8005"
REQUEST = {"problems": ["fractions"], "answers": ["1/2"], "request_id": "r", "seed": 1, "step": 0}


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The kernel writes what fits, and refuses the rest, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_files() -> Iterator[None]:
    with files_no_larger_than(100_000):
        yield


def save_large(folder: Path) -> None:
    save_file({"w": numpy.ones(100_000, numpy.float32)}, folder / "model.safetensors")


def torch_large(folder: Path) -> None:
    torch.save({"w": torch.ones(100_000)}, folder / "optimizer.pt")


def text_large(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("x" * 200_000)


def to_a_full_device(folder: Path) -> None:
    (folder / "model.txt").symlink_to("/dev/full")
    (folder / "model.txt").write_text("x")


@pytest.mark.parametrize("save", [save_large, torch_large, text_large, to_a_full_device])
def test_a_full_disk_while_publishing_leaves_the_old_policy_and_nothing_half(tmp_path, small_files, save) -> None:
    write_policy(policy_path(tmp_path, 1), PolicyVersion("run", 1), save_model)
    with pytest.raises(StorageError) as caught:
        write_policy(policy_path(tmp_path, 2), PolicyVersion("run", 2), save)
    for part in (str(tmp_path / "policy/v000002"), "are free on its disk", "logging.save_dir", "is still there"):
        assert part in str(caught.value)
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["v000001"]
    check_policy(policy_path(tmp_path, 1), PolicyVersion("run", 1))


def test_a_model_that_cannot_be_replaced_stays(tmp_path: Path, small_files: None) -> None:
    write_whole(tmp_path / "model", save_model)
    with pytest.raises(StorageError):
        write_whole(tmp_path / "model", save_large)
    assert load_file(tmp_path / "model" / "model.safetensors")["w"].shape == (4,)


@pytest.mark.parametrize("fails_while", ["writing", "flushing"])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_while: str
) -> None:
    trainer = AtomicCheckpoints.__new__(AtomicCheckpoints)
    trainer.args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=2)
    trainer.accelerator, trainer.hp_search_backend = Accelerator(cpu=True), None
    trainer.state, trainer.run_config = SimpleNamespace(global_step=1), load(TrainRLConfig, "train_rl", [])
    trainer.contents = {}

    def save(self: AtomicCheckpoints, model: None, trial: None) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True)
        torch_large(folder)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Trainer, "_save_checkpoint", save)
    trainer._save_checkpoint(None, None)
    trainer.state.global_step = 2
    if fails_while == "flushing":
        monkeypatch.setattr("classroom_rl.models.policy_folder.os.fsync", no_room)
    room = 100_000 if fails_while == "writing" else 1_000_000
    with files_no_larger_than(room), pytest.raises(StorageError), storage_errors(tmp_path):
        trainer._save_checkpoint(None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_what_a_killed_trainer_had_begun_is_gone_at_the_next_start(tmp_path: Path) -> None:
    unfinished = [tmp_path / name for name in ("checkpoints/unfinished/checkpoint-2", "policy/v000003.unfinished",
                                               "model.unfinished", "adapter.unfinished")]  # fmt: skip
    leases = [tmp_path / "gpu_lease.json", tmp_path / "gpu_lease.1.json"]
    complete = [tmp_path / name for name in ("checkpoints/checkpoint-1", "policy/v000002", "model")]
    for folder in (*unfinished, *complete):
        folder.mkdir(parents=True)
    save_large(unfinished[1])
    for lease in leases:
        lease.write_text("[]")
    config = load(TrainRLConfig, "train_rl", [f"logging.save_dir={tmp_path}"])
    _open_run_folder(config, tmp_path)
    assert not any(path.exists() for path in (*unfinished, *leases)) and all(folder.exists() for folder in complete)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-1"]


def test_space_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize

    def save(folder: Path) -> None:
        raise AssertionError("it was begun")

    with pytest.raises(StorageError, match=r"v000007 needs .* GB, but only .* GB are free on its disk. Make room"):
        write_policy(policy_path(tmp_path, 7), PolicyVersion("run", 7), save, needed=free * 2)
    assert not (tmp_path / "policy").exists()
    refuse_full_disk(tmp_path / "not" / "there" / "yet", 1)


def test_rollouts_that_cannot_be_written_leave_those_before(tmp_path: Path, small_files: None) -> None:
    first = write_rollouts(tmp_path, 1, 0, [record(0)])
    long = record(1, completion_ids=list(range(100_000)), mask=[1] * 100_000, logprobs=[-0.1] * 100_000)
    with pytest.raises(StorageError, match=r"step_000001-0\.parquet: File too large"):
        write_rollouts(tmp_path, 1, 0, [long])
    assert first.stat().st_size < 100_000


def test_a_journal_on_a_full_disk_is_507_and_the_batch_goes_on_when_there_is_room(
    room: Room, generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = room.open(generation)

    async def open_service(*_: object):
        return service

    monkeypatch.setattr(classroom_rl.server.app, "open_service", open_service)
    with TestClient(
        classroom_rl.server.app.create_app(load(TrainRLConfig, "train_rl", []), room.folder), HERE
    ) as client:
        journal = room.folder / "journal.jsonl"
        with files_no_larger_than(journal.stat().st_size + 500):
            answer = client.post("/sample_conversations", json=REQUEST)
        assert answer.status_code == 507
        for part in (str(journal), "File too large", "free on its disk"):
            assert part in answer.json()["detail"]
        assert client.get("/health").json()["status"] == "ok"
        assert client.post("/sample_conversations", json=REQUEST).json()["conversations"][0]["reward"] is not None
    turns = [event["turn"]["text"] for event in read_journal(journal) if event["event"] == "turn"]
    assert turns == ["Say hello.", "Hello.", "Say hello.", "Hello.", "Say hello."]


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_of_itself(tmp_path: Path, small_files: None) -> None:
    journal = Journal(tmp_path)
    journal.append("turn", conversation="c", text="one")
    with pytest.raises(StorageError, match=r"journal\.jsonl: File too large"):
        journal.append("turn", conversation="c", text="x" * 200_000)
    journal.append("turn", conversation="c", text="two")
    for reader in (journal, Journal(tmp_path)):
        assert [event["text"] for event in reader.events("c")] == ["one", "two"]


def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"file.*: Not a directory. Something else stands at that path"):
        Journal(tmp_path / "file" / "run")
    (tmp_path / "run" / "journal.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"journal\.jsonl: Is a directory"):
        Journal(tmp_path / "run")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_missing_permission_is_said_with_the_path_and_the_fix(tmp_path: Path, monkeypatch, number: int) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError) as caught:
        Journal(tmp_path / "run")
    assert f"{tmp_path / 'run' / 'journal.jsonl'}: {os.strerror(number)}" in str(caught.value)
    assert "Give this user the right to read and write there" in str(caught.value)


def fails_otherwise() -> None:
    raise RuntimeError("unexpected pos, but not on a disk")


def fails_elsewhere() -> None:
    raise OSError(errno.ECONNRESET, "Connection reset by peer")


def fails_as_tokenizers_do() -> None:
    raise Exception("No such file or directory (os error 2)")


@pytest.mark.parametrize("fail", [fails_otherwise, fails_elsewhere, fails_as_tokenizers_do])
def test_other_errors_stay_what_they_are(tmp_path: Path, fail: Callable[[], None]) -> None:
    with pytest.raises(Exception) as caught, storage_errors(tmp_path):  # noqa: PT011 -- its type is what is looked at
        fail()
    assert not isinstance(caught.value, StorageError)


def test_a_journal_that_is_another_one_now_is_refused(tmp_path: Path) -> None:
    """Cut short, written to by another program, replaced, deleted: what is known of its lines would be wrong."""
    journal = Journal(tmp_path)
    first = journal.append("turn", conversation="c", text="one")
    original = journal.path.read_bytes()

    def refused(words: str) -> None:
        for act in (lambda: journal.read_at(first), lambda: journal.append("turn", conversation="c", text="two")):
            with pytest.raises(StorageError, match=rf"{words}.*while this server uses it.*put it back"):
                act()

    for content in (b"", original + original):
        journal.path.write_bytes(content)
        refused("was replaced or changed by another program")
    journal.path.write_bytes(original)
    assert journal.read_at(first)["text"] == "one"
    journal.path.rename(tmp_path / "moved")
    refused("was deleted or moved away")
    journal.path.write_bytes(original)
    refused("was replaced or changed by another program")
    (tmp_path / "moved").rename(journal.path)
    journal.append("turn", conversation="c", text="two")
    assert [event["text"] for event in journal.events("c")] == ["one", "two"]
