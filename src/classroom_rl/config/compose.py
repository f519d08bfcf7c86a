"""Finds a program's YAML, in the user's folders first and then in the shipped one, and reads it with Hydra.

Files with cycles, with aliases that expand to millions of values, or nested thousands deep make Hydra and PyYAML run
into Python's limits. Files and overrides are checked first, so that such input ends with a message.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from classroom_rl.config.mappings import Layer, layers_of
from classroom_rl.config.values import check_path
from classroom_rl.errors import ConfigError

DEFAULT_CONFIG = "quickstart"
NAME_FLAGS = ("--config-name", "-cn")
FOLDER_FLAGS = ("--config-dir", "-cd")
_MULTIRUN_FLAGS = {"--multirun", "-m"}
_REFUSED_FLAGS = {
    "--config-path": "Use --config-dir for a folder of your own.",
    "-cp": "Use --config-dir for a folder of your own.",
    "--experimental-rerun": "It reads a pickle, which can run code. Start the program with its overrides again.",
}
DEEPEST = 50
MOST_VALUES = 100_000
LARGEST_FILE = 2**18
_OPENING, _CLOSING = "[{(", "]})"
_STRUCTURED = ("[", "{", "'", '"', "$")
"""What begins a list, a mapping, a quoted text or an interpolation: a mistake in it is a mistake, and no text."""
_ORDINARY = re.compile(r"[\w.,/+-]*", re.ASCII)
_FUNCTION_IN_MAPPING = re.compile(r"([{,]\s*\+?[^\W\d][\w.]*):([^\W\d]\w*\s*:)")
"""A name such as package.module:function in a mapping; Hydra would end the name at its first colon."""
_HOME = re.compile(r"~[^\s,'\"\\(){}\[\]$]*")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line of a program.

    Attributes:
        name: the name of the configuration, as given.
        folders: the folders to search for it, in order; the shipped one is the last.
        rest: overrides and Hydra's other flags.
    """

    name: str
    folders: tuple[Path, ...]
    rest: tuple[str, ...]

    @property
    def file(self) -> Path | None:
        """The first file of this name in the folders; None if no folder has it."""
        candidates = (folder / f"{self.name.removesuffix('.yaml')}.yaml" for folder in self.folders)
        return next((path for path in candidates if os.path.isfile(path)), None)


def parse_command_line(arguments: Sequence[str], shipped: Path) -> CommandLine:
    """Separate the configuration's name and folders from overrides and other flags. Raises a `ConfigError` for a flag
    without a value, a refused flag, a missing folder, a malformed override, and under `python -O`."""
    if sys.flags.optimize:
        raise ConfigError(
            f"Python runs optimized (-{'O' * sys.flags.optimize}, or PYTHONOPTIMIZE={sys.flags.optimize}), which "
            "leaves out assert statements. Hydra, which reads overrides, and other libraries do work in theirs. Start "
            "the program without -O, and with PYTHONOPTIMIZE unset."
        )
    name, folders, rest = DEFAULT_CONFIG, [], []
    sweeps = not _MULTIRUN_FLAGS.isdisjoint(arguments)
    remaining = iter(arguments)
    for argument in remaining:
        flag, _, value = argument.partition("=")
        if flag in _REFUSED_FLAGS:
            raise ConfigError(f"{flag} cannot be given here. {_REFUSED_FLAGS[flag]}")
        if flag not in (*NAME_FLAGS, *FOLDER_FLAGS):
            rest.append(_override(argument, sweeps))
            continue
        value = value or next(remaining, "")
        if not value:
            raise ConfigError(f"{flag} needs a value.")
        value = check_path(flag, value)
        if flag in NAME_FLAGS:
            name = value
        elif not Path(value).is_dir():
            raise ConfigError(f"There is no folder {value} ({flag}).")
        else:
            folders.append(Path(value).resolve())
    return CommandLine(name, (*folders, shipped), tuple(rest))


def _override(argument: str, sweeps: bool) -> str:
    """`a.b=1` as `++a.b=1`: the schema, not the YAML, decides which keys exist. A value that Hydra cannot read as it
    stands, such as runs/lr=1e-4, runs/Übung or ~/runs, is quoted; in a multirun (`sweeps`), each value of a list.
    Raises a `ConfigError` for an override without a key, and for one that is nested too deeply."""
    key, equals, value = argument.partition("=")
    if equals and not key.strip("+~ "):
        raise ConfigError(f"{_short(argument)} is no override: there is no key before the =. Write key=value.")
    if _depth(argument) > DEEPEST:
        raise ConfigError(f"The override {_short(argument)} is nested more than {DEEPEST} deep.")
    plain = equals and key and key[0].isalpha() and not key.startswith("hydra") and "/" not in key and "@" not in key
    if not plain:
        return argument
    if value.startswith("{"):
        argument = _FUNCTION_IN_MAPPING.sub(r"\1\\:\2", argument)
    if _HOME.fullmatch(value) or not (_ORDINARY.fullmatch(value) or value.startswith(_STRUCTURED) or _reads(argument)):
        values = value.split(",") if sweeps else [value]
        argument = f"{key}={','.join(quoted(item) for item in values)}"
    return f"++{argument}"


