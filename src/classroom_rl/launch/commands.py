"""Splits the launcher's command line into arguments for accelerate and for Hydra, and builds the commands of server and
trainer."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from classroom_rl.errors import ConfigError
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.models.precision import PRECISIONS, check_deepspeed_file, refuse_other_precision
from classroom_rl.results.run_folder import METRICS_NAME
from classroom_rl.system.shipped import ROOT, find_shipped

_HYDRA_FLAGS = ("--config-name", "-cn", "--config-dir", "-cd")
_REFUSED_FLAGS = {
    "--multirun": "One launch is one run; start several one after the other.",
    "-m": "One launch is one run of train_rl.py.",
    "--module": "The launcher runs train_rl.py.",
    "--no_python": "The launcher runs train_rl.py with Python.",
    "--config-path": "Use --config-dir for a folder of your own.",
    "-cp": "Use --config-dir for a folder of your own.",
}
_FLAGS_WITH_EQUALS_IN_VALUE = ("--rdzv_conf", "--env")
OVERRIDE = re.compile(r"~[\w.@/]+$|(~|\+{0,2})[A-Za-z_][\w.@/:-]*=")


_SERVER_GPUS, _TRAINER_GPUS = _GPU_FLAGS = ("--server-gpus", "--trainer-gpus")


@dataclass
class Arguments:
    """A split command line: flags for accelerate, flags and overrides for Hydra, and the launcher's own flags."""

    accelerate: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    gpus: dict[str, str] = field(default_factory=dict)

    def accelerate_value(self, name: str) -> str | None:
        """The value of an accelerate flag, such as `--machine_rank`; None if the flag is not given."""
        for position, argument in enumerate(self.accelerate):
            flag, equals, value = argument.partition("=")
            if _same_flag(flag, name):
                return value if equals else next(iter(self.accelerate[position + 1 :]), None)
        return None


def split_arguments(arguments: Sequence[str]) -> Arguments:
    """Split the arguments into those for accelerate and those for Hydra.

    A flag takes the next argument as its value, unless that is a flag or an override. Exceptions are the few accelerate
    flags whose values look like overrides (`_FLAGS_WITH_EQUALS_IN_VALUE`).

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
                    example = "quickstart" if flag in ("--config-name", "-cn") else "my_configs"
                    raise ConfigError(f"{flag} needs a value, for example {flag} {example}.")
                split.hydra.append(remaining.pop(0))
        elif flag in _GPU_FLAGS:
            split.gpus[flag] = argument.partition("=")[2] if equals else (remaining.pop(0) if remaining else "")
        elif OVERRIDE.match(argument):
            split.hydra.append(argument)
        elif flag.startswith("-"):
            split.accelerate.append(argument)
            if not equals and remaining and _is_value(remaining[0], flag):
                split.accelerate.append(remaining.pop(0))
        else:
            raise ConfigError(f"{argument} is neither a flag nor an override like train.learning_rate=1e-6.")
    return split


@dataclass(frozen=True)
class GpuSplit:
    """The GPUs that server and trainer have for themselves, counted from 0 among those that the launcher sees."""

    server: tuple[int, ...]
    trainer: tuple[int, ...]

    def environment(self, gpus: Sequence[int]) -> dict[str, str]:
        """The variable that leaves a program these GPUs."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        ids = visible.split(",") if visible else [str(gpu) for gpu in range(max(gpus) + 1)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids[gpu] for gpu in gpus)}


