"""Mappings of names, such as judge rules, personas and reward weights, in the layers of a configuration: the files that
a file builds on, the file itself, and overrides. A mapping that a layer writes out replaces the one below it.

Hydra merges mappings name by name: one judge rule over two others would be three, and three calls of the judge. To add
to the names below, begin each with a plus, `{+name: value}`, or set one on the command line,
`group.mapping.name=value`; `~group.mapping.name` takes one away. A field whose metadata has `MERGES` is merged.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict

from classroom_rl.config.base import MERGES
from classroom_rl.errors import ConfigError

_PLUS = "+"


@dataclass
class Layer:
    """What a file or an override sets. Of an override also its key, and whether it removes that key."""

    config: DictConfig
    override: str = ""
    is_removal: bool = False


def layers_of(name: str, overrides: Sequence[str]) -> list[Layer]:
    """The files that Hydra, which must be initialised, merges for a configuration, in order, then the overrides."""
    loader = GlobalHydra.instance().config_loader()
    files = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    own = [each for each in files if each.config_path and not each.config_path.startswith("hydra/")]
    layers = [Layer(loader._load_single_config(each, loader.repository).config) for each in own]
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, config = override.key_or_group, OmegaConf.create()
        if "/" in key or override.package is not None:  # of a group of files
            continue
        if not override.is_delete():
            OmegaConf.update(config, key, override.value(), force_add=True)
        layers.append(Layer(config, key, override.is_delete()))
    return layers


def replace_mappings(raw: DictConfig, layers: Sequence[Layer], schema: type) -> None:
    """Set every mapping of a composed configuration to what its layers say. Where none of them writes it out, its names
    keep their plus: they add to the schema's default.

    Raises:
        ConfigError: if a layer mixes names with and without a plus.
    """
    for key in mapping_keys(schema):
        if not _is_written_out(_node(raw, key)):
            continue
        entries, adds = _entries(key, layers)
        if entries is not None:
            group, _, last = key.rpartition(".")
            holder = _node(raw, group) if group else raw
            with open_dict(holder):
                holder[last] = {f"{_PLUS}{name}": value for name, value in entries.items()} if adds else entries


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
        node = _node(layer.config, key)
        if node is None:
            continue
        if not _is_written_out(node):
            entries, adds = (None if node._is_interpolation() else {}), False
            continue
        content = OmegaConf.to_container(node, resolve=False)
        if is_one_name or _adds(key, content):
            new = {name if is_one_name else name.removeprefix(_PLUS): value for name, value in content.items()}
            entries = None if entries is None else entries | new
        else:
            entries, adds = content, False
    return entries, adds


def strip_pluses(raw: DictConfig, schema: type) -> set[str]:
    """Remove the pluses from the names of a raw configuration's mappings.

    Returns:
        The keys of the mappings that had them: they add to the schema's defaults.

    Raises:
        ConfigError: if a mapping mixes names with and without a plus.
    """
    adding = set()
    for key in mapping_keys(schema):
        node = _node(raw, key)
        if _is_written_out(node) and _adds(key, list(node)):
            adding.add(key)
            for name in list(node):
                with open_dict(node):
                    node[name.removeprefix(_PLUS)] = node.pop(name)
    return adding


def merge(raw: DictConfig, schema: type, adding: Collection[str]) -> DictConfig:
    """A raw configuration over the schema's defaults; its mappings replace theirs, unless their keys are in
    `adding`."""
    merged = OmegaConf.merge(OmegaConf.structured(schema), raw)
    for key in set(mapping_keys(schema)).difference(adding):
        said, found = _node(raw, key), _node(merged, key)
        if _is_written_out(said) and _is_written_out(found):
            with open_dict(found):
                for name in [each for each in found if each not in said]:
                    del found[name]
    return merged


def mapping_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a schema whose value is, or may be, a mapping of names. Mappings in lists are not among them,
    because a list replaces another one."""
    for item in fields(schema):
        kinds = [item.type, *(each for each in get_args(item.type) if each is not NoneType)]
        group = next(filter(is_dataclass, kinds), None)
        if get_origin(item.type) is list or item.metadata.get(MERGES):
            continue
        if group is not None:
            yield from mapping_keys(group, f"{prefix}{item.name}.")
        elif item.type is Any or dict in map(get_origin, kinds):
            yield f"{prefix}{item.name}"


def _adds(key: str, names: Collection[Any]) -> bool:
    """Whether all names begin with a plus.

    Raises:
        ConfigError: if only some do.
    """
    marked = [name for name in names if str(name).startswith(_PLUS)]
    if marked and len(marked) < len(names):
        raise ConfigError(
            f"{key} has {', '.join(map(str, names))}: names with a plus add to the mapping that the configuration "
            "builds on, names without one replace it. Give all of them a plus, or none."
        )
    return bool(marked)


def _is_written_out(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


def _node(config: DictConfig, key: str) -> Container | None:
    """The node of a dotted key, unresolved; None if it is missing."""
    node: Any = config
    for part in key.split("."):
        if not _is_written_out(node):
            return None
        node = node._get_node(part, validate_access=False)
    return node
