"""The memory budget of a configuration: how much GPU memory the trainer and each engine need, and whether it fits.

`dry_run=true` prints it below the configuration, and each start checks it. All engines of a server use its first
visible GPUs, so those fill up first.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from classroom_rl.config.checks import check_machines, reward_weights
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.evaluation import reward_weights as rewards_of_evaluation
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.train_rl import TrainRLConfig, pass_batch_size
from classroom_rl.config.values import MEMORY, MLP, PASS, PHASED, PPO, SAME_STEP
from classroom_rl.engines.vllm.engine_start import SLOTS, served_rank
from classroom_rl.errors import ConfigError
from classroom_rl.memory.budget import (
    CUDA_CONTEXT,
    GIB,
    OPTIMIZER_STATES,
    PROCESS,
    AdapterJob,
    EngineJob,
    EngineMemory,
    Launch,
    Part,
    TrainerJob,
    TrainerMemory,
    critic_parameters,
    engine_memory,
    gib,
    largest,
    refuse_host,
    state_bytes,
    total,
    trainer_memory,
    trainer_on_host,
)
from classroom_rl.memory.sources import (
    NotEstimated,
    awake_together,
    gpu_memory,
    machine_memory,
    memory_by_nvidia_smi,
    named_shares,
    read_shape,
    refuse_context,
    share_of,
    what_is_crowded,
)
from classroom_rl.models.lora import adapter_shape
from classroom_rl.models.pretrained import why_unfit
from classroom_rl.rollout.environment import models_on_engines, most_rows, phases_of

logger = logging.getLogger(__name__)

_WARNING = "warning: "
_BYTES = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2}  # vLLM's auto is a 16-bit type, even for float32 models


@dataclass
class Report:
    """The budget as lines of text.

    Attributes:
        refusals: messages about what does not fit.
        moments: peak bytes on a GPU by phase of a training step (rollout, backward pass, …); empty if the GPU's size is
            unknown.
    """

    lines: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)

    def add(self, parts: Sequence[Part], label: str = "") -> None:
        """Add one line for each part."""
        for part in parts:
            self.lines.append(f"  {label:<10}{part.name:<34}{gib(part.size):>12}")


def check_budget(config: TrainRLConfig, find_launch: Callable[[], Launch] | None, with_engines: bool) -> None:
    """Check the budget before a program loads anything, for this machine's GPU and not for a planned one. What may not
    fit into host memory on a machine without a GPU is logged as a warning.

    Args:
        find_launch: as for `report`.
        with_engines: whether this program, or one that it starts, loads the engines.

    Raises:
        ConfigError: if something does not fit.
    """
    sizes = memory_by_nvidia_smi()  # the largest, because CUDA decides which of several GPUs the engines get
    gpu = (max(sizes), "by nvidia-smi") if sizes else (None, "there is no GPU here")
    budget = report(replace(config, train=replace(config.train, gpu_memory_gib=None)), find_launch, gpu, with_engines)
    for line in budget.lines:
        if line.startswith(_WARNING):
            logger.warning("%s", line.removeprefix(_WARNING))
    if budget.refusals:
        raise ConfigError("\n".join(budget.refusals))


def show_evaluation_shares(config: EvalConfig) -> None:
    """Print the total share of a GPU that an evaluation's engines take. Raises `ConfigError` if they do not fit."""
    budget = Report()
    if config.server_url is None:
        roles, phases = models_on_engines(config, rewards_of_evaluation(config)), phases_of(config)
        for name, group in awake_together(list(roles), phases).items():
            budget.lines.append(f"{name}: {share_of(roles, group):g} of a GPU ({named_shares(roles, group)})")
        budget.refusals += what_is_crowded(roles, phases, gpu_memory(None)[0])
        for role, model in roles.items():
            unfit = why_unfit(f"{role}_model.model_name_or_path", model.model_name_or_path)
            budget.refusals += [unfit] if unfit else []
    show(budget)


def show(budget: Report) -> None:
    """Print a report as YAML comments, below the configuration, which is YAML.

    Raises:
        ConfigError: lists everything that does not fit.
    """
    for line in budget.lines:
        print(f"# {line}".rstrip())
    if budget.refusals:
        raise ConfigError("\n".join(budget.refusals))


