"""Places a server's engines on its GPUs: on which GPUs, how many copies of a model, and what share of the memory.

What the configuration says, stays. Where it says nothing (`vllm.gpus`, `vllm.data_parallel_size` and
`vllm.gpu_memory_utilization` are null), this is the plan: a copy of every model on every GPU, so that none idles while
conversations are played. If the models do not fit side by side, each gets GPUs of its own. The memory that is left
beside weights and logits is divided so that all engines on a GPU can cache equally many conversations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.engines.vllm.engine_start import SLOTS, served_rank
from classroom_rl.errors import ConfigError
from classroom_rl.memory.budget import CUDA_CONTEXT, GIB, EngineJob, EngineMemory, engine_memory, gib
from classroom_rl.memory.sources import NotEstimated, awake_together, read_shape
from classroom_rl.models.lora import adapter_shape
from classroom_rl.rollout.environment import environment_of
from classroom_rl.rollout.scheduler import Phase

ENGINE_BYTES = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2}
"""Bytes per number by dtype. vLLM's auto is a 16-bit type, even for float32 models."""
_HEADROOM, _HEADROOM_SHARE = 4 * GIB, 0.1
"""What planned shares leave free on a GPU for CUDA graphs, communication and fragments: at most so many bytes, and this
share of a small GPU."""
_LEAST_SHARE = 0.05
"""The share with which an engine can start of which nothing is known."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a server sees.

    Attributes:
        size: bytes of the memory of the smallest.
        held: for each, the bytes that a trainer on it always holds; 0 without one.
    """

    size: int
    held: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return len(self.held)


@dataclass(frozen=True)
class Placement:
    """Where a server's engines are.

    Attributes:
        models: by role, the models with `vllm.gpus`, `data_parallel_size` and `gpu_memory_utilization` filled in.
        apart: whether the engines did not fit side by side, so that each has GPUs of its own.
    """

    models: Mapping[str, ModelConfig]
    apart: bool = False

    def on(self, gpu: int) -> dict[str, ModelConfig]:
        """The models on a GPU, by role."""
        return {role: model for role, model in self.models.items() if gpu in (model.vllm.gpus or ())}

    @property
    def overrides(self) -> list[str]:
        """The placement as overrides for the server."""
        keys = ("gpus", "data_parallel_size", "gpu_memory_utilization")
        return [
            f"{role}_model.vllm.{key}={str(getattr(model.vllm, key)).replace(' ', '')}"
            for role, model in self.models.items()
            for key in keys
        ]

    def describe(self, gpus: Gpus) -> list[str]:
        """A table: a line for each kind of GPU, with its engines, their shares, and the trainer."""
        lines = [f"placement on {gpus.count} GPU{'s' if gpus.count > 1 else ''} of {gib(gpus.size)}:"]
        contents = [self._content(gpu, gpus) for gpu in range(gpus.count)]
        first = 0
        for content, group in groupby(contents):
            last = first + len(list(group)) - 1
            name = f"GPU {first}" if first == last else f"GPU {first}-{last}"
            lines.append(f"  {name:<10}{content}")
            first = last + 1
        return lines

    def _content(self, gpu: int, gpus: Gpus) -> str:
        engines = []
        for role, model in self.on(gpu).items():
            share, split = model.vllm.gpu_memory_utilization, model.vllm.number_of_gpus_per_instance
            part = f", 1/{split} of the model" if split > 1 else ""
            engines.append(f"{role} {share * gpus.size / GIB:.1f} GiB ({share:g}{part})")
        trainer = [f"trainer {gib(gpus.held[gpu])} always"] if gpus.held[gpu] else []
        return "; ".join([*engines, *trainer]) or "nothing"


def place_engines(models: Mapping[str, ModelConfig], phases: Sequence[Phase], gpus: Gpus) -> Placement:
    """Place the engines of a server.

    Args:
        models: the models of the engines, by role, in the order of loading.
        phases: of the phased schedule; empty if all engines are awake together.

    Raises:
        ConfigError: if an engine needs more GPUs than there are.
    """
    for role, model in models.items():
        _refuse_missing_gpus(role, model.vllm, gpus.count)
    needs = {role: _need(model) for role, model in models.items()}
    groups = list(awake_together(list(models), phases).values())
    planned = {role: _located(model, range(gpus.count)) for role, model in models.items()}
    apart = _apart(models, needs, gpus.count)
    is_apart = apart is not None and not _fits(planned, needs, groups, gpus) and _fits(apart, needs, groups, gpus)
    if is_apart:
        planned = apart
    return Placement(_with_shares(planned, needs, groups, gpus), is_apart)


