"""The memory budget of a configuration: how much GPU memory the trainer and each engine need, and whether it fits.

`dry_run=true` prints it below the configuration, and each start checks it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from classroom_rl.config.checks import check_machines
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.evaluation import reward_weights as rewards_of_evaluation
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import MEMORY, PHASED
from classroom_rl.errors import ConfigError
from classroom_rl.memory.budget import (
    CUDA_CONTEXT,
    GIB,
    OPTIMIZER_STATES,
    PROCESS,
    EngineMemory,
    Launch,
    Part,
    TrainerJob,
    TrainerMemory,
    engine_memory,
    gib,
    largest,
    refuse_host,
    total,
    trainer_memory,
    trainer_on_host,
)
from classroom_rl.memory.placement import Gpus, Placement, engine_job, idle_gpus, place_engines
from classroom_rl.memory.sources import (
    NotEstimated,
    awake_together,
    gpu_memory,
    like_gpus,
    machine_memory,
    named_shares,
    refuse_context,
    share_of,
    what_is_crowded,
)
from classroom_rl.memory.trainer_job import (
    longest_row,
    mixes_corrections,
    rows_of_micro_batch,
    rows_of_pass,
    trainer_job,
)
from classroom_rl.models.pretrained import why_unfit
from classroom_rl.rollout.environment import models_on_engines, phases_of

logger = logging.getLogger(__name__)

_WARNING = "warning: "


@dataclass
class Report:
    """The budget as lines of text.

    Attributes:
        refusals: messages about what does not fit.
        moments: peak bytes on a GPU by phase of a training step (rollout, backward pass, …); empty if the GPU's size is
            unknown.
        placement: where the engines are; None without engines, and if the GPU's size is unknown.
    """

    lines: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)
    placement: Placement | None = None

    def add(self, parts: Sequence[Part], label: str = "") -> None:
        """Add one line for each part."""
        for part in parts:
            self.lines.append(f"  {label:<10}{part.name:<34}{gib(part.size):>12}")


def check_budget(
    config: TrainRLConfig,
    find_launch: Callable[[], Launch] | None,
    with_engines: bool,
    server_gpus: int | None = None,
) -> Placement | None:
    """Check the budget before a program loads anything, for this machine's GPU and not for a planned one. What may not
    fit into host memory on a machine without a GPU is logged as a warning.

    Args:
        find_launch, server_gpus: as for `report`.
        with_engines: whether this program, or one that it starts, loads the engines.

    Returns:
        Where the engines are placed; None without engines or without a GPU.

    Raises:
        ConfigError: if something does not fit.
    """
    sizes = like_gpus()
    gpu = (min(sizes), "by nvidia-smi") if sizes else (None, "there is no GPU here")
    local_config = replace(config, train=replace(config.train, gpu_memory_gib=None))
    budget = report(local_config, find_launch, gpu, with_engines, server_gpus)
    for line in budget.lines:
        if line.startswith(_WARNING):
            logger.warning("%s", line.removeprefix(_WARNING))
    if budget.refusals:
        raise ConfigError("\n".join(budget.refusals))
    return budget.placement


def show_evaluation_shares(config: EvalConfig) -> None:
    """Print the total share of a GPU that an evaluation's engines take. Raises `ConfigError` if they do not fit."""
    budget = Report()
    if config.server_url is None:
        roles, phases = models_on_engines(config, rewards_of_evaluation(config)), phases_of(config)
        for name, group in awake_together(list(roles), phases).items():
            shares = named_shares(roles, group) or "shares are planned"
            budget.lines.append(f"{name}: {share_of(roles, group):g} of a GPU ({shares})")
        budget.refusals += what_is_crowded(roles, phases, gpu_memory(None)[0])
        for role, model in roles.items():
            unfit = why_unfit(f"{role}_model.model_name_or_path", model.model_name_or_path)
            budget.refusals += [unfit] if unfit else []
    show(budget)


def show(budget: Report) -> None:
    """Print a report as YAML comments, below the configuration, which is YAML. Raises a `ConfigError` that lists
    everything that does not fit."""
    for line in budget.lines:
        print(f"# {line}".rstrip())
    if budget.refusals:
        raise ConfigError("\n".join(budget.refusals))


