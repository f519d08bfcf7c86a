"""Finds the files that come with the package: configurations, prompt templates and data."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parents[1]
FOLDERS = ("config", "prompt_templates", "data")
"""The folders of shipped files. A wheel holds a copy of each, made when it is built (setup.py)."""
IN_CHECKOUT = all((_CHECKOUT / name).is_dir() for name in FOLDERS)
ROOT = _CHECKOUT if IN_CHECKOUT else _PACKAGE / "shipped"
"""Where `FOLDERS` are: the repository that the package is imported from, or the installed copy."""


def find_shipped(path: str) -> str:
    """Resolve a relative path from a configuration, such as prompt_templates/judges/correction.txt.

    A file or folder below the working directory takes precedence; otherwise the absolute path of the shipped one is
    returned. A path that exists in neither place is returned unchanged.
    """
    relative = Path(path)
    if relative.is_absolute() or relative.exists() or not _is_shipped(ROOT / relative):
        return path
    shipped = ROOT / relative
    return str(shipped) if shipped.exists() else path


def as_written(path: str) -> str:
    """The inverse of `find_shipped`: a shipped file's path as configurations write it, any other path as it is."""
    return path.removeprefix(f"{ROOT}/") if _is_shipped(Path(path)) else path


def _is_shipped(path: Path) -> bool:
    return any(path.is_relative_to(ROOT / name) for name in FOLDERS)