def report(
    config: TrainRLConfig,
    find_launch: Callable[[], Launch] | None,
    gpu: tuple[int | None, str] | None = None,
    with_engines: bool = True,
) -> Report:
    """The budget of a configuration.

    Args:
        find_launch: returns how the trainer is launched; None leaves the trainer out.
        gpu: a GPU's bytes (None if there is no GPU) and the source of that number. By default the planned GPU, or what
            torch sees.
        with_engines: whether the engines are on the same machine.
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
    weights = {role: _add_engine(budget, role, model, limit) for role, model in roles.items()}
    groups = awake_together(list(roles), phases_of(config))
    if limit is None:
        budget.refusals += what_is_crowded(roles, phases_of(config), None)
    else:
        shares = [share_of(roles, group) for group in groups.values()]
        share, name = max(zip(shares, groups, strict=True), default=(0.0, "engines"))
        engines = [
            Part(f"{name} ({share:g} of the GPU)", int(share * limit)),
            Part("CUDA contexts of the engines", len(roles) * CUDA_CONTEXT),
        ]
        memory = None if trainer is None else trainer_memory(trainer)
        colocate = config.generation.colocate if with_engines else False
        _add_moments(budget, config, moments(memory, engines, colocate), limit)
    _add_host(budget, config, trainer, weights, limit)
    return budget


def _add_host(
    budget: Report, config: TrainRLConfig, trainer: TrainerJob | None, weights: Mapping[str, int], limit: int | None
) -> None:
    """Add the host memory at its peak. If it does not fit, a run on this machine's GPU is refused; a run on CPUs or on
    a planned GPU (`train.gpu_memory_gib`) gets a warning."""
    roles, groups = models_on_engines(config, reward_weights(config)), awake_together(list(weights), phases_of(config))
    awake = list(groups.values()) if config.generation.colocate is False else [()]
    asleep = max((sum(size for role, size in weights.items() if role not in group) for group in awake), default=0)
    train = config.train
    versions = train.keep_published_policies + 1 if train.publish_through == MEMORY else 0
    parts = [] if trainer is None else trainer_on_host(trainer, limit is None, versions)
    engines = [roles[role].vllm for role in weights]
    workers = sum(1 + options.number_of_gpus_per_instance for options in engines)
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
    train, model = config.train, config.teacher_model
    try:
        launch = find_launch()
        check_machines(config, launch.machines)
        shape = read_shape(model.model_name_or_path)
        adapter = _adapter(model)
    except NotEstimated as reason:
        budget.lines.append(f"trainer: not reckoned: {reason}")
        return None
    except ConfigError as refusal:
        budget.refusals.append(str(refusal))
        return None
    length = min(config.generation.max_tokens_in_conversation, model.vllm.max_length)
    rows = rows_of_micro_batch(config, launch.processes)
    job = TrainerJob(
        shape=shape,
        launch=launch,
        number_bytes=_BYTES[train.dtype],
        state_bytes=state_bytes(train.optimizer, launch.zero_stage),
        reference=train.beta > 0 and adapter is None,  # an adapter's reference is the model without it
        checkpointing=train.gradient_checkpointing,
        tokens=max(length, train.max_tokens_per_micro_batch or rows * length),
        adapter=adapter,
        critic=critic_parameters(shape.hidden) if train.algorithm == PPO and train.ppo.head == MLP else 0,
    )
    memory = trainer_memory(job)
    limit = train.max_tokens_per_micro_batch
    size = f"{rows} × {length} tokens" if limit is None else f"{job.tokens} tokens"
    sharding = "FSDP2" if launch.fsdp else f"ZeRO-{launch.zero_stage}" if launch.zero_stage else "without DeepSpeed"
    adapter_note = "" if adapter is None else f", an adapter of {adapter.parameters:,} learns"
    budget.lines.append(
        f"trainer: {model.model_name_or_path}, {shape.parameters:,} parameters{adapter_note}, {train.dtype}, "
        f"{train.optimizer}; {launch.processes} × GPU, {sharding}; micro-batches of {size}"
    )
    budget.add(memory.held, "always")
    budget.add(memory.backward, "backward")
    budget.add(memory.step, "step")
    return job


def mixes_corrections(config: TrainRLConfig) -> bool:
    """Whether corrections are training samples in the same steps as the conversations."""
    corrections = config.train.corrections
    return config.supervisor_model is not None and corrections.mode == SAME_STEP and corrections.weight > 0


def rows_of_micro_batch(config: TrainRLConfig, processes: int) -> int:
    """The maximum number of rows (training samples) in a micro-batch: its conversations, and its part of the
    corrections that are mixed into a step. Drafts are left out, because their number depends on the tutor. In an
    environment in which every message is a row, an episode counts as the maximum number of messages."""
    train = config.train
    batch, rows = train.number_of_problems_per_batch * train.num_samples_per_problem, train.per_device_train_batch_size
    rows *= most_rows(config) or 1
    batch *= most_rows(config) or 1
    if not mixes_corrections(config):
        return max(rows, _rows_of_pass(config))
    conversations = max(1, batch // processes)
    corrections = max(1, (train.corrections.rows_per_batch or batch) // processes)
    parts = max(1, conversations // rows)
    return -(-(conversations + corrections) // parts)


def _rows_of_pass(config: TrainRLConfig) -> int:
    """The number of rows in one step of a supervised pass; 0 without passes."""
    has_passes = config.supervisor_model is not None and config.train.corrections.mode == PASS
    return pass_batch_size(config.train) if has_passes else 0


def _adapter(model: ModelConfig) -> AdapterJob | None:
    if model.adapter is None:
        return None
    shape = adapter_shape("teacher_model.lora", model.model_name_or_path, model.adapter)
    return AdapterJob(shape.parameters, shape.inputs, model.adapter.dropout > 0)


def _adapter_slot_parameters(model: ModelConfig) -> int:
    """The number of parameters in vLLM's adapter slots, which are as large as for the next rank that vLLM supports."""
    if model.adapter is None:
        return 0
    shape = adapter_shape("teacher_model.lora", model.model_name_or_path, model.adapter)
    return SLOTS * shape.parameters * served_rank(shape.rank) // shape.rank


