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
    if relative.is_absolute() or relative.parts[:1] not in [(name,) for name in FOLDERS] or relative.exists():
        return path
    shipped = ROOT / relative
    return str(shipped) if shipped.exists() else path
