"""Makes a validated configuration of what Hydra composed."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import field, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from classroom_rl.config.compose import unreadable
from classroom_rl.config.fields import LARGEST_NUMBER, IsPath, config_group, group_in, metadata_of, types_of, values_of
from classroom_rl.config.mappings import Layer, plain, replace_mappings, with_defaults
from classroom_rl.config.maths_classroom import fill_in
from classroom_rl.config.upstream_keys import drop_keys_without_effect, rename_keys, rename_values
from classroom_rl.config.values import check_folder_name, check_path
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.environment import module_of
from classroom_rl.system.keys import keys
from classroom_rl.system.shipped import find_shipped

Config = TypeVar("Config")
Scalar = TypeVar("Scalar", int, str)
Check = Callable[[Any], None]

_KINDS = {
    "dataclass_type": "a group of keys",
    "dict_type": "a mapping of names to values",
    "list_type": "a list",
    "string_type": "a text",
}
"""What a value must be, by pydantic's names of errors."""
_UNKNOWN = "unexpected_keyword_argument"


def validate(raw: DictConfig, schema: type[Config], check: Check | None = None, layers: Sequence[Layer] = ()) -> Config:
    """Read a raw configuration as its schema and run the program's checks.

    Args:
        layers: what the configuration was composed of; without layers its mappings are taken as they are.

    Raises:
        ConfigError: naming the key, the rule and the fix.
    """
    try:
        content = plain(raw)
        drop_keys_without_effect(content)
        rename_keys(content)
        rename_values(content)
        schema = _with_environment(schema, content)
        _refuse_values_for_groups(content, schema)
        if layers:
            replace_mappings(content, layers, schema)
        fill_in(content, schema)
        merged = OmegaConf.create(with_defaults(content, schema))
        config = _adapter(schema).validate_python(OmegaConf.to_container(merged, resolve=True, throw_on_missing=True))
    except ValidationError as error:
        raise _config_error(error.errors(include_url=False), schema) from error
    except OmegaConfBaseException as error:
        location = f" key {error.full_key}" if error.full_key else ""
        raise ConfigError(f"Config{location}: {str(error).partition(chr(10))[0]}") from error
    except Exception as error:  # OmegaConf passes on Python's own errors about a value that cannot be converted
        raise unreadable(error) from error
    check_contents(config)
    expand_paths(config)
    if check is not None:
        check(config)
    return config


@cache
def _adapter(schema: type) -> TypeAdapter:
    return TypeAdapter(schema)


def _with_environment(schema: type[Config], content: dict[Any, Any]) -> type[Config]:
    """The schema, its `generation` block replaced by that of the configured environment."""
    groups = types_of(schema)
    if not {"environment", "generation"} <= set(groups) or not isinstance(content.get("environment"), str):
        return schema
    generation = module_of(content["environment"], "config").Generation
    return schema if generation is groups["generation"] else _with_generation(schema, generation)


@cache
def _with_generation(schema: type[Config], generation: type) -> type[Config]:
    """Made once, so that equal configurations are equal."""
    block = {
        "__annotations__": {"generation": generation},
        "generation": field(default_factory=generation),
        "__doc__": schema.__doc__,
        "__module__": schema.__module__,
    }
    return config_group(type(schema.__name__, (schema,), block))


def refuse_lists_for_groups(overrides: Sequence[str], schema: type) -> None:
    """Raise a `ConfigError` for an override that sets a group of keys to a list, which Hydra refuses without a
    reason."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if value.startswith("[") and any(name.startswith(f"{key}.") for name in config_keys(schema)):
            raise ConfigError(f"Config key {key} is {value}, but it is a group of keys.")


def _refuse_values_for_groups(content: dict[Any, Any], schema: type, prefix: str = "") -> None:
    """Before defaults are filled in and interpolations resolved, which need groups where there are groups."""
    for name, kind in types_of(schema).items():
        if is_dataclass(kind) and name in content:
            if not isinstance(content[name], dict):
                raise ConfigError(f"Config key {prefix}{name} is {content[name]!r}, but it is a group of keys.")
            _refuse_values_for_groups(content[name], kind, f"{prefix}{name}.")


def _config_error(errors: Sequence[ErrorDetails], schema: type) -> ConfigError:
    """The first of pydantic's errors in words; a key that does not exist comes before all others."""
    error = next((error for error in errors if error["type"] == _UNKNOWN), errors[0])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == _UNKNOWN:
        return ConfigError(f"There is no config key {key}. {_nearest(error['loc'], schema)}")
    value, details = error["input"], error.get("ctx", {})
    if error["type"] == "value_error":
        return ConfigError(f"{key} is {_shown(value)}; {details['error']}.")
    if error["type"] == "literal_error":
        choices = details["expected"].replace("'", "").replace(" or ", ", ")
        return ConfigError(f"{key} is {_shown(value)}; it must be one of {choices}.")
    return ConfigError(f"{key} is {_shown(value)}; it must be {_KINDS.get(error['type'], error['msg'])}.")


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to convert the longest integers to text
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} and more"
    return repr(value) if isinstance(value, str) and not (value and value.isprintable()) else str(value)


