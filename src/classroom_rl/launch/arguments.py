"""Splits the launcher's command line into accelerate's arguments and Hydra's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from classroom_rl.errors import ConfigError

_HYDRA_FLAGS = ("--config-name", "-cn", "--config-dir", "-cd")


_REFUSED_FLAGS = {
    "--multirun": "One launch is one run; start several one after the other.",
    "-m": "One launch is one run of train_rl.py.",
    "--module": "The launcher runs train_rl.py.",
    "--no_python": "The launcher runs train_rl.py with Python.",
    "--config-path": "Use --config-dir for a folder of your own.",
    "-cp": "Use --config-dir for a folder of your own.",
}


_VALUES_HOLD_EQUALS = ("--rdzv_conf", "--env")


OVERRIDE = re.compile(r"~[\w.@/]+$|(~|\+{0,2})[A-Za-z_][\w.@/:-]*=")


@dataclass
class Arguments:
    """A split command line: accelerate's flags, and Hydra's flags and overrides."""

    accelerate: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)

    def accelerate_value(self, name: str) -> str | None:
        """The value of one of accelerate's flags, such as `--machine_rank`; None if the flag is not given."""
        for position, argument in enumerate(self.accelerate):
            flag, equals, value = argument.partition("=")
            if _same_flag(flag, name):
                return value if equals else next(iter(self.accelerate[position + 1 :]), None)
        return None


def split_arguments(arguments: Sequence[str]) -> Arguments:
    """Split the arguments into accelerate's and Hydra's.

    A flag takes the next argument as its value unless that is a flag or an override. The few flags of accelerate whose
    values look like overrides are known (`_VALUES_HOLD_EQUALS`).

    Raises:
        ConfigError: for a Hydra flag without its value, a flag that the launcher does not support, and an argument
            that is neither a flag nor an override.
    """
    split = Arguments()
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        flag, equals, _ = argument.partition("=")
        if flag in _REFUSED_FLAGS:
            raise ConfigError(f"{flag} cannot be given here. {_REFUSED_FLAGS[flag]}")
        if flag in _HYDRA_FLAGS:
            split.hydra.append(argument)
            if not equals:
                if not remaining or remaining[0].startswith("-"):
                    raise ConfigError(f"{flag} needs a value, for example {flag} {_example(flag)}.")
                split.hydra.append(remaining.pop(0))
        elif OVERRIDE.match(argument):
            split.hydra.append(argument)
        elif flag.startswith("-"):
            split.accelerate.append(argument)
            if not equals and remaining and _is_value(remaining[0], flag):
                split.accelerate.append(remaining.pop(0))
        else:
            raise ConfigError(f"{argument} is neither a flag nor an override like train.learning_rate=1e-6.")
    return split


def _is_value(argument: str, flag: str) -> bool:
    if any(_same_flag(flag, each) for each in _VALUES_HOLD_EQUALS):
        return True
    return not argument.startswith("-") and not OVERRIDE.match(argument)


def _same_flag(flag: str, name: str) -> bool:
    return flag.replace("-", "_") == name.replace("-", "_")  # accelerate accepts both


def _example(flag: str) -> str:
    return "quickstart" if flag in ("--config-name", "-cn") else "my_configs"
