"""Mappings of names, such as judge rules, personas and reward weights, in the layers of a configuration: the files that
a file builds on, the file itself, and overrides. A mapping that a layer writes out replaces the one below it.

Hydra merges mappings name by name: one judge rule over two others would be three, and three calls of the judge. To add
to the names below, begin each with a plus, `{+name: value}`, or set one on the command line,
`group.mapping.name=value`; `~group.mapping.name` takes one away. A field with `Merges` is merged.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from classroom_rl.config.fields import Merges, group_in, metadata_of, types_of
from classroom_rl.errors import ConfigError

_PLUS = "+"
_ABSENT = object()
_MISSING = "???"


@dataclass
class Layer:
    """What a file or an override sets. Of an override also its key, and whether it removes that key."""

    content: dict[Any, Any]
    override: str = ""
    is_removal: bool = False


def plain(config: DictConfig) -> dict[Any, Any]:
    """A configuration as dictionaries and lists, in which interpolations are still texts. A key whose value is `???`,
    Hydra's mark of what another file has to set, is left out."""
    return _without_missing(OmegaConf.to_container(config, resolve=False))


def _without_missing(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _without_missing(value) for name, value in content.items() if value != _MISSING}
    return [_without_missing(value) for value in content] if isinstance(content, list) else content


def layers_of(name: str, overrides: Sequence[str]) -> list[Layer]:
    """The files that Hydra, which must be initialised, merges for a configuration, in order, then the overrides."""
    loader = GlobalHydra.instance().config_loader()
    files = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    users = [file for file in files if file.config_path and not file.config_path.startswith("hydra/")]
    layers = [Layer(plain(loader._load_single_config(file, loader.repository).config)) for file in users]
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, config = override.key_or_group, OmegaConf.create()
        if "/" in key or override.package is not None:  # of a group of files
            continue
        if not override.is_delete():
            OmegaConf.update(config, key, override.value(), force_add=True)
        layers.append(Layer(plain(config), key, override.is_delete()))
    return layers


def replace_mappings(raw: dict[Any, Any], layers: Sequence[Layer], schema: type) -> None:
    """Set every mapping of a composed configuration to what its layers say. Where none of them writes it out, its names
    keep their plus: they add to the schema's default. Raises a `ConfigError` if a layer mixes names with and without a
    plus."""
    for key in mapping_keys(schema):
        if not isinstance(value_of(raw, key), dict):
            continue
        entries, adds = _entries(key, layers)
        if entries is not None:
            group, _, last = key.rpartition(".")
            parent = value_of(raw, group) if group else raw
            parent[last] = {f"{_PLUS}{name}": value for name, value in entries.items()} if adds else entries


def _entries(key: str, layers: Sequence[Layer]) -> tuple[dict[Any, Any] | None, bool]:
    """What the layers put into a mapping, and whether it is added to the schema's default. None for a mapping that
    stands for another one (`${…}`)."""
    entries: dict[Any, Any] | None = {}
    adds = True
    for layer in layers:
        is_one_name = layer.override.startswith(f"{key}.")
        if layer.is_removal:
            if is_one_name and entries is not None:
                entries.pop(layer.override.removeprefix(f"{key}."), None)
            elif f"{key}.".startswith(f"{layer.override}."):
                entries, adds = {}, True
            continue
        content = value_of(layer.content, key, _ABSENT)
        if content is _ABSENT:
            continue
        if not isinstance(content, dict):
            entries, adds = (None if isinstance(content, str) and "${" in content else {}), False
        elif is_one_name or _adds(key, content):
            added = {name if is_one_name else name.removeprefix(_PLUS): value for name, value in content.items()}
            entries = None if entries is None else entries | added
        else:
            entries, adds = content, False
    return entries, adds


def with_defaults(raw: dict[Any, Any], schema: type, default: Any = None, prefix: str = "") -> dict[Any, Any]:
    """A raw group of keys with the defaults of those that it leaves out. Its mappings replace theirs, or add to them if
    their names begin with a plus. Unknown keys stay.

    Args:
        default: the value of the whole group where a configuration leaves it out; None takes its fields' own defaults.

    Raises:
        ConfigError: if a mapping mixes names with and without a plus.
    """
    filled = dict(raw)
    for item in fields(schema):
        key, kind = f"{prefix}{item.name}", types_of(schema)[item.name]
        default_value = _default_of(item) if default is None else getattr(default, item.name)
        value, group = raw.get(item.name, _ABSENT), group_in(kind)
        if value is _ABSENT:
            filled[item.name] = _as_plain(default_value)
        elif isinstance(value, list) and group is not None:
            filled[item.name] = [
                with_defaults(entry, group, prefix=f"{key}[].") if isinstance(entry, dict) else entry for entry in value
            ]
        elif isinstance(value, dict) and group is not None:
            filled[item.name] = with_defaults(
                value, group, default_value if is_dataclass(default_value) else None, f"{key}."
            )
        elif isinstance(value, dict):
            adds = _adds(key, value)
            entries = {name.removeprefix(_PLUS): entry for name, entry in value.items()} if adds else value
            merges = (adds or Merges in metadata_of(kind)) and isinstance(default_value, dict)
            filled[item.name] = default_value | entries if merges else entries
    return filled


def mapping_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a schema whose value is, or may be, a mapping of names. Mappings in lists are not among them,
    because a list replaces another one."""
    for name, kind in types_of(schema).items():
        group = group_in(kind)
        if get_origin(kind) is list or Merges in metadata_of(kind):
            continue
        if group is not None:
            yield from mapping_keys(group, f"{prefix}{name}.")
        elif kind is Any or dict in map(get_origin, (kind, *get_args(kind))):
            yield f"{prefix}{name}"


def value_of(raw: dict[Any, Any], key: str, absent: Any = None) -> Any:
    """The value of a dotted key, or `absent`."""
    value: Any = raw
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return absent
        value = value[name]
    return value


def _default_of(item: Field) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _as_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_as_plain(entry) for entry in value] if isinstance(value, list) else value


def _adds(key: str, names: Collection[Any]) -> bool:
    """Whether all names begin with a plus. Raises a `ConfigError` if only some do."""
    with_plus = [name for name in names if str(name).startswith(_PLUS)]
    if with_plus and len(with_plus) < len(names):
        raise ConfigError(
            f"{key} has {', '.join(map(str, names))}: names with a plus add to the mapping that the configuration "
            "builds on, names without one replace it. Give all of them a plus, or none."
        )
    return bool(with_plus)
