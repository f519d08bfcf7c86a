"""Trains language models as tutors, and plays, records and scores rollouts of language models.

    import classroom_rl as cr

The names in `__all__` are the public ones. Each is loaded on first use, so importing the package loads neither torch
nor vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from classroom_rl.engines.api_engine import ApiEngine
    from classroom_rl.engines.hf_engine import HfEngine
    from classroom_rl.errors import ClassroomError, ConfigError, DataError, RolloutsStopped, StorageError
    from classroom_rl.rollout.environment import Environment
    from classroom_rl.rollout.rollout_set import RolloutSet
    from classroom_rl.rollout.rollouts import Rollouts
    from classroom_rl.rollout.step import Rollout, Step
    from classroom_rl.rollout.tools.calculator import calculator
    from classroom_rl.rollout.tools.tool import Tool, ToolLimits, tool

__version__ = "0.2.0.dev0"
__all__ = [
    "ApiEngine",
    "ClassroomError",
    "ConfigError",
    "DataError",
    "Environment",
    "HfEngine",
    "Rollout",
    "RolloutSet",
    "Rollouts",
    "RolloutsStopped",
    "Step",
    "StorageError",
    "Tool",
    "ToolLimits",
    "calculator",
    "tool",
]
_MODULES = {
    "ApiEngine": "engines.api_engine",
    "ClassroomError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "Environment": "rollout.environment",
    "HfEngine": "engines.hf_engine",
    "Rollout": "rollout.step",
    "RolloutSet": "rollout.rollout_set",
    "Rollouts": "rollout.rollouts",
    "RolloutsStopped": "errors",
    "Step": "rollout.step",
    "StorageError": "errors",
    "Tool": "rollout.tools.tool",
    "ToolLimits": "rollout.tools.tool",
    "calculator": "rollout.tools.calculator",
    "tool": "rollout.tools.tool",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
