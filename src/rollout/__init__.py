"""Rollouts of language models as a library, and what every environment is built on.

The names in `__all__` can be imported from here; each is loaded on first use, so that none of them needs what only
another one needs. docs/rollouts.md is the guide.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Rollouts": "rollouts",
    "RolloutSet": "rollout_set",
    "Rollout": "step",
    "Step": "step",
    "HfEngine": "hf_engine",
    "ApiEngine": "api_engine",
    "Tool": "tools",
    "ToolLimits": "tools",
    "tool": "tools",
    "calculator": "calculator_tool",
}
__all__ = [  # noqa: F822
    *("ApiEngine", "HfEngine", "Rollout", "RolloutSet", "Rollouts", "Step"),
    *("Tool", "ToolLimits", "calculator", "tool"),
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
