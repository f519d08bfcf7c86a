"""Writes model folders atomically, and checks them. A marker file in a published folder names its policy version.
Published folders are in the run folder, or in the machine's shared memory."""

import hashlib
import json
import mmap
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open

from classroom_rl.errors import ConfigError, DataError, StorageError
from classroom_rl.models.lora import ADAPTER_CONFIG
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import check_weights
from classroom_rl.system.storage import SHARED_MEMORY, flush, refuse_full_disk, storage_errors

MARKER = "COMPLETE"
CONTENT_DIGEST = "content_xxh3_128"
"""The metadata key of a safetensors file for a digest of its content, so that `write_policy` need not read the file."""


def policies_folder(run_folder: Path) -> Path:
    """The folder for the policy versions that a run publishes, each in its own subfolder."""
    return run_folder / "policy"


def shared_memory_folder(run_folder: Path) -> Path:
    """The folder for a run's policy versions in shared memory: a file system in RAM that all programs on the machine
    can read. Its name is derived from the run folder, so that server and trainer agree on it."""
    name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"classroom-{os.getuid()}-{name}"


def policy_path(run_folder: Path, version: int) -> Path:
    """The folder in which a run publishes this version on disk."""
    return policies_folder(run_folder) / policy_name(version)


def policy_name(version: int) -> str:
    """The name of a version's folder."""
    return f"v{version:06d}"


def open_shared_memory(run_folder: Path) -> Path:
    """Create the run's folder in shared memory, accessible only to this user, unless it exists.

    Raises:
        StorageError: if the path belongs to another user or is not a folder, or there is no shared memory.
    """
    folder = shared_memory_folder(run_folder)
    if not SHARED_MEMORY.is_dir():
        raise StorageError(f"There is no {SHARED_MEMORY} here: publish through the disk (train.publish_through=disk).")
    with storage_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_own_folder(folder):
        raise StorageError(
            f"{folder} belongs to somebody else: remove it, or publish through the disk (train.publish_through=disk)."
        )
    return folder


