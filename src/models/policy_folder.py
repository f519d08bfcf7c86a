"""Writes and checks model folders, which are complete or not there. A marker in a published folder names its policy
version."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from ..errors import ConfigError, DataError
from ..system.storage import refuse_full_disk, storage_errors
from .lora import ADAPTER_CONFIG
from .policy_version import PolicyVersion
from .pretrained import check_weights

MARKER = "COMPLETE"
_BLOCK = 1 << 22


def policies_folder(run_folder: Path) -> Path:
    """The folder that holds the policy versions a run has published, each in its own folder."""
    return run_folder / "policy"


def policy_path(run_folder: Path, version: int) -> Path:
    """The folder in which a run publishes this version."""
    return policies_folder(run_folder) / f"v{version:06d}"


def write_policy(folder: Path, policy: PolicyVersion, save: Callable[[Path], None], needed: int = 0) -> None:
    """Let `save` write a model, add the marker of its version, and rename the flushed folder to `folder`. Arguments and
    errors are those of `write_whole`."""

    def save_and_mark(target: Path) -> None:
        save(target)
        marker = json.dumps({"run_id": policy.run_id, "version": policy.version, "weights": _fingerprint(target)})
        (target / MARKER).write_text(marker, encoding="utf-8")

    write_whole(folder, save_and_mark, needed)


def write_whole(folder: Path, save: Callable[[Path], None], needed: int = 0) -> None:
    """Let `save` fill a folder that gets its final name once everything in it is on disk: it is complete or not there.

    An existing folder of that name stays until the new one is complete and then is replaced. If `save` fails, its
    unfinished folder is removed.

    Args:
        needed: a lower bound of the folder's size in bytes, if known.

    Raises:
        StorageError: if the disk is full or not writable.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    refuse_full_disk(folder, needed)
    try:
        with storage_errors(folder):
            unfinished.mkdir(parents=True)
            save(unfinished)
            complete(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def complete(unfinished: Path, folder: Path) -> None:
    """Flush an unfinished folder to disk and rename it to `folder`, replacing an existing one."""
    for path in unfinished.rglob("*"):
        _flush(path)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    _flush(folder.parent)


def inside_run_folder(run_folder: Path, path: str) -> Path:
    """The folder that a request names, with links resolved.

    Raises:
        DataError: if the folder, or a file in it, is not inside the run folder.
    """
    try:
        folder = Path(path).resolve()
        outside = not folder.is_relative_to(run_folder) or not all(
            each.resolve().is_relative_to(run_folder) for each in folder.rglob("*")
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


def remove_old_policies(run_folder: Path, keep: int) -> None:
    """Delete all published versions except the newest `keep`."""
    complete = sorted(path for path in policies_folder(run_folder).glob("v*") if (path / MARKER).is_file())
    for path in complete[:-keep]:
        shutil.rmtree(path)


def _fingerprint(folder: Path) -> str:
    """A hash of the weights' content. An adapter's configuration is included, since it scales the weights."""
    digest = xxhash.xxh3_128()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob(ADAPTER_CONFIG))):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