def report(
    config: TrainRLConfig,
    find_launch: Callable[[], Launch] | None,
    gpu: tuple[int | None, str] | None = None,
    with_engines: bool = True,
    server_gpus: int | None = None,
) -> Report:
    """The budget of a configuration.

    Args:
        find_launch: returns how the trainer is launched; None leaves the trainer out.
        gpu: a GPU's bytes (None if there is no GPU) and the source of that number. By default the planned GPU, or what
            torch sees.
        with_engines: whether the engines are on the same machine.
        server_gpus: how many GPUs are the server's alone; None if it sees the same GPUs as the trainer.
    """
    limit, source = gpu or gpu_memory(config.train.gpu_memory_gib)
    budget = Report()
    if limit is None:
        budget.lines.append(f"memory on a GPU, of which no limit is known: {source}")
    else:
        budget.lines.append(f"memory on a GPU of {gib(limit)} ({source})")
    trainer = None
    if find_launch is None:
        budget.lines.append("trainer: see dry_run=true of train_rl.py, or of ./start_rl_training.sh")
    else:
        trainer = _add_trainer(budget, config, find_launch)
    roles = models_on_engines(config, reward_weights(config)) if with_engines else {}
    memory = None if trainer is None else trainer_memory(trainer)
    gpus = None if limit is None else _gpus_of_server(config, limit, trainer, server_gpus)
    if roles and gpus is not None:
        roles = _add_placement(budget, config, roles, gpus, trainer)
    weights = {role: _add_engine(budget, role, model, limit) for role, model in roles.items()}
    if limit is None:
        budget.refusals += what_is_crowded(roles, phases_of(config), None)
    elif gpus is not None:
        _add_moments(budget, config, _peaks(config, roles, gpus, memory), limit)
    _add_host(budget, config, trainer, roles, weights, limit)
    return budget


def place_on_this_machine(config: TrainRLConfig | EvalConfig, models: Mapping[str, ModelConfig]) -> Placement:
    """Place the engines of a server or an evaluation on the GPUs that this program sees. A server leaves room for a
    trainer on the same GPUs, unless `generation.colocate` is false or nothing would fit beside it.

    Returns:
        The placement; without a GPU the models as they are.

    Raises:
        ConfigError: if an engine needs more GPUs than there are, or engines that must be awake together do not fit.
    """
    sizes, phases = like_gpus(), phases_of(config)
    if not sizes or not models:
        return Placement(models)
    held = _held_by_default(config) if isinstance(config, TrainRLConfig) else 0
    beside_trainer, without_trainer = (
        place_engines(models, phases, Gpus(min(sizes), (bytes_held,) * len(sizes))) for bytes_held in (held, 0)
    )
    placement = without_trainer if _lacks_cache(beside_trainer, min(sizes)) else beside_trainer
    for line in placement.describe(Gpus(min(sizes), (held if placement is beside_trainer else 0,) * len(sizes))):
        logger.info("%s", line)
    crowded = what_is_crowded(placement.models, phases, min(sizes))
    if crowded:
        raise ConfigError("\n".join(crowded))
    return placement


def _held_by_default(config: TrainRLConfig) -> int:
    """The bytes that a trainer would always hold on a GPU: in one process, the most that it can be."""
    if config.generation.colocate is False:
        return 0
    try:
        return total(trainer_memory(trainer_job(config, Launch(zero_stage=2))).held)
    except (NotEstimated, ConfigError):
        return 0


def _lacks_cache(placement: Placement, limit: int) -> bool:
    """Whether an engine's share does not hold a conversation."""
    for model in placement.models.values():
        with suppress(NotEstimated):
            memory = engine_memory(engine_job(model))
            if memory.cache(int(limit * model.vllm.gpu_share)) < memory.conversation:
                return True
    return False


