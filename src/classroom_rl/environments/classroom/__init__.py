"""The classroom: a teacher talks with a student, and a judge scores the lesson.

`Classroom`, `Conversation` and `parse_judge_output` can be imported from here. Each is loaded on first use, so that
importing the package stays cheap.
"""

from importlib import import_module
from typing import Any

_LAZY_MODULES = {
    "Classroom": f"{__name__}.environment",
    "Conversation": f"{__name__}.conversation",
    "parse_judge_output": "classroom_rl.judges.verdicts",
}
__all__ = ["Classroom", "Conversation", "parse_judge_output"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_MODULES[name]), name)