def _is_own_folder(folder: Path) -> bool:
    """Whether this is a folder (no link) of this user that nobody else can write to. Any user can create a folder with
    this name in shared memory, and weights from there must not be loaded."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def write_policy(
    folder: Path, policy: PolicyVersion, save: Callable[[Path], None], needed: int = 0, over: Path | None = None
) -> None:
    """Let `save` write a model, add the marker of its version, and rename the flushed folder to `folder`. Arguments and
    errors are those of `write_whole`.

    Args:
        over: the folder of an old version that `save` overwrites. Its marker is removed first, so it no longer counts
            as a version.
    """

    def save_and_mark(target: Path) -> None:
        if over is not None:
            (target / MARKER).unlink(missing_ok=True)
        save(target)
        marker = json.dumps({"run_id": policy.run_id, "version": policy.version, "weights": _fingerprint(target)})
        (target / MARKER).write_text(marker, encoding="utf-8")

    write_whole(folder, save_and_mark, needed, over)


def write_whole(folder: Path, save: Callable[[Path], None], needed: int = 0, over: Path | None = None) -> None:
    """Let `save` fill a temporary folder, and rename it to `folder` once everything in it is on disk. So a folder of
    that name is always complete.

    An existing folder of that name is replaced when the new one is complete. If `save` fails, its unfinished folder is
    removed.

    Args:
        needed: the bytes that must be free: a lower bound of the folder's size, if known.
        over: a folder on the same disk that `save` overwrites, instead of an empty one.

    Raises:
        StorageError: if the disk is full or not writable.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    if over is None:
        refuse_full_disk(folder, needed)
    try:
        with storage_errors(folder):
            if over is None:
                unfinished.mkdir(parents=True)
            else:
                over.rename(unfinished)
            save(unfinished)
            complete(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def complete(unfinished: Path, folder: Path) -> None:
    """Flush an unfinished folder to disk and rename it to `folder`, replacing an existing one."""
    # In this order: after a power loss, a folder with the final name must not hold files that never reached the disk.
    for path in unfinished.rglob("*"):
        flush(path)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    flush(folder.parent)  # makes the rename itself durable


def inside_run_folder(run_folder: Path, path: str) -> Path:
    """The folder that a request names, with links resolved.

    Raises:
        DataError: if the folder, or a file in it, is outside both the run folder and the run's folder in shared memory.
    """
    try:
        folder, shared = Path(path).resolve(), shared_memory_folder(run_folder)
        in_memory = folder.is_relative_to(shared) and _is_own_folder(shared)
        root = shared if in_memory else run_folder
        is_outside = not folder.is_relative_to(root) or not all(
            file.resolve().is_relative_to(root) for file in folder.rglob("*")
        )
    except (ValueError, OSError, RuntimeError) as error:  # a null byte, a name too long, a loop of links
        raise DataError(f"{path[:200]!r} is no path: {error}.") from error
    if is_outside:
        raise DataError(
            f"{path[:200]} is not inside this server's run folder {run_folder}, or links out of it. Start server and "
            "trainer with the same logging.save_dir."
        )
    return folder


def moved_policy(run_folder: Path, recorded: str) -> str:
    """Where a published policy is now. A run folder that was moved, copied or restored from a backup has the policy at
    the same place inside, while its journal still has the former path."""
    moved_folder = policies_folder(run_folder) / Path(recorded).name
    return str(moved_folder) if not Path(recorded).is_relative_to(run_folder) and moved_folder.is_dir() else recorded


def check_policy(folder: Path, policy: PolicyVersion) -> str:
    """Refuse a folder that does not hold this policy completely, because loading it would kill vLLM's engine.

    Returns:
        The fingerprint of its weights. Equal weights have equal fingerprints.

    Raises:
        DataError: names what is missing, damaged or different.
    """
    marker = folder / MARKER
    if not marker.is_file():
        raise DataError(f"{folder} holds no complete published policy: there is no file {MARKER} in it.")
    try:
        record = json.loads(marker.read_text(encoding="utf-8"))
        published, weights = (record["run_id"], record["version"]), record["weights"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{marker} is damaged: {error}.") from error
    if published != (policy.run_id, policy.version):
        raise DataError(f"{folder} holds {record}, not run {policy.run_id} version {policy.version}.")
    try:
        check_weights(folder)
    except ConfigError as error:
        raise DataError(str(error)) from error
    return weights


def remove_old_policies(folder: Path, keep: int, version: int) -> None:
    """Delete published versions in a folder: all but the newest `keep`, and those newer than `version`, the current
    one. Newer ones are left over from before the training resumed at an earlier step, which publishes them again."""
    versions = _complete_policies(folder)
    not_newer = [path for path in versions if path.name <= policy_name(version)]
    for path in set(versions) - set(not_newer[-keep:]):
        shutil.rmtree(path)


def oldest_policy(folder: Path, keep: int) -> Path | None:
    """The oldest published version in a folder; None if it holds no more than `keep` versions."""
    versions = _complete_policies(folder)
    return versions[0] if len(versions) > keep else None


def _complete_policies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("v*") if (path / MARKER).is_file())


def _fingerprint(folder: Path) -> str:
    """A hash of the weights' content. An adapter's configuration is included, because it sets the weights' scale."""
    digest = xxhash.xxh3_128()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob(ADAPTER_CONFIG))):
        digest.update(path.name.encode())
        stored = _stored_digest(path)
        if stored is not None:
            digest.update(stored.encode())
        elif path.stat().st_size:  # mmap refuses an empty file
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(content)
    return digest.hexdigest()


def _stored_digest(path: Path) -> str | None:
    """The digest in a safetensors file's metadata; None if it has none, or is not a safetensors file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get(CONTENT_DIGEST)
    except SafetensorError:
        return None