def _nearest(path: Sequence[str | int], schema: type) -> str:
    """A hint: the known key closest to the one at `path`, otherwise the keys of the group that it was looked for in."""
    group, in_list = schema, False
    for part in path[:-1]:
        in_list = in_list or isinstance(part, int)
        if isinstance(part, str):
            group = group_in(types_of(group)[part])
    all_keys = config_keys(schema)
    key = "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    group_names, all_names = set(types_of(group)), {_last(name) for name in all_keys}
    names = [_last(key)] if not in_list and _last(key) in all_names else []  # the right key in another group
    names = names or difflib.get_close_matches(_last(key), group_names, n=1)
    names = names or ([] if in_list else difflib.get_close_matches(_last(key), all_names, n=1))
    close = difflib.get_close_matches(key, [name for name in all_keys if _last(name) in names], n=1, cutoff=0.0)
    return f"Did you mean {close[0]}?" if close else f"There are: {', '.join(types_of(group))}."


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def config_keys(schema: type, prefix: str = "") -> list[str]:
    """All dotted keys of a schema, groups included; `[]` stands for the index in a list of groups."""
    names = []
    for name, kind in types_of(schema).items():
        names.append(prefix + name)
        group = group_in(kind)
        if group is not None:
            names += config_keys(group, f"{prefix}{name}{'[]' if get_origin(kind) is list else ''}.")
    return names


def expand_paths(config: Any) -> None:
    """Expand the `~` of every path, and find shipped files from any folder, in place. Raises a `ConfigError` for a path
    that the file system cannot have."""
    folder = check_path("logging.save_dir", config.logging.save_dir)
    check_folder_name("logging.save_dir", folder)  # first: the folders of models may be in it
    for group, name, key in values_of(config):
        mark = next((mark for mark in metadata_of(types_of(type(group))[name]) if isinstance(mark, IsPath)), None)
        value = getattr(group, name)
        if mark is not None and isinstance(value, str):
            setattr(group, name, find_shipped(check_path(key, value)))
            if mark.is_model and not getattr(group, "is_remote", False):
                check_folder_name(key, value)
        elif mark is not None and isinstance(value, dict):
            paths = {entry: find_shipped(check_path(f"{key}.{entry}", path)) for entry, path in value.items()}
            setattr(group, name, paths)


def check_contents(config: Any) -> None:
    """Check what may stand anywhere in a configuration. Raises a `ConfigError` for a text that UTF-8 cannot encode
    because it holds a lone surrogate, for one that holds a key (configurations are printed and recorded), and for a
    whole number that no key can mean."""
    secrets = keys()
    for group, name, key in values_of(config):
        value = getattr(group, name)
        for number in _scalars(value, int):
            if abs(number) > LARGEST_NUMBER:
                raise ConfigError(f"{key} is {_shown(number)}; it must be at most {LARGEST_NUMBER}.")
        for text in _scalars(value, str):
            for variable, secret in secrets.items():
                if secret in text:
                    raise ConfigError(
                        f"{key} holds what the environment variable {variable} holds. Keys stay in the environment: "
                        "a configuration is printed, and kept in the run folder."
                    )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"{key} holds {ascii(text[:60])}, which is no Unicode text ({error.reason})."
                ) from error


def _scalars(value: Any, kind: type[Scalar]) -> list[Scalar]:
    """The values of a type in a value, and in the lists and mappings that it holds."""
    if isinstance(value, kind):
        return [value]
    entries = [entry for pair in value.items() for entry in pair] if isinstance(value, dict) else value
    return [scalar for entry in entries for scalar in _scalars(entry, kind)] if isinstance(entries, list) else []
