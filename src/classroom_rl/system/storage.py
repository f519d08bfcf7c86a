"""Turns errors about full disks and missing permissions into messages with the path, the free space, and what to do."""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from classroom_rl.errors import StorageError

_STAMP = "world.json"


def make_folder(out: Path, seed: int, sources: Iterable[Path], write: Callable[[Path, int], None]) -> bool:
    """Make the folder `out`. One that holds what this seed and these sources give stays as it is; one made from another
    seed or by other sources is replaced.

    Args:
        sources: the files that determine the content.
        write: fills an empty folder for a seed.

    Returns:
        Whether anything was written.

    Raises:
        FileExistsError: if `out` holds something that was not made so.
    """
    stamp = {"seed": seed, "sources": hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()}
    known = out / _STAMP
    if known.is_file() and json.loads(known.read_text(encoding="utf-8")) == stamp:
        return False
    if out.exists() and not known.is_file() and any(out.iterdir()):
        raise FileExistsError(f"{out} holds something else than a world made here: name another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        fresh = Path(temporary) / "world"
        fresh.mkdir()
        write(fresh, seed)
        (fresh / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        if out.exists():
            shutil.move(out, Path(temporary) / "old")
        fresh.rename(out)
    return True


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
_RUST = re.compile(r"\(os error (\d+)\)")  # errors of the Rust libraries safetensors and tokenizers
_TORCH = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed")
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn storage errors inside the `with` block into `StorageError`; other errors pass unchanged.

    Args:
        path: the file or folder being written, for errors that name no file.

    Raises:
        StorageError: for a full disk, a missing permission, or a file in the place of a folder.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        named = getattr(error, "filename", None)
        file = Path(os.fsdecode(named)) if isinstance(named, str | bytes) else path
        raise StorageError(_message(file, reason)) from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: readers see the old content or the new one, never a part.

    Raises:
        StorageError: if the disk is full or not writable; the old content stays.
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    with storage_errors(path):
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def flush(path: Path) -> None:
    """Have a file or a folder written to the disk itself, so that it survives a loss of power, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Refuse to write to a disk without enough space.

    Raises:
        StorageError: if the disk of `folder`, which need not exist yet, has less than `needed` bytes free.
    """
    free = _free(folder)
    if free < needed:
        raise StorageError(
            f"{folder} needs {_readable(needed)}, but only {_readable(free)} are free on its disk. Make room there, or "
            f"{_more_room(folder)}, and start again: what was there before is untouched."
        )


def _reason(error: Exception) -> int | None:
    """The errno behind an error, if it is about storage; None for other errors."""
    if isinstance(error, OSError):
        number = error.errno
    elif isinstance(error, RuntimeError) and _TORCH.search(str(error)):
        number = errno.ENOSPC  # torch does not report the errno
    else:
        found = _RUST.search(str(error))
        number = int(found.group(1)) if found else None
    return number if number in (*_FULL, *_FORBIDDEN, *_IN_THE_WAY) else None


def _message(path: Path, number: int) -> str:
    said = f"{path}: {os.strerror(number)}."
    if number in _FULL:
        return (
            f"{said} {_readable(_free(path))} are free on its disk. Make room there, or {_more_room(path)}, and start "
            "again: what was complete before is still there."
        )
    if number in _FORBIDDEN:
        return f"{said} Give this user the right to read and write there, or name another folder in logging.save_dir."
    return f"{said} Something else stands at that path: remove it, or name another folder in logging.save_dir."


def _more_room(path: Path) -> str:
    if path.is_relative_to(SHARED_MEMORY):
        return "raise the size of this part of memory (docker run --shm-size=…), or set train.publish_through=disk"
    return "move the run folder to a larger disk and name it in logging.save_dir"


def _free(path: Path) -> int:
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free


def _readable(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count} bytes"
