"""The tools that a configuration can name."""

from collections.abc import Sequence

from classroom_rl.rollout.tools.calculator import calculator
from classroom_rl.rollout.tools.tool import Toolbox, ToolLimits

BUILT_IN_TOOLS = {each.name: each for each in (calculator,)}


def built_in_toolbox(names: Sequence[str], limits: ToolLimits) -> Toolbox:
    """The tools of these names; `BUILT_IN_TOOLS` has them all."""
    return Toolbox([BUILT_IN_TOOLS[name] for name in names], limits)