def _add_engine(budget: Report, role: str, model: ModelConfig, limit: int | None) -> int:
    """Add an engine's lines.

    Returns:
        The bytes of the engine's weights on all its GPUs together; 0 if they could not be estimated.
    """
    options = model.vllm
    title = f"engine of the {role}: {model.model_name_or_path}"
    too_long = refuse_context(f"{role}_model.vllm.max_length", model.model_name_or_path, options.max_length)
    unfit = None if too_long else why_unfit(f"{role}_model.model_name_or_path", model.model_name_or_path)
    budget.refusals += [refusal for refusal in (too_long, unfit) if refusal]
    if unfit:
        return 0
    try:
        shape = read_shape(model.model_name_or_path)
    except NotEstimated as reason:
        budget.lines.append(f"{title}: not reckoned: {reason}")
        return 0
    job = EngineJob(
        shape=shape,
        number_bytes=_BYTES[options.dtype],
        gpus=options.number_of_gpus_per_instance,
        max_length=options.max_length,
        max_num_seqs=options.max_num_seqs,
        adapters=_adapter_slot_parameters(model),
    )
    memory = engine_memory(job)
    budget.lines.append(f"{title}, {shape.parameters:,} parameters, {options.dtype}, {job.gpus} × GPU")
    budget.add(
        [Part("weights (asleep: on the host)", memory.weights), Part("logits of all sequences", memory.sampling)]
    )
    budget.add([Part(f"one conversation of {options.max_length} tokens", memory.conversation)])
    if limit is not None:
        _add_cache(budget, role, options, memory, limit)
    return memory.weights * job.gpus


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
    if moment == "backward pass" and _rows_of_pass(config) > train.per_device_train_batch_size:
        suggestions.append("lower train.corrections.pass_batch_size")
    if moment == "backward pass" and mixes_corrections(config):
        suggestions.append("set train.corrections.mode=pass, or lower train.corrections.rows_per_batch")
    if moment != "engines":
        if OPTIMIZER_STATES[train.optimizer] > 2:
            suggestions.append("take an optimizer that remembers less, such as train.optimizer=adamw_bnb_8bit")
        if config.teacher_model.adapter is None:
            suggestions.append("train an adapter only (teacher_model.lora.enable=true)")
        suggestions.append("split the trainer over more GPUs, as with --config_file config/deepspeed/zero3_4GPU.yaml")
    return f"Ways out: {', or '.join(suggestions)}."
