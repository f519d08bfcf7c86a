"""Folders that a program makes from a seed: whole or not there, and made anew when the code that makes them changes."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

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