def _gpus_of_server(config: TrainRLConfig, limit: int, trainer: TrainerJob | None, server_gpus: int | None) -> Gpus:
    """The GPUs that the server sees, with what the trainer always holds there. On a planned machine they are as many
    as the trainer's processes, or as the configuration of the engines names."""
    is_shared = server_gpus is None and config.generation.colocate is not False and trainer is not None
    processes = 0 if trainer is None else -(-trainer.launch.processes // trainer.launch.machines)
    visible = len(like_gpus()) if config.train.gpu_memory_gib is None else 0
    counts = [1, processes * is_shared]
    for model in models_on_engines(config, reward_weights(config)).values():
        options = model.vllm
        counts.append(max(options.gpus or [0]) + 1)
        counts.append((options.data_parallel_size or 1) * options.number_of_gpus_per_instance)
    held = 0 if trainer is None or not is_shared else total(trainer_memory(trainer).held)
    count = server_gpus or visible or max(counts)
    return Gpus(limit, tuple(held if gpu < processes else 0 for gpu in range(count)))


def _add_placement(
    budget: Report,
    config: TrainRLConfig,
    roles: Mapping[str, ModelConfig],
    gpus: Gpus,
    trainer: TrainerJob | None,
) -> Mapping[str, ModelConfig]:
    """Add where the engines are, and which GPUs idle. Returns the placed models; as they are, if they have no place."""
    try:
        placement = place_engines(roles, phases_of(config), gpus)
    except ConfigError as refusal:
        budget.refusals.append(str(refusal))
        return roles
    budget.placement = placement
    budget.lines += placement.describe(gpus)
    budget.lines += [f"{_WARNING}{line}" for line in idle_gpus(config, placement, gpus, trainer is not None)]
    return placement.models


def _peaks(
    config: TrainRLConfig, roles: Mapping[str, ModelConfig], gpus: Gpus, memory: TrainerMemory | None
) -> dict[str, tuple[Part, ...]]:
    """The contents of the fullest GPU by phase of a training step."""
    peaks: dict[str, tuple[Part, ...]] = {}
    if memory is not None and not any(gpus.held):  # the trainer has GPUs of its own
        peaks |= moments(memory, [], False)
        peaks.pop("engines")
    for gpu in range(gpus.count):
        models_on_gpu = {role: model for role, model in roles.items() if gpu in (model.vllm.gpus or (0,))}
        groups = awake_together(list(models_on_gpu), phases_of(config))
        share, name = max(
            ((share_of(models_on_gpu, group), name) for name, group in groups.items()), default=(0.0, "engines")
        )
        engines = [
            Part(f"{name} ({share:g} of the GPU)", int(share * gpus.size)),
            Part("CUDA contexts of the engines", len(models_on_gpu) * CUDA_CONTEXT),
        ]
        for moment, parts in moments(memory if gpus.held[gpu] else None, engines, None).items():
            if moment not in peaks or total(parts) > total(peaks[moment]):
                peaks[moment] = parts
    return peaks


def _add_host(
    budget: Report,
    config: TrainRLConfig,
    trainer: TrainerJob | None,
    roles: Mapping[str, ModelConfig],
    weights: Mapping[str, int],
    limit: int | None,
) -> None:
    """Add the host memory at its peak. If it does not fit, a run on this machine's GPU is refused; a run on CPUs or on
    a planned GPU (`train.gpu_memory_gib`) gets a warning."""
    groups = awake_together(list(weights), phases_of(config))
    awake = list(groups.values()) if config.generation.colocate is False else [()]
    asleep = max((sum(size for role, size in weights.items() if role not in group) for group in awake), default=0)
    train = config.train
    versions = train.keep_published_policies + 1 if train.publish_through == MEMORY else 0
    parts = [] if trainer is None else trainer_on_host(trainer, limit is None, versions)
    engines = [roles[role].vllm for role in weights]
    workers = sum((options.data_parallel_size or 1) * (1 + options.number_of_gpus_per_instance) for options in engines)
    parts.append(Part("processes of the engines", workers * PROCESS))
    if limit is None:
        parts.append(Part("weights of the engines", sum(weights.values())))
        parts.append(Part("caches of the engines", sum(options.cpu_kvcache_gib for options in engines) * GIB))
    else:
        parts.append(Part("weights of the engines (asleep)", asleep))
    parts, machine = [part for part in parts if part.size], machine_memory()
    where = "if all of it is on CPUs" if limit is None else "beside the GPUs"
    budget.lines.append(f"in the machine's own memory at its fullest, {where} (this machine has {gib(machine)}):")
    budget.add([*parts, Part("together", total(parts))])
    message = refuse_host(parts, trainer, machine)
    if message is not None and limit is not None and train.gpu_memory_gib is None:
        budget.refusals.append(message)
    elif message is not None:
        budget.lines.append(f"{_WARNING}{message}")


def _add_trainer(budget: Report, config: TrainRLConfig, find_launch: Callable[[], Launch]) -> TrainerJob | None:
    train, model = config.train, config.policy_model
    try:
        launch = find_launch()
        check_machines(config, launch.machines, launch.processes)
        job = trainer_job(config, launch)
    except NotEstimated as reason:
        budget.lines.append(f"trainer: not reckoned: {reason}")
        return None
    except ConfigError as refusal:
        budget.refusals.append(str(refusal))
        return None
    if len(config.generation.server_urls or []) > launch.processes:
        budget.lines.append(
            f"servers: {len(config.generation.server_urls)} for {launch.processes} × trainer: each group of "
            "conversations goes to the shortest queue, and those of a lost server to the others"
        )
    memory = trainer_memory(job)
    limit = train.max_tokens_per_micro_batch
    rows = rows_of_micro_batch(config, launch.processes)
    size = f"{rows} × {longest_row(config)} tokens" if limit is None else f"{job.tokens} tokens"
    sharding = "FSDP2" if launch.fsdp else f"ZeRO-{launch.zero_stage}" if launch.zero_stage else "without DeepSpeed"
    adapter_note = "" if job.adapter is None else f", an adapter of {job.adapter.parameters:,} learns"
    budget.lines.append(
        f"trainer: {model.model_name_or_path}, {job.shape.parameters:,} parameters{adapter_note}, {train.dtype}, "
        f"{train.optimizer}; {launch.processes} × GPU, {sharding}; micro-batches of {size}"
    )
    budget.add(memory.held, "always")
    budget.add(memory.backward, "backward")
    budget.add(memory.step, "step")
    return job


def _add_engine(budget: Report, role: str, model: ModelConfig, limit: int | None) -> int:
    """Add an engine's lines. Returns the bytes of its weights on all its GPUs together; 0 if they are not known."""
    options = model.vllm
    title = f"engine of the {role}: {model.model_name_or_path}"
    too_long = refuse_context(f"{role}_model.vllm.max_length", model.model_name_or_path, options.max_length)
    unfit = None if too_long else why_unfit(f"{role}_model.model_name_or_path", model.model_name_or_path)
    budget.refusals += [refusal for refusal in (too_long, unfit) if refusal]
    if unfit:
        return 0
    try:
        job = engine_job(model)
    except NotEstimated as reason:
        budget.lines.append(f"{title}: not reckoned: {reason}")
        return 0
    memory, copies = engine_memory(job), options.data_parallel_size or 1
    count = f"{job.gpus} × GPU" if copies == 1 else f"{copies} copies × {job.gpus} GPU"
    budget.lines.append(f"{title}, {job.shape.parameters:,} parameters, {options.dtype}, {count}")
    budget.add(
        [Part("weights (asleep: on the host)", memory.weights), Part("logits of all sequences", memory.sampling)]
    )
    budget.add([Part(f"one conversation of {options.max_length} tokens", memory.conversation)])
    if limit is not None and options.gpu_memory_utilization is not None:
        _add_cache(budget, role, options, memory, limit)
    return memory.weights * job.gpus * copies


def _add_cache(budget: Report, role: str, options: VllmConfig, memory: EngineMemory, limit: int) -> None:
    """Add the KV cache that an engine's share of the GPU leaves; refuse a share that cannot hold one conversation."""
    share = int(limit * options.gpu_memory_utilization)
    cache = memory.cache(share)
    budget.add([Part("KV cache", max(0, cache))])
    budget.lines[-1] += f"  = {max(0, cache) // memory.conversation} conversations of {options.max_length} tokens"
    if cache >= memory.conversation:
        return
    key = f"{role}_model.vllm"
    needed = share - cache + memory.conversation
    budget.refusals.append(
        f"The engine of the {role} needs {gib(needed)} for its weights ({gib(memory.weights)}), logits and the cache "
        f"of one conversation of {options.max_length} tokens ({gib(memory.conversation)}), but may take {gib(share)} "
        f"of the GPU's {gib(limit)}. Raise {key}.gpu_memory_utilization ({options.gpu_memory_utilization:g}) or "
        f"{key}.number_of_gpus_per_instance ({options.number_of_gpus_per_instance}), or lower {key}.max_length."
    )


def moments(
    trainer: TrainerMemory | None, engines: Sequence[Part], colocate: bool | None
) -> dict[str, tuple[Part, ...]]:
    """The contents of a GPU's memory at its peak, by phase of a training step. Sleeping engines keep their CUDA
    contexts. `colocate` None counts as true: server and trainer share the GPU."""
    if trainer is None:
        return {"engines": tuple(engines)}
    shared = colocate is not False
    asleep = engines[1:] if shared else ()
    peaks = {"rollout": (*trainer.held, *engines)} if shared else {"engines": tuple(engines)}
    return peaks | {
        "backward pass": (*trainer.held, *trainer.backward, *asleep),
        "optimizer step": (*trainer.held, *trainer.step, *asleep),
    }


def _add_moments(budget: Report, config: TrainRLConfig, peaks: dict[str, tuple[Part, ...]], limit: int) -> None:
    if "rollout" in peaks:
        budget.lines.append("trainer and engines share the GPU; else set generation.colocate=false. At its fullest:")
    else:
        budget.lines.append("at its fullest:")
    for moment, parts in peaks.items():
        budget.moments[moment] = size = total(parts)
        budget.add([Part(moment, size)])
        if size > limit:
            budget.refusals.append(
                f"A GPU of {gib(limit)} cannot hold what the {moment} needs: {gib(size)}, most of it "
                f"{largest(parts, 4)}. {_advice(moment, config)}"
            )


def _advice(moment: str, config: TrainRLConfig) -> str:
    train = config.train
    suggestions = []
    if moment in ("rollout", "engines"):
        roles = models_on_engines(config, reward_weights(config))
        suggestions.append(f"lower the engines' shares ({named_shares(roles, list(roles))})")
        if config.generation.schedule != PHASED and len(roles) > 2:
            suggestions.append("set generation.schedule=phased, with which not all engines are awake at a time")
    if moment == "rollout":
        suggestions.append("give the server GPUs of its own (CUDA_VISIBLE_DEVICES) and set generation.colocate=false")
    if moment == "backward pass" and not train.gradient_checkpointing:
        suggestions.append("set train.gradient_checkpointing=true")
    if moment == "backward pass" and train.per_device_train_batch_size > 1:
        suggestions.append("lower train.per_device_train_batch_size")
    if moment == "backward pass" and rows_of_pass(config) > train.per_device_train_batch_size:
        suggestions.append("lower train.corrections.pass_batch_size")
    if moment == "backward pass" and mixes_corrections(config):
        suggestions.append("set train.corrections.mode=pass, or lower train.corrections.rows_per_batch")
    if moment != "engines":
        if OPTIMIZER_STATES[train.optimizer] > 2:
            suggestions.append("take an optimizer that remembers less, such as train.optimizer=adamw_bnb_8bit")
        if config.teacher_model.adapter is None:
            suggestions.append("train an adapter only (teacher_model.lora.enable=true)")
        elif not config.teacher_model.load_in_4bit:
            suggestions.append("train it over weights of 4 bits (teacher_model.load_in_4bit=true)")
        suggestions.append("split the trainer over more GPUs, as with --config_file config/deepspeed/zero3_4GPU.yaml")
    return f"Ways out: {', or '.join(suggestions)}."
