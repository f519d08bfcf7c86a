"""Estimates the memory of a training and its engines, on GPU and host, from the shape of a model. Sizes are in bytes.

The estimate is a lower bound: it counts what must be in memory, according to the source code of DeepSpeed, TRL,
transformers and vLLM at the pinned versions. It leaves out what cannot be known beforehand: fragmentation, CUDA graphs,
buffers of NCCL and of individual kernels, memory-mapped files, the operating system. So a configuration that it refuses
cannot fit, and one that it accepts should have a few GiB to spare.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
CUDA_CONTEXT = 78 * GIB // 100
"""The GPU memory of a process beside its tensors: CUDA context and libraries, as measured on an H100 (CUDA 13)."""
PROCESS = GIB
"""The approximate host memory of an idle process that has imported torch; measured values were 0.6 to 1.7 GiB."""

OPTIMIZER_STATES = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adafactor": 0,
    "sgd": 0,
    "adamw_bnb_8bit": 2,
    "paged_adamw_32bit": 8,
    "paged_adamw_8bit": 2,
    "lion_32bit": 4,
    "paged_lion_8bit": 1,
}
"""Bytes of optimizer state per trained parameter. Adafactor's state (a row and a column for each matrix) is negligible.
The states of a paged optimizer can move to host memory, but are counted as GPU memory."""

_STATES_WITH_ZERO = {"adafactor": 4}
"""Optimizers with more state under ZeRO, because it flattens all weights into one vector without rows and columns."""

NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Of a weight in NF4: a scale of 8 bits for 64 weights, and one of 32 bits for 256 of those scales."""

ZERO_BUCKET = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: the number of gradient elements in its reduction buffer."""
ZERO3_SUB_GROUP = 1_000_000_000
"""DeepSpeed's `sub_group_size`: the number of parameters that a ZeRO-3 optimizer step updates at a time."""
HEAD_TILE = (4096, 32768)
"""The size of the tiles of logits (tokens × vocabulary entries) from which TRL computes log-probs. It never holds all
logits at once."""
DISTRIBUTIONS_TILE = 2**24
"""The most logits of a tile from which distributions are compared."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its memory.

    Attributes:
        mlp: the width of a layer's MLP for one token; for a mixture of experts, the sum over its active experts.
        windows: for each layer with a KV cache, how many tokens it caches; None means all.
        normed_heads: whether queries and keys are normalised per head.
    """

    parameters: int
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    windows: tuple[int | None, ...]
    normed_heads: bool = False

    @property
    def head(self) -> int:
        """The number of parameters of the output head (and of the embedding)."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True)
class Launch:
    """How the trainer is launched.

    Attributes:
        processes: the number of processes on all `machines` together.
        zero_stage: DeepSpeed's ZeRO stage; 0 means no DeepSpeed.
        optimizer_on_host, weights_on_host: whether DeepSpeed offloads optimizer states or weights to the host.
        fsdp: whether FSDP2 splits weights, gradients and optimizer states over the processes.
    """

    processes: int = 1
    zero_stage: int = 0
    optimizer_on_host: bool = False
    weights_on_host: bool = False
    machines: int = 1
    fsdp: bool = False


@dataclass(frozen=True)
class TrainerJob:
    """What one process trains.

    Attributes:
        number_bytes: bytes per number, 2 for bfloat16 and 4 for float32.
        state_bytes: bytes of optimizer state per trained parameter, from the function `state_bytes`.
        reference: whether a reference model is loaded.
        checkpointing: whether gradient checkpointing is on.
        tokens: the number of tokens in a micro-batch.
        adapter: the adapter that is trained; None if the model's own weights are trained.
        in_4bit: whether the weights under it are in 4 bits (`teacher_model.load_in_4bit`).
        critic: the number of parameters of PPO's critic; 0 if they are negligible.
        float32_gradients: whether DeepSpeed adds up gradients in float32 (`train.grad_accum_fp32`).
        strong_tutor: the shape of the model that `train.distillation.model` names; None without one.
        distributions: whether its distributions are compared with the trained model's.
    """

    shape: ModelShape
    launch: Launch
    number_bytes: int
    state_bytes: int
    reference: bool
    checkpointing: bool
    tokens: int
    adapter: "AdapterJob | None" = None
    critic: int = 0
    float32_gradients: bool = False
    strong_tutor: ModelShape | None = None
    in_4bit: bool = False
    distributions: bool = False

    @property
    def packed(self) -> int:
        """The number of parameters in 4 bits: all but embedding and head, which are counted as one."""
        return self.shape.parameters - self.shape.head if self.in_4bit else 0

    @property
    def published(self) -> int:
        """The number of trained parameters that are published."""
        return self.shape.parameters if self.adapter is None else self.adapter.parameters

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return self.published + self.critic


@dataclass(frozen=True)
class AdapterJob:
    """A LoRA adapter: its number of parameters, the sum of the input widths of its A matrices over all layers, and
    whether it has dropout."""

    parameters: int
    inputs: int
    dropout: bool


@dataclass(frozen=True)
class Part:
    """One line of a budget: a name and a size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class TrainerMemory:
    """The memory of one process: `held` is always in use; `backward` is added during the backward pass, `step` during
    the optimizer step."""

    held: tuple[Part, ...]
    backward: tuple[Part, ...]
    step: tuple[Part, ...]


