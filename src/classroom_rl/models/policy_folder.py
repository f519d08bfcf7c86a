"""Writes and checks model folders, which are complete or not there. A marker in a published folder names its policy
version. Published folders are in the run folder, or in the machine's shared memory."""

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
"""The key of a safetensors file's metadata for a digest of its content, by which `write_policy` need not read it."""


def policies_folder(run_folder: Path) -> Path:
    """The folder that holds the policy versions a run has published, each in its own folder."""
    return run_folder / "policy"


def shared_memory_folder(run_folder: Path) -> Path:
    """The folder in shared memory for the policy versions of a run: a file system without a disk, which all programs of
    the machine see. Its name follows from the run folder, so that server and trainer agree on it."""
    name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"classroom-{os.getuid()}-{name}"


def policy_path(run_folder: Path, version: int) -> Path:
    """The folder in which a run publishes this version on disk."""
    return policies_folder(run_folder) / policy_name(version)


def policy_name(version: int) -> str:
    """The name of a version's folder."""
    return f"v{version:06d}"


def open_shared_memory(run_folder: Path) -> Path:
    """Make the run's folder in shared memory, for this user alone, unless it exists.

    Raises:
        StorageError: if something else is there, or there is no shared memory.
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
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def write_policy(
    folder: Path, policy: PolicyVersion, save: Callable[[Path], None], needed: int = 0, over: Path | None = None
) -> None:
    """Let `save` write a model, add the marker of its version, and rename the flushed folder to `folder`. Arguments and
    errors are those of `write_whole`.

    Args:
        over: the folder of an old version, for `save` to overwrite; as a version it is gone before that begins.
    """

    def save_and_mark(target: Path) -> None:
        if over is not None:
            (target / MARKER).unlink(missing_ok=True)
        save(target)
        marker = json.dumps({"run_id": policy.run_id, "version": policy.version, "weights": _fingerprint(target)})
        (target / MARKER).write_text(marker, encoding="utf-8")

    write_whole(folder, save_and_mark, needed, over)


def write_whole(folder: Path, save: Callable[[Path], None], needed: int = 0, over: Path | None = None) -> None:
    """Let `save` fill a folder that gets its final name once everything in it is on disk: it is complete or not there.

    An existing folder of that name stays until the new one is complete and then is replaced. If `save` fails, its
    unfinished folder is removed.

    Args:
        needed: the bytes that have to be free for it: a lower bound of the folder's size, if known.
        over: a folder on the same disk that `save` is to overwrite, in place of an empty one.

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
    for path in unfinished.rglob("*"):
        flush(path)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    flush(folder.parent)


def inside_run_folder(run_folder: Path, path: str) -> Path:
    """The folder that a request names, with links resolved.

    Raises:
        DataError: if the folder, or a file in it, is neither inside the run folder nor inside its folder in shared
            memory.
    """
    try:
        folder, shared = Path(path).resolve(), shared_memory_folder(run_folder)
        in_memory = folder.is_relative_to(shared) and _is_own_folder(shared)
        root = shared if in_memory else run_folder
        outside = not folder.is_relative_to(root) or not all(
            each.resolve().is_relative_to(root) for each in folder.rglob("*")
        )
    except (ValueError, OSError, RuntimeError) as error:  # a null byte, a name too long, a loop of links
        raise DataError(f"{path[:200]!r} is no path: {error}.") from error
    if outside:
        raise DataError(
            f"{path[:200]} is not inside this server's run folder {run_folder}, or links out of it. Start server and "
            "trainer with the same logging.save_dir."
        )
    return folder


def check_policy(folder: Path, policy: PolicyVersion) -> str:
    """Refuse a folder that does not hold this policy completely: loading it would kill vLLM's engine.

    Returns:
        The fingerprint of its weights. Equal weights have equal fingerprints.

    Raises:
        DataError: with what is missing, damaged or different.
    """
    marker = folder / MARKER
    if not marker.is_file():
        raise DataError(f"{folder} holds no complete published policy: there is no file {MARKER} in it.")
    try:
        written = json.loads(marker.read_text(encoding="utf-8"))
        found, weights = (written["run_id"], written["version"]), written["weights"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{marker} is damaged: {error}.") from error
    if found != (policy.run_id, policy.version):
        raise DataError(f"{folder} holds {written}, not run {policy.run_id} version {policy.version}.")
    try:
        check_weights(folder)
    except ConfigError as error:
        raise DataError(str(error)) from error
    return weights


def remove_old_policies(folder: Path, keep: int, version: int) -> None:
    """Delete published versions in a folder: all but the newest `keep`, and those above `version`, the current one. A
    training that resumed at an earlier step publishes them anew."""
    complete = _complete_policies(folder)
    past = [path for path in complete if path.name <= policy_name(version)]
    for path in set(complete) - set(past[-keep:]):
        shutil.rmtree(path)


def oldest_policy(folder: Path, keep: int) -> Path | None:
    """The oldest of the published versions in a folder; None if it holds no more than `keep`."""
    complete = _complete_policies(folder)
    return complete[0] if len(complete) > keep else None


def _complete_policies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("v*") if (path / MARKER).is_file())


def _fingerprint(folder: Path) -> str:
    """A hash of the weights' content. An adapter's configuration is included, since it scales the weights."""
    digest = xxhash.xxh3_128()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob(ADAPTER_CONFIG))):
        digest.update(path.name.encode())
        noted = _noted_digest(path)
        if noted is not None:
            digest.update(noted.encode())
        elif path.stat().st_size:  # nothing can be mapped of an empty file
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(content)
    return digest.hexdigest()


def _noted_digest(path: Path) -> str | None:
    """The digest in a safetensors file's metadata; None if it has none, or is another file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get(CONTENT_DIGEST)
    except SafetensorError:
        return None
