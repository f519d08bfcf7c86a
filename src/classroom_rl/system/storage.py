"""Storage helpers: atomic writes, generated folders, and errors about full disks and missing permissions as messages
with the path, the free space, and what to do."""

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


def cached_folder(out: Path, seed: int, sources: Iterable[Path], write: Callable[[Path, int], None]) -> bool:
    """Generate the folder `out`, unless it already holds the content for this seed and these sources. A folder that was
    generated from another seed or other sources is replaced.

    Args:
        sources: the files that determine the content, such as the generator's code.
        write: fills an empty folder for a seed.

    Returns:
        Whether anything was written.

    Raises:
        FileExistsError: if `out` holds something that this function did not generate.
    """
    stamp = {"seed": seed, "sources": hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()}
    stamp_file = out / _STAMP
    if stamp_file.is_file() and json.loads(stamp_file.read_text(encoding="utf-8")) == stamp:
        return False
    if out.exists() and not stamp_file.is_file() and any(out.iterdir()):
        raise FileExistsError(f"{out} holds something else than a world made here: name another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Written next to `out`, hence on the same disk, and renamed when complete: `out` never holds a part.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        new_folder = Path(temporary) / "world"
        new_folder.mkdir()
        write(new_folder, seed)
        (new_folder / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        if out.exists():
            shutil.move(out, Path(temporary) / "old")
        new_folder.rename(out)
    return True


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)
_PATH_CONFLICT = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")  # errors of the Rust libraries safetensors and tokenizers
_TORCH_WRITE_ERROR = re.compile(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed")
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn storage errors inside the `with` block into `StorageError`; other errors pass unchanged.

    Args:
        path: the file or folder being written, for errors that name no file.

    Raises:
        StorageError: for a full disk, a missing permission, or a file where a folder should be.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        filename = getattr(error, "filename", None)
        file = Path(os.fsdecode(filename)) if isinstance(filename, str | bytes) else path
        raise StorageError(_message(file, reason)) from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: other processes see the old content or the new one, never a part.

    Raises:
        StorageError: if the disk is full or not writable; the old content stays.
    """
    unfinished = path.with_name(f"unfinished-{path.name}")
    with storage_errors(path):
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def flush(path: Path) -> None:
    """Write a file or a folder from the system's cache to the disk (fsync), so that it survives a power loss."""
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
    elif isinstance(error, RuntimeError) and _TORCH_WRITE_ERROR.search(str(error)):
        number = errno.ENOSPC  # torch does not report the errno
    else:
        match = _RUST_ERRNO.search(str(error))
        number = int(match.group(1)) if match else None
    return number if number in (*_DISK_FULL, *_NOT_PERMITTED, *_PATH_CONFLICT) else None


def _message(path: Path, number: int) -> str:
    prefix = f"{path}: {os.strerror(number)}."
    if number in _DISK_FULL:
        return (
            f"{prefix} {_readable(_free(path))} are free on its disk. Make room there, or {_more_room(path)}, and "
            "start again: what was complete before is still there."
        )
    if number in _NOT_PERMITTED:
        return f"{prefix} Give this user the right to read and write there, or name another folder in logging.save_dir."
    return f"{prefix} Something else stands at that path: remove it, or name another folder in logging.save_dir."


def _more_room(path: Path) -> str:
    if path.is_relative_to(SHARED_MEMORY):
        return "raise the size of this part of memory (docker run --shm-size=…), or set train.publish_through=disk"
    return "move the run folder to a larger disk and name it in logging.save_dir"


def _free(path: Path) -> int:
    # disk_usage needs an existing path, and `path` may not exist yet.
    existing = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    return shutil.disk_usage(existing).free


def _readable(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count} bytes"