def state_bytes(optimizer: str, zero_stage: int) -> int:
    """Bytes of optimizer state per trained parameter, with DeepSpeed (`zero_stage` above 0) or without."""
    size = OPTIMIZER_STATES[optimizer]
    return _STATES_WITH_ZERO.get(optimizer, size) if zero_stage else size


def critic_parameters(hidden: int) -> int:
    """The number of parameters of PPO's critic with `train.ppo.head=mlp` (`ValueHead` in trainer/critic.py). `hidden`
    is the model's width."""
    return 2 * hidden * (hidden + 2) + 1


def total(parts: Sequence[Part]) -> int:
    """The sum of the parts' sizes."""
    return sum(part.size for part in parts)


def trainer_memory(job: TrainerJob) -> TrainerMemory:
    """The memory of one process for weights, gradients, optimizer, reference model and activations, sharded over the
    processes as by ZeRO or FSDP2."""
    held, backward, step = _with_zero(job) if job.launch.zero_stage else _without_zero(job)
    context = Part("CUDA context", CUDA_CONTEXT)
    return TrainerMemory((*held, context), (*backward, *activations(job)), step)


def _with_zero(job: TrainerJob) -> tuple[list[Part], list[Part], tuple[Part, ...]]:
    """With DeepSpeed, which casts the weights to the training's precision and adds float32 master weights, even if the
    precision is float32. Returns the parts as in `TrainerMemory`."""
    shape, launch, size = job.shape, job.launch, job.number_bytes
    trained, share = job.trained, _share(job.trained, launch.processes)
    parameters = shape.parameters + (trained if job.adapter else job.critic)
    weights_held = _share(parameters, launch.processes) if launch.zero_stage == 3 else parameters
    held = [] if launch.weights_on_host else [Part(f"weights ({8 * size} bit)", (weights_held - job.packed) * size)]
    held += _packed(job)
    if not launch.optimizer_on_host:
        held.append(Part("master weights (32 bit)", share * 4))
        held.append(Part("optimizer states", share * job.state_bytes))
    sharded = launch.processes if launch.zero_stage == 3 else 1
    if job.reference:
        held.append(Part(f"reference model ({8 * size} bit)", _share(shape.parameters, sharded) * size))
    held += _strong_tutor(job, sharded)
    accumulated = 4 if job.float32_gradients else size
    gradients = Part("gradients", (trained if launch.zero_stage == 1 else share) * accumulated)
    buffers = [Part("ZeRO's gradient bucket", ZERO_BUCKET * size)]
    if launch.zero_stage == 3:
        buffers.append(Part("weights gathered for a layer", shape.head * size))
    if launch.optimizer_on_host:
        return held, buffers, ()
    updated_at_once = min(share, ZERO3_SUB_GROUP) if launch.zero_stage == 3 else share
    step = (gradients, Part("gradients (32 bit)", updated_at_once * 4))
    return held, [gradients, *buffers], step


