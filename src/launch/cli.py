"""Server and trainer in one command.

    ./start_rl_training.sh                                           the quickstart, from nothing to its report
    ./start_rl_training.sh seed=2 logging.save_dir=runs/second       the quickstart with overrides
    ./start_rl_training.sh --config-name quickstart train.mu=2       server and trainer, on this machine's GPU or CPU
    ./start_rl_training.sh --config_file config/deepspeed/zero3_4GPU.yaml --config-dir my_configs --config-name mine \\
        --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.learning_rate=1e-6

--config-name and --config-dir are Hydra's: they choose the YAML that configures both programs (config/train_rl/…).
All other flags are accelerate's; without --config_file it gets config/deepspeed/1GPU.yaml or 1CPU.yaml. Overrides
key=value reach both programs. On several machines, run this on each: every machine has its own server, and
generation.server_urls names them in the order of --machine_rank.
dry_run=true shows the configuration, how long the training will be, what it needs of a GPU's memory, and the two
commands, tries the prompts, and starts nothing.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from config.checks import check_train_rl
from config.load import ROOT, USER_ERRORS, command_line, load, read_keys, to_yaml
from config.train_rl_model import TrainRLConfig
from src.errors import ConfigError
from src.launch.server_process import KeptServer, ServerProcess
from src.memory.sources import gpu_is_there
from src.models.precision import PRECISIONS, check_deepspeed_file, refuse_other_precision
from src.results.run_folder import METRICS_NAME
from src.system.processes import Child, Interrupted, Signals
from src.training.resume import check_resume

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
_OVERRIDE = re.compile(r"~[\w.@/]+$|(~|\+{0,2})[A-Za-z_][\w.@/:-]*=")
_FLAG_CHECK = (
    "import sys; from accelerate.commands.launch import launch_command_parser as p; p().parse_args(sys.argv[1:])"
)


@dataclass
class Arguments:
    """A command line, taken apart: accelerate's flags; Hydra's flags and overrides."""

    accelerate: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)

    def accelerate_value(self, name: str) -> str | None:
        """The value of one of accelerate's flags, such as `--machine_rank`; None if it is not given."""
        for position, argument in enumerate(self.accelerate):
            flag, equals, value = argument.partition("=")
            if _same_flag(flag, name):
                return value if equals else next(iter(self.accelerate[position + 1 :]), None)
        return None


def split_arguments(arguments: Sequence[str]) -> Arguments:
    """Tell accelerate's flags from what is Hydra's.

    A flag takes the argument behind it unless that is a flag or an override. The few values of accelerate that look
    like overrides belong to known flags.

    Raises:
        ConfigError: for a flag without its value, one that the launcher has no use for, and an argument that is
            neither flag nor override.
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
        elif _OVERRIDE.match(argument):
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
    return not argument.startswith("-") and not _OVERRIDE.match(argument)


def _same_flag(flag: str, name: str) -> bool:
    return flag.replace("-", "_") == name.replace("-", "_")  # accelerate takes both


def _example(flag: str) -> str:
    return "quickstart" if flag in ("--config-name", "-cn") else "my_configs"


def server_command(hydra_arguments: Sequence[str]) -> list[str]:
    """The server, as started from the project's folder."""
    return [sys.executable, "vllm_server.py", *hydra_arguments]


def trainer_command(accelerate_flags: Sequence[str], hydra_arguments: Sequence[str]) -> list[str]:
    """The trainer under accelerate, as started from the project's folder."""
    launch = [sys.executable, "-m", "src.launch.accelerate_launch"]
    return [*launch, *accelerate_flags, "train_rl.py", *hydra_arguments]