def quoted(text: str) -> str:
    """A text as the value of an override, in quotes. Backslashes escape only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), text) + "'"


def _reads(argument: str) -> bool:
    """Whether Hydra can read an override as it stands."""
    try:
        OverridesParser.create().parse_override(argument)
    except (HydraException, ValueError):  # ValueError: a number with too many digits
        return False
    return True


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


@contextmanager
def searching(folders: Sequence[Path]) -> Iterator[None]:
    """Inside, Hydra searches these folders for YAMLs, in order; the first one is its config path."""
    previous = _Folders.further
    _Folders.further = tuple(folders[1:])
    try:
        yield
    finally:
        _Folders.further = previous


def compose(command: CommandLine) -> tuple[DictConfig, list[Layer]]:
    """The configuration that Hydra composes from YAMLs and overrides, and these layers of it. Raises a `ConfigError` if
    the file or an override cannot be read."""
    try:
        with (
            searching(command.folders),
            hydra.initialize_config_dir(version_base=None, config_dir=str(command.folders[0])),
        ):
            raw = hydra.compose(config_name=command.name, overrides=list(command.rest))
            return raw, layers_of(command.name, command.rest)
    except Exception as error:  # the libraries raise many types; in each case the input is wrong
        raise unreadable(error) from error


def unreadable(error: Exception) -> ConfigError:
    """An error of Hydra, OmegaConf or PyYAML as a `ConfigError` with a message for the user."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, UnicodeDecodeError):
        preceding = error.object[max(0, error.start - 30) : error.start].decode(errors="replace")
        return ConfigError(f"A configuration file is not UTF-8: {error.reason} after {preceding!r}. Save it as UTF-8.")
    if isinstance(error, RecursionError):
        return ConfigError(
            "The configuration cannot be read: its defaults or interpolations lead back to where they began, or it is "
            "nested too deeply."
        )
    message = str(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"The override {error.override.removeprefix('++')} cannot be read: {message} "
            "A value with special characters is put in quotes: \"key='value'\"."
        )
    cause = str(error.__cause__ or "").partition("\n")[0]
    if cause and cause not in message:
        message = f"{message}: {cause}" if message else cause
    if not isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        message = f"The configuration cannot be read: {message or repr(error)}"
    return ConfigError(message.replace("override ++", "override ") or repr(error))


class _CheckedFiles(FileConfigSource):
    """A folder of YAML files that are checked before their aliases are expanded."""

    @staticmethod
    def scheme() -> str:
        return "checked"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        check_yaml(path)
        try:
            result = super().load_config(config_path)
        except (UnicodeDecodeError, yaml.YAMLError, RecursionError):
            raise
        except (OSError, OmegaConfBaseException) as error:
            raise ConfigError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}.") from error
        except Exception as error:  # any type: from the constructor that a YAML tag calls
            raise ConfigError(f"{path} cannot be read: a value does not fit its tag (!!…): {error}.") from error
        if isinstance(result.config, DictConfig) and _name_of(config_path) in _defaults(result.config):
            raise ConfigError(
                f"{path} names itself in its defaults: a file of yours comes before the shipped one of the same name. "
                "Give yours another name."
            )
        return result


class _Folders(SearchPathPlugin):
    """Appends the further folders to Hydra's search path, and has the files of all folders checked."""

    further: ClassVar[tuple[Path, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.provider == "main":
                element.path = f"{_CheckedFiles.scheme()}://{element.path}"
        for folder in self.further:
            search_path.append("further", f"{_CheckedFiles.scheme()}://{folder}")


Plugins.instance().register(_CheckedFiles)
Plugins.instance().register(_Folders)


def _name_of(config_path: str) -> str:
    return config_path.removesuffix(".yaml")


def _defaults(config: DictConfig) -> set[str]:
    """The YAMLs in a configuration's defaults list."""
    entries = config._get_node("defaults") if "defaults" in config else None
    if not isinstance(entries, ListConfig):
        return set()
    return {_name_of(entry) for entry in entries._iter_ex(resolve=False) if isinstance(entry, str)}


def check_yaml(path: Path) -> None:
    """Refuse a YAML that is too large, nested too deeply, or whose aliases expand to too many values. The parser
    reports other mistakes later. Raises a `ConfigError` naming file and line."""
    if not path.is_file():
        return
    if path.stat().st_size > LARGEST_FILE:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes; a configuration has at most {LARGEST_FILE}.")
    nodes = _OpenNodes()
    try:
        for event in yaml.parse(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
            nodes.follow(event, f"{path}, line {event.start_mark.line + 1}")
    except (yaml.YAMLError, UnicodeDecodeError):
        return


@dataclass
class _Node:
    """A YAML node with its aliases expanded: the number of values in it, and of levels below it."""

    anchor: str | None = None
    size: int = 1
    levels: int = 0


class _OpenNodes:
    """The nodes that are open while a YAML is read event by event."""

    def __init__(self) -> None:
        self._open = [_Node()]
        self._anchored: dict[str, _Node] = {}

    def follow(self, event: yaml.Event, where: str) -> None:
        """Take in the next event. Raises a `ConfigError` if the configuration is nested too deeply, has too many
        values, or contains itself."""
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append(_Node(event.anchor))
            self._refuse_deep(0, where)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._add(self._open.pop(), where)
        elif isinstance(event, yaml.ScalarEvent):
            self._add(_Node(event.anchor), where)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (node.anchor for node in self._open):
                raise ConfigError(f"{where}: *{event.anchor} stands inside of what it stands for, which has no end.")
            target = self._anchored.get(event.anchor, _Node())
            self._add(_Node(None, target.size, target.levels), where)

    def _add(self, node: _Node, where: str) -> None:
        if node.anchor is not None:
            self._anchored[node.anchor] = node
        self._refuse_deep(node.levels, where)
        parent = self._open[-1]
        parent.size += node.size
        parent.levels = max(parent.levels, node.levels + 1)
        if parent.size > MOST_VALUES:
            raise ConfigError(
                f"{where}: with its aliases unfolded the configuration has more than {MOST_VALUES} values. Write out "
                "what is meant."
            )

    def _refuse_deep(self, levels: int, where: str) -> None:
        if len(self._open) + levels > DEEPEST:
            raise ConfigError(f"{where}: the configuration is nested more than {DEEPEST} deep there.")