def _without_zero(job: TrainerJob) -> tuple[list[Part], list[Part], tuple[Part, ...]]:
    """Without DeepSpeed: trained weights, gradients and optimizer states are float32; frozen weights (below an adapter)
    are in the training's precision. Returns parts as `_with_zero` does.

    FSDP2 splits all of them. It gathers a layer's weights in the training's precision; those of head and embedding
    stay gathered between forward and backward pass. TRL gathers a whole reference model while it computes log-probs.
    Otherwise every process holds all of them, and autocast makes bfloat16 copies of the weights.
    """
    shape, launch, size = job.shape, job.launch, job.number_bytes
    processes = launch.processes if launch.fsdp else 1
    share = _share(job.trained, processes)
    if job.adapter is None:
        held = [Part("weights (32 bit)", share * 4)]
    else:
        frozen = Part(f"weights ({8 * size} bit)", (_share(shape.parameters, processes) - job.packed) * size)
        held = [frozen, *_packed(job), Part("adapter (32 bit)", share * 4)]
    states = share * job.state_bytes
    if job.state_bytes in (1, 2) and job.adapter is None and not launch.fsdp:
        # transformers makes bitsandbytes keep the states of embeddings in 32 bits instead of 8.
        states += 3 * job.state_bytes * shape.head
    held.append(Part("optimizer states", states))
    if job.reference:
        held.append(Part("reference model (32 bit)", _share(shape.parameters, processes) * 4))
    held += _strong_tutor(job, 1)  # FSDP2 splits it, and gathers all of it while it reads
    gradients = [Part("gradients", share * 4)]
    if launch.fsdp:
        return held, [*gradients, Part("weights gathered for head and embedding", shape.head * size)], (*gradients,)
    if launch.processes > 1:
        gradients.append(Part("gradient buckets of DDP", share * 4))
    copies = [Part("autocast's copies of weights", share * 2)] if size == 2 else []
    return held, [*gradients, *copies], (*gradients,)


def _packed(job: TrainerJob) -> list[Part]:
    return [Part("weights (4 bit)", int(job.packed * NF4_BITS / 8))] if job.packed else []


def _strong_tutor(job: TrainerJob, processes: int) -> list[Part]:
    """Weights that are never trained stay in the training's precision; they are split over so many processes."""
    if job.strong_tutor is None:
        return []
    size = job.number_bytes
    return [Part(f"strong tutor ({8 * size} bit)", _share(job.strong_tutor.parameters, processes) * size)]


def activations(job: TrainerJob) -> list[Part]:
    """What the forward pass of a micro-batch stores for the backward pass."""
    shape, layer = job.shape, layer_activations(job.shape, job.number_bytes) * job.tokens
    if job.adapter is not None and job.adapter.dropout:  # it stores a copy and a mask of each of its inputs
        layer += job.adapter.inputs * (job.number_bytes + 1) * job.tokens // shape.layers
    if not job.checkpointing:
        return [Part("activations", layer * shape.layers), Part("output head", head_memory(job))]
    # Without DeepSpeed and FSDP, trained weights are float32, and so are the hidden states between layers.
    bytes_per_number = job.number_bytes if job.launch.zero_stage or job.launch.fsdp or job.adapter else 4
    return [
        Part("activations kept (checkpoints)", shape.layers * shape.hidden * bytes_per_number * job.tokens),
        # The head's backward pass ends before the first layer is recomputed, so only the larger of the two counts.
        Part("one layer again, or output head", max(layer, head_memory(job))),
    ]


def layer_activations(shape: ModelShape, size: int) -> int:
    """Bytes per token that one layer of a transformers model stores for the backward pass, with a gated MLP and without
    materialised attention scores.

    The two norms store their input in float32 and their result. The projections of attention and MLP store their
    inputs. Attention stores queries, keys, values (repeated for all heads) and its result. The MLP stores gate,
    activated gate, up and their product.

    Args:
        size: bytes per number.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (4 + size) * shape.hidden + (4 + size) * (queries + keys) * shape.normed_heads
    return norms + 2 * size * shape.hidden + 4 * size * queries + 4 * size * shape.mlp


def head_memory(job: TrainerJob) -> int:
    """Bytes for the output head's backward pass: a tile of logits, the float32 gradient of its matrix, if it is
    trained, and the float32 gradient of the last hidden states. Distributions are compared in smaller tiles, of which
    some ten are alive at once."""
    tokens, vocabulary_entries = HEAD_TILE
    tile = min(job.tokens, tokens) * vocabulary_entries * job.number_bytes
    if job.distributions:
        tile = max(tile, 10 * 4 * DISTRIBUTIONS_TILE)
    matrix = 4 * job.shape.head if job.adapter is None else 0
    return tile + matrix + 4 * job.tokens * job.shape.hidden


def _share(parameters: int, processes: int) -> int:
    """The number of parameters per process, rounded up."""
    return -(-parameters // processes)


@dataclass(frozen=True)
class EngineJob:
    """One vLLM engine, as `VllmConfig` describes it.

    Attributes:
        number_bytes: bytes per number of weights and KV cache.
        adapters: the number of parameters for which its adapter slots reserve memory.
    """

    shape: ModelShape
    number_bytes: int
    gpus: int
    max_length: int
    max_num_seqs: int
    adapters: int = 0


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one engine on each of its GPUs, in bytes. `sampling` is for the logits of all sequences;
    `conversation` is the KV cache of one conversation of `max_length` tokens."""

    weights: int
    sampling: int
    conversation: int

    def cache(self, share: int) -> int:
        """Bytes of the engine's share of the GPU that remain for the KV cache; negative if the share is too small even
        without a cache."""
        return share - self.weights - self.sampling