def with_accelerate_config(flags: Sequence[str]) -> list[str]:
    """Accelerate's flags with a config file: the given one, else one for this machine.

    Raises:
        ConfigError: if the file is missing or does not parse.
    """
    given = Arguments(accelerate=list(flags)).accelerate_value("--config_file")
    if given is None:
        return ["--config_file", f"config/deepspeed/{'1GPU' if gpu_is_there() else '1CPU'}.yaml", *flags]
    if not Path(given).is_file():
        shipped = ", ".join(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "config/deepspeed").glob("*.yaml")))
        raise ConfigError(f"--config_file {given}: there is no such file. There are: {shipped}.")
    try:
        yaml.safe_load(Path(given).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config_file {given} is not YAML: {error}") from error
    return list(flags)


def with_precision(flags: Sequence[str], dtype: str) -> list[str]:
    """Accelerate's flags, its config file among them, with the precision that `train.dtype` stands for.

    Raises:
        ConfigError: if a flag or the file names another one.
    """
    given = Arguments(accelerate=list(flags))
    flag, file = given.accelerate_value("--mixed_precision"), given.accelerate_value("--config_file")
    settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ConfigError(f"--config_file {file} holds no settings of accelerate's: it must be a mapping of keys.")
    deepspeed_file = given.accelerate_value("--deepspeed_config_file")
    deepspeed_file = deepspeed_file or (settings.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if deepspeed_file is not None:
        check_deepspeed_file(dtype, Path(deepspeed_file))
    if flag is not None:
        refuse_other_precision(dtype, flag, "accelerate's flags have")
        return list(flags)
    refuse_other_precision(dtype, _text(settings.get("mixed_precision")), f"{file} has")
    return [*flags, "--mixed_precision", PRECISIONS[dtype]]


def _text(value: object) -> str | None:
    return "no" if value is False else value if value is None else str(value)  # YAML's bare `no` is false


def check_accelerate_flags(flags: Sequence[str]) -> None:
    """Have accelerate look at its flags before the server starts to load models.

    Raises:
        ConfigError: with accelerate's message.
    """
    if len(flags) == 2 and flags[0] == "--config_file":
        return
    command = [sys.executable, "-c", _FLAG_CHECK, *flags, "train_rl.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        message = result.stderr.strip().splitlines()[-1:] or ["it ended without a message"]
        raise ConfigError(f"accelerate does not take its flags ({' '.join(flags)}): {message[0]}")


def launch(config: TrainRLConfig, server: Sequence[str], trainer: Sequence[str], rank: str, signals: Signals) -> int:
    """Run the server, and the trainer once the server is ready; end the server when the trainer has ended.

    Args:
        server, trainer: commands.
        rank: of this machine, "0" if there is only one.

    Returns:
        The trainer's exit status.

    Raises:
        ConfigError: if the server's port is taken.
        EngineFailure: if the server ends while it loads, or again and again before the trainer is done.
        DeadlineExceeded: if the server does not get ready in time.
        Interrupted: if a signal came.
    """
    folder = Path(config.logging.save_dir)
    suffix = "" if rank == "0" else f".{rank}"
    log = folder / f"server{suffix}.log"
    with KeptServer(lambda: ServerProcess(server, config.generation, signals, log), steps_made(folder)) as kept:
        kept.process.wait_until_ready()
        print(f"the server is ready at {kept.process.url}; the trainer starts", flush=True)
        with Child("the trainer", trainer, signals, folder / f"trainer{suffix}.log", echo=True) as running_trainer:
            status = running_trainer.wait(check=kept.keep)
    if status:
        print(f"error: the trainer ended with status {status}. Its log is {running_trainer.log}.", file=sys.stderr)
    return status


def steps_made(folder: Path) -> Callable[[], int]:
    """Counts the steps that a run has logged."""
    metrics = folder / METRICS_NAME
    return lambda: metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    if all(_OVERRIDE.match(argument) for argument in arguments):
        from src.launch.quickstart import main as quickstart

        return quickstart(arguments)
    read_keys()
    try:
        with Signals() as signals:
            return _launch_from(arguments, signals)
    except Interrupted as interruption:
        print(f"\n{interruption}; everything that was started has ended", file=sys.stderr)
        return interruption.status
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _launch_from(arguments: Sequence[str], signals: Signals) -> int:
    split = split_arguments(arguments)
    file = command_line("train_rl", split.hydra).file
    config = load(TrainRLConfig, "train_rl", split.hydra, check_train_rl)
    flags = with_accelerate_config(split.accelerate)
    check_accelerate_flags(flags)
    flags = with_precision(flags, config.train.dtype)
    hydra_arguments = [each for each in split.hydra if not each.lstrip("+").startswith("dry_run=")]
    rank = split.accelerate_value("--machine_rank")
    own = [f"generation.server_index={rank}"] if rank is not None and config.generation.server_urls is not None else []
    server = server_command([*hydra_arguments, *own])
    trainer = trainer_command(flags, hydra_arguments)
    if config.dry_run:
        from src.classroom.prompt_check import check_configured_prompts
        from src.memory.report import show_launch_budget
        from src.training.run_length import report_length_before_training

        print(f"# configuration: {file}\n{to_yaml(config)}")
        check_configured_prompts(config.generation, config.judge_model)
        report_length_before_training(config).show()
        show_launch_budget(config, flags)
        print(f"\n{shlex.join(server)}\n{shlex.join(trainer)}")
        return 0
    print(f"configuration: {file}", flush=True)
    check_resume(Path(config.logging.save_dir), config)  # before any model is loaded; the trainer tells what changes
    _tell_of_checkpoints(Path(config.logging.save_dir))
    from src.launch.quickstart import ensure_models

    ensure_models(config, signals)
    return launch(config, server, trainer, rank or "0", signals)


def _tell_of_checkpoints(folder: Path) -> None:
    steps = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoints/checkpoint-*")]
    if steps:
        print(
            f"{folder} holds a checkpoint of step {max(steps)}: the training goes on from there. For a new run give "
            "another folder, logging.save_dir=…",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
