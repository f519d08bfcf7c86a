"""Published weights are complete or absent, and old ones go."""

from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from classroom_rl.errors import DataError
from classroom_rl.models.policy_folder import (
    check_policy,
    policies_folder,
    policy_path,
    remove_old_policies,
    write_policy,
)
from classroom_rl.models.policy_version import PolicyVersion


def save_model(folder: Path) -> None:
    save_file({"w": numpy.zeros(4, numpy.float32)}, folder / "model.safetensors")


def test_policy_is_whole_or_not_there(tmp_path: Path) -> None:
    policy = PolicyVersion("run", 3)
    folder = policy_path(tmp_path, 3)

    def die_half_way(target: Path) -> None:
        save_model(target)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_policy(folder, policy, die_half_way)
    assert not folder.exists()
    write_policy(folder, policy, save_model)
    check_policy(folder, policy)
    assert [path.name for path in folder.parent.iterdir()] == ["v000003"]


@pytest.mark.parametrize(
    ("policy", "changed", "message"),
    [
        (PolicyVersion("run", 4), {}, "not run run version 4"),
        (PolicyVersion("walk", 3), {}, "not run walk version 3"),
        (PolicyVersion("run", 3), {"COMPLETE": None}, "COMPLETE"),
        (PolicyVersion("run", 3), {"COMPLETE": b"{"}, "COMPLETE is damaged"),
        (PolicyVersion("run", 3), {"COMPLETE": b"[]"}, "COMPLETE is damaged"),
        (PolicyVersion("run", 3), {"COMPLETE": b'{"run_id": "run"}'}, "COMPLETE is damaged"),
        (PolicyVersion("run", 3), {"model.safetensors": None}, "safetensors"),
        (PolicyVersion("run", 3), {"model.safetensors": b"weights"}, r"model\.safetensors is missing or damaged"),
    ],
)
def test_weights_of_another_policy_and_damaged_ones_are_refused(
    tmp_path: Path, policy: PolicyVersion, changed: dict[str, bytes | None], message: str
) -> None:
    folder = policy_path(tmp_path, 3)
    write_policy(folder, PolicyVersion("run", 3), save_model)
    for name, content in changed.items():
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        check_policy(folder, policy)


def test_only_old_complete_policies_are_removed(tmp_path: Path) -> None:
    for version in range(4):
        write_policy(policy_path(tmp_path, version), PolicyVersion("run", version), save_model)
    unfinished = policy_path(tmp_path, 9)
    unfinished.mkdir()
    remove_old_policies(unfinished.parent, keep=2, version=3)
    assert sorted(path.name for path in unfinished.parent.iterdir()) == ["v000002", "v000003", "v000009"]


def test_a_resumed_trainings_version_stays_and_later_ones_go(tmp_path: Path) -> None:
    """They are of the steps that are trained anew; by their names they would be the newest."""
    for version in (4, 5, 2):
        write_policy(policy_path(tmp_path, version), PolicyVersion("run", version), save_model)
    remove_old_policies(policies_folder(tmp_path), keep=2, version=2)
    assert [path.name for path in policies_folder(tmp_path).iterdir()] == ["v000002"]