def engine_memory(job: EngineJob) -> EngineMemory:
    """The memory of an engine on each of its GPUs. Weights and KV cache are split over the GPUs, but each GPU holds at
    least one key-value head."""
    shape = job.shape
    cached_heads = max(1, shape.kv_heads // job.gpus)
    per_layer_and_token = 2 * cached_heads * shape.head_dim * job.number_bytes
    tokens = sum(job.max_length if window is None else min(window, job.max_length) for window in shape.windows)
    return EngineMemory(
        weights=_share(shape.parameters + job.adapters, job.gpus) * job.number_bytes,
        sampling=job.max_num_seqs * shape.vocabulary * 4,
        conversation=tokens * per_layer_and_token,
    )


def trainer_on_host(job: TrainerJob, on_cpu: bool, versions: int = 0) -> list[Part]:
    """The host memory of the training processes on one machine, at its peak.

    Args:
        on_cpu: whether the training runs on CPUs.
        versions: the number of published versions in shared memory.
    """
    launch, size, share = job.launch, job.number_bytes, _share(job.trained, job.launch.processes)
    parts = [Part("process", PROCESS)]
    if on_cpu:
        memory = trainer_memory(job)
        peak = total(memory.held) - CUDA_CONTEXT + max(total(memory.backward), total(memory.step))
        parts.append(Part("what the trainer holds and computes", peak))
    else:
        if launch.fsdp:  # one process gathers the whole checkpoint; here it is divided evenly among the processes
            parts.append(Part("a checkpoint's weights and optimizer states", share * (4 + job.state_bytes)))
        if launch.optimizer_on_host:
            parts.append(Part("master weights, gradients (32 bit)", share * 8))
            parts.append(Part("optimizer states", share * job.state_bytes))
        if launch.weights_on_host:
            shapes = [job.shape, job.shape if job.reference else None, job.strong_tutor]
            weights = sum(_share(shape.parameters, launch.processes) for shape in shapes if shape is not None) * size
            parts.append(Part(f"weights ({8 * size} bit)", weights))
    processes = _share(launch.processes, launch.machines)
    published = Part(f"{versions} × published weights (/dev/shm)", versions * job.published * size)
    return [*(Part(f"{processes} × trainer: {part.name}", processes * part.size) for part in parts), published]


def refuse_host(parts: Sequence[Part], job: TrainerJob | None, machine: int) -> str | None:
    """A message with suggestions if the parts need more than the machine's memory; None if they fit."""
    needed = total(parts)
    if needed <= machine:
        return None
    suggestions = ["a machine with more memory"]
    if job is not None and (job.launch.optimizer_on_host or job.launch.weights_on_host):
        suggestions.append(
            "less offloading in accelerate's configuration (offload_optimizer_device, offload_param_device)"
        )
    if any("/dev/shm" in part.name for part in parts):
        suggestions.append("train.publish_through=disk, or a smaller train.keep_published_policies")
    if any("asleep" in part.name for part in parts):
        suggestions.append(
            "smaller models, fewer copies (vllm.data_parallel_size), or GPUs of the server's own and "
            "generation.colocate=false, with which none sleeps"
        )
    if job is not None and job.launch.processes > job.launch.machines:
        suggestions.append("fewer processes on each machine")
    return (
        f"A machine with {gib(machine)} of memory cannot hold what server and trainer need of it: {gib(needed)}, most "
        f"of it {largest(parts, 3)}. Ways out: {', or '.join(suggestions)}."
    )


def largest(parts: Sequence[Part], count: int) -> str:
    """The names and sizes of the largest parts, for a message."""
    chosen = sorted(parts, key=lambda part: part.size, reverse=True)[:count]
    return ", ".join(f"{part.name} {gib(part.size)}" for part in chosen)


def gib(size: int) -> str:
    """A size in GiB; in MiB below a tenth of that."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / 2**20:.2f} MiB"