def engine_job(model: ModelConfig) -> EngineJob:
    """What an engine loads. Raises a `NotEstimated` if the model's configuration cannot be loaded, or is of an unknown
    kind."""
    options = model.vllm
    return EngineJob(
        shape=read_shape(model.model_name_or_path),
        number_bytes=ENGINE_BYTES[options.dtype],
        gpus=options.number_of_gpus_per_instance,
        max_length=options.max_length,
        max_num_seqs=options.max_num_seqs,
        adapters=_adapter_slot_parameters(model),
    )


def _adapter_slot_parameters(model: ModelConfig) -> int:
    """The number of parameters in vLLM's adapter slots, which are as large as for the next rank that vLLM supports."""
    if model.adapter is None:
        return 0
    shape = adapter_shape("teacher_model.lora", model.model_name_or_path, model.adapter)
    return SLOTS * shape.parameters * served_rank(shape.rank) // shape.rank


def _need(model: ModelConfig) -> EngineMemory | None:
    """What an engine needs on each of its GPUs; None if it is not known."""
    try:
        return engine_memory(engine_job(model))
    except NotEstimated:
        return None


def _refuse_missing_gpus(role: str, options: VllmConfig, count: int) -> None:
    key, split = f"{role}_model.vllm", options.number_of_gpus_per_instance
    copies = options.data_parallel_size or 1
    if options.gpus is not None:
        copies = options.data_parallel_size or max(1, len(options.gpus) // split)
        if len(options.gpus) != copies * split or len(set(options.gpus)) != len(options.gpus):
            raise ConfigError(
                f"{key}.gpus is {options.gpus}, but {copies} × {split} different GPUs are needed "
                f"({key}.data_parallel_size × {key}.number_of_gpus_per_instance)."
            )
    needed = split * copies if options.gpus is None else max(options.gpus) + 1
    if needed > count:
        raise ConfigError(
            f"The engine of the {role} needs {needed} GPUs, but the server sees {count}. Lower "
            f"{key}.number_of_gpus_per_instance ({split}), {key}.data_parallel_size or {key}.gpus, or let the server "
            "see more of them (CUDA_VISIBLE_DEVICES, or --server-gpus of ./start_rl_training.sh)."
        )


def _located(model: ModelConfig, available: Sequence[int]) -> ModelConfig:
    """The model with its GPUs and its number of copies: as many as fit onto the available GPUs, unless configured."""
    options, split = model.vllm, model.vllm.number_of_gpus_per_instance
    if options.gpus is not None:
        copies = len(options.gpus) // split
        return replace(model, vllm=replace(options, data_parallel_size=copies))
    copies = options.data_parallel_size or len(available) // split
    gpus = list(available[: split * copies])
    return replace(model, vllm=replace(options, gpus=gpus, data_parallel_size=copies))


def _apart(
    models: Mapping[str, ModelConfig], needs: Mapping[str, EngineMemory | None], count: int
) -> dict[str, ModelConfig] | None:
    """The models on GPUs of their own; None if there are too few. Engines whose GPUs or copies are configured keep
    them. GPUs that are left go to the engine with most bytes of weights per copy, one copy after the other."""
    configured = {gpu for model in models.values() for gpu in model.vllm.gpus or ()}
    free = [gpu for gpu in range(count) if gpu not in configured]
    unplaced = {role: model.vllm for role, model in models.items() if model.vllm.gpus is None}
    copies = {role: options.data_parallel_size or 1 for role, options in unplaced.items()}
    remaining = len(free) - sum(
        options.number_of_gpus_per_instance * copies[role] for role, options in unplaced.items()
    )
    if remaining < 0:
        return None
    weights = {role: need.weights if (need := needs[role]) else GIB for role in unplaced}
    while growing := [
        role
        for role, options in unplaced.items()
        if options.data_parallel_size is None and options.number_of_gpus_per_instance <= remaining
    ]:
        heaviest = max(growing, key=lambda role: weights[role] / copies[role])
        copies[heaviest] += 1
        remaining -= unplaced[heaviest].number_of_gpus_per_instance
    placed = {}
    for role, model in models.items():
        size = copies[role] * model.vllm.number_of_gpus_per_instance if role in copies else 0
        placed[role] = _located(model, free[:size])
        free = free[size:]
    return placed


def _free(models: Mapping[str, ModelConfig], gpu: int, gpus: Gpus) -> int:
    """The bytes of a GPU that the shares of its engines may add up to. Sleeping engines keep their CUDA contexts."""
    contexts = sum(gpu in model.vllm.gpus for model in models.values()) * CUDA_CONTEXT
    return gpus.size - gpus.held[gpu] - contexts - headroom(gpus.size)


def headroom(size: int) -> int:
    """The bytes that planned shares leave free on a GPU of this size."""
    return min(_HEADROOM, int(_HEADROOM_SHARE * size))


def _least(model: ModelConfig, need: EngineMemory | None, size: int) -> int:
    """The fewest bytes of a GPU with which an engine starts: its configured share, or its weights, its logits and the
    cache of one conversation."""
    if model.vllm.gpu_memory_utilization is not None:
        return int(model.vllm.gpu_memory_utilization * size)
    return int(_LEAST_SHARE * size) if need is None else need.weights + need.sampling + need.conversation


def _fits(
    models: Mapping[str, ModelConfig],
    needs: Mapping[str, EngineMemory | None],
    groups: Sequence[Sequence[str]],
    gpus: Gpus,
) -> bool:
    return all(
        sum(_least(models[role], needs[role], gpus.size) for role in group if gpu in models[role].vllm.gpus)
        <= _free(models, gpu, gpus)
        for gpu in range(gpus.count)
        for group in groups
    )


def _with_shares(
    models: Mapping[str, ModelConfig],
    needs: Mapping[str, EngineMemory | None],
    groups: Sequence[Sequence[str]],
    gpus: Gpus,
) -> dict[str, ModelConfig]:
    """The models with shares: as configured, otherwise the least that the division gives them on one of their GPUs, in
    one of their phases, rounded down to thousandths, but never below what they need."""
    bytes_of: dict[str, list[int]] = {}
    for gpu in range(gpus.count):
        for group in groups:
            models_on_gpu = {role: models[role] for role in group if gpu in models[role].vllm.gpus}
            for role, size in _divide(models_on_gpu, needs, _free(models, gpu, gpus), gpus.size).items():
                bytes_of.setdefault(role, []).append(size)
    placed = {}
    for role, model in models.items():
        share = model.vllm.gpu_memory_utilization
        if share is None:
            least = _least(model, needs[role], gpus.size)
            share = max(min(bytes_of[role]) * 1000 // gpus.size, -(-least * 1000 // gpus.size)) / 1000
        placed[role] = replace(model, vllm=replace(model.vllm, gpu_memory_utilization=share))
    return placed


def _divide(
    models: Mapping[str, ModelConfig], needs: Mapping[str, EngineMemory | None], free: int, size: int
) -> dict[str, int]:
    """The bytes of engines without a configured share: what each needs, and of the rest a part in proportion to the
    cache of one of its conversations. An engine of which nothing is known gets an equal part of all."""
    open_roles = [role for role, model in models.items() if model.vllm.gpu_memory_utilization is None]
    remaining = free - sum(_least(model, needs[role], size) for role, model in models.items() if role not in open_roles)
    unknown = [role for role in open_roles if needs[role] is None]
    parts = {role: remaining // len(open_roles) for role in unknown}
    remaining -= sum(parts.values())
    known_needs = {role: needs[role] for role in open_roles if role not in parts}
    rest = max(0, remaining - sum(_least(models[role], need, size) for role, need in known_needs.items()))
    conversations = sum(need.conversation for need in known_needs.values())
    for role, need in known_needs.items():
        parts[role] = _least(models[role], need, size) + rest * need.conversation // conversations
    return parts


def idle_gpus(config: TrainRLConfig, placement: Placement, gpus: Gpus, with_trainer: bool) -> list[str]:
    """A line for each long phase of a step in which some of the server's GPUs have no work, with what changes that."""
    lines, seen_roles = [], set()
    for phase in environment_of(config).phases:
        engines = [role for role in phase.roles if role in placement.models]
        if set(engines) <= seen_roles and "end_rm" not in reward_weights(config):
            continue  # the solutions, which are only written if their grades are a reward
        seen_roles |= set(engines)
        idle = [gpu for gpu in range(gpus.count) if not set(engines) & set(placement.on(gpu))]
        if engines and idle:
            lines.append(
                f"{_named(idle)} idle in the {phase.name} phase: {' and '.join(engines)} are elsewhere. Smaller models "
                "or generation.schedule=phased let all GPUs hold them."
            )
    unused = [gpu for gpu, held in enumerate(gpus.held) if not held]
    if not with_trainer or not unused:
        return lines
    if len(unused) == gpus.count:
        if not config.train.max_staleness:
            lines.append(
                f"the server's {_named(unused)} idle while the trainer steps, and the trainer's while conversations "
                "are played: train.max_staleness=1 does both at a time."
            )
        return lines
    return [
        *lines,
        f"{_named(unused)} idle while the trainer steps: give it as many processes, as with --config_file "
        f"config/deepspeed/zero3_4GPU.yaml --num_processes {gpus.count}.",
    ]


def _named(gpus: Sequence[int]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"