def gpu_split(named: Mapping[str, str], count: int, apart: bool) -> GpuSplit | None:
    """How the GPUs are divided between server and trainer; None if both see all of them.

    Args:
        named: the values of --server-gpus and --trainer-gpus, such as "0-3". The other program gets the rest.
        count: the number of GPUs; 0 if it is not known.
        apart: whether the programs cannot use the same GPUs: they work at the same time (`train.max_staleness`), or
            weights go from GPU to GPU. Then the first half is the server's if nothing is named.

    Raises:
        ConfigError: if a value is no list of GPUs, or both programs would share one, or one would have none.
    """
    if not named and not (apart and count > 1):
        return None
    parts = {flag: _gpu_list(flag, value) for flag, value in named.items()} or {_SERVER_GPUS: range(count // 2)}
    all_gpus = range(count or max(max(part, default=0) for part in parts.values()) + 1)
    for flag, other_flag in ((_SERVER_GPUS, _TRAINER_GPUS), (_TRAINER_GPUS, _SERVER_GPUS)):
        parts.setdefault(flag, [gpu for gpu in all_gpus if gpu not in parts.get(other_flag, ())])
    server, trainer = tuple(parts[_SERVER_GPUS]), tuple(parts[_TRAINER_GPUS])
    missing = sorted({*server, *trainer} - set(all_gpus))
    if not server or not trainer or set(server) & set(trainer) or missing:
        raise ConfigError(
            f"{_SERVER_GPUS} {_ranges(server)} and {_TRAINER_GPUS} {_ranges(trainer)}: each needs GPUs of its own"
            f"{f', and this machine has {count}' if count else ''}, for example {_SERVER_GPUS} 0-3 {_TRAINER_GPUS} "
            "4-7. Without these flags both use all GPUs in turns."
        )
    return GpuSplit(server, trainer)


def _gpu_list(flag: str, value: str) -> list[int]:
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
        raise ConfigError(f"{flag} {value or 'without a value'}: it is a list of GPUs, such as 0-3 or 0,2.")
    bounds = [part.partition("-") for part in value.split(",")]
    return [gpu for first, _, last in bounds for gpu in range(int(first), int(last or first) + 1)]


def _ranges(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus)) or "none"


def _is_value(argument: str, flag: str) -> bool:
    if any(_same_flag(flag, name) for name in _FLAGS_WITH_EQUALS_IN_VALUE):
        return True
    return not argument.startswith("-") and not OVERRIDE.match(argument)


def _same_flag(flag: str, name: str) -> bool:
    return flag.replace("-", "_") == name.replace("-", "_")  # accelerate accepts both


ACCELERATE_CONFIGS = ("accelerate", "deepspeed", "fsdp")
"""The folders in config/ with accelerate's config files."""
FLAGS_WITH_DEEPSPEED = ("--num_processes", "--num_machines", "--zero_stage", "--deepspeed_config_file")
_FLAG_CHECK = (
    "import sys; from accelerate.commands.launch import launch_command_parser as p; p().parse_args(sys.argv[1:])"
)


def server_command(hydra_arguments: Sequence[str]) -> list[str]:
    """The command that starts the server."""
    return [sys.executable, "-m", "classroom_rl.launch.server", *hydra_arguments]


def trainer_command(accelerate_flags: Sequence[str], hydra_arguments: Sequence[str]) -> list[str]:
    """The command that starts the trainer under accelerate."""
    launch = [sys.executable, "-m", "classroom_rl.launch.accelerate_launch"]
    return [*launch, *accelerate_flags, "--module", "classroom_rl.launch.train", *hydra_arguments]


def default_accelerate_config(flags: Sequence[str]) -> str:
    """The config file for accelerate if its flags name none. On a CPU, DeepSpeed in a single process only costs time.
    So it is used there only if the flags are about DeepSpeed or about several processes."""
    if gpu_is_there():
        return find_shipped("config/deepspeed/1GPU.yaml")
    arguments = Arguments(accelerate=list(flags))
    with_deepspeed = any(arguments.accelerate_value(flag) is not None for flag in FLAGS_WITH_DEEPSPEED)
    return find_shipped(f"config/{'deepspeed' if with_deepspeed else 'accelerate'}/1CPU.yaml")


def with_accelerate_config(flags: Sequence[str]) -> list[str]:
    """Accelerate's flags with a config file: the given one, or the default for this machine. Raises a `ConfigError` if
    the given file is missing or does not parse."""
    config_file = Arguments(accelerate=list(flags)).accelerate_value("--config_file")
    if config_file is None:
        return ["--config_file", default_accelerate_config(flags), *flags]
    if not Path(config_file).is_file():
        files = (path for kind in ACCELERATE_CONFIGS for path in (ROOT / "config" / kind).glob("*.yaml"))
        shipped = ", ".join(sorted(str(path.relative_to(ROOT)) for path in files))
        raise ConfigError(f"--config_file {config_file}: there is no such file. There are: {shipped}.")
    try:
        yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config_file {config_file} is not YAML: {error}") from error
    return list(flags)


def with_precision(flags: Sequence[str], dtype: str) -> list[str]:
    """Accelerate's flags with the `--mixed_precision` for this `train.dtype`. `flags` must name a config file. Raises a
    `ConfigError` if a flag, the config file or a DeepSpeed file names another precision."""
    arguments = Arguments(accelerate=list(flags))
    flag, file = arguments.accelerate_value("--mixed_precision"), arguments.accelerate_value("--config_file")
    settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ConfigError(f"--config_file {file} holds no settings of accelerate's: it must be a mapping of keys.")
    deepspeed_file = arguments.accelerate_value("--deepspeed_config_file")
    deepspeed_file = deepspeed_file or (settings.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if deepspeed_file is not None:
        check_deepspeed_file(dtype, Path(deepspeed_file))
    if flag is not None:
        refuse_other_precision(dtype, flag, "accelerate's flags have")
        return list(flags)
    precision = settings.get("mixed_precision")
    if precision is not None:
        # YAML's bare `no` is false.
        refuse_other_precision(dtype, "no" if precision is False else str(precision), f"{file} has")
    return [*flags, "--mixed_precision", PRECISIONS[dtype]]


def check_accelerate_flags(flags: Sequence[str]) -> None:
    """Let accelerate parse its flags before the server starts to load models. This runs in a separate process, because
    accelerate's parser ends the process on errors. Raises a `ConfigError` with accelerate's error message."""
    if len(flags) == 2 and flags[0] == "--config_file":
        return
    command = [sys.executable, "-c", _FLAG_CHECK, *flags, "train_rl.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        message = result.stderr.strip().splitlines()[-1:] or ["it ended without a message"]
        raise ConfigError(f"accelerate does not take its flags ({' '.join(flags)}): {message[0]}")


def logged_steps(folder: Path) -> Callable[[], int]:
    """A function that returns the number of steps that a run has logged so far."""
    metrics = folder / METRICS_NAME
    return lambda: metrics.read_bytes().count(b"\n") if metrics.exists() else 0
