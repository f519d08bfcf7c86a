"""How much GPU memory a training and its engines need: arithmetic on a model's shape. Everything is in bytes.

Counted is what has to be there, from the sources of DeepSpeed, TRL, transformers and vLLM at the pinned versions. Left
out is what cannot be known beforehand: the allocator's fragments, CUDA graphs, buffers of NCCL and of single kernels.
So what this refuses cannot fit, and what it lets pass should have a few GiB to spare.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
CUDA_CONTEXT = GIB // 2
"""What a process has on a GPU before it does anything: its CUDA context and libraries, roughly."""

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
"""Bytes per trained parameter that an optimizer remembers; what adafactor keeps (a row and a column for each matrix) is
next to nothing. The pages of a paged optimizer can go to the host, but count as if they stayed."""

_STATES_WITH_ZERO = {"adafactor": 4}
"""Where it is more under ZeRO, which strings all weights together: a vector has no rows and columns."""

_ZERO_BUCKET = 500_000_000
"""DeepSpeed's `reduce_bucket_size`, in numbers: gradients are gathered in such a buffer."""
_ZERO3_SUB_GROUP = 1_000_000_000
"""DeepSpeed's `sub_group_size`: ZeRO-3's optimizer steps take that many numbers at a time."""
HEAD_TILE = (4096, 32768)
"""TRL computes log-probs from tiles of the logits, of so many tokens × words of the vocabulary, never from all."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model counts for its memory.

    `mlp` is the width of a layer's MLP as one token meets it (of a mixture: that of its experts together). `windows`
    has one entry for each layer that caches keys and values: how many tokens, None for all. `normed_heads`: queries and
    keys are normalised head by head.
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
        """Numbers in the matrix of the output head (and of the embedding)."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True)
class Launch:
    """How the trainer runs: `zero_stage` 0 is without DeepSpeed; what DeepSpeed offloads is not on the GPU. `processes`
    are those on all `machines`."""

    processes: int = 1
    zero_stage: int = 0
    optimizer_on_host: bool = False
    weights_on_host: bool = False
    machines: int = 1


@dataclass(frozen=True)
class TrainerJob:
    """What one process trains: `number_bytes` 2 for bfloat16, 4 for float32; `state_bytes` from OPTIMIZER_STATES;
    `tokens` of a micro-batch. `adapter`: what is trained in place of the model's own weights; None: those."""

    shape: ModelShape
    launch: Launch
    number_bytes: int
    state_bytes: int
    reference: bool
    checkpointing: bool
    tokens: int
    adapter: "AdapterJob | None" = None

    @property
    def trained(self) -> int:
        """How many numbers learn."""
        return self.shape.parameters if self.adapter is None else self.adapter.parameters


@dataclass(frozen=True)
class AdapterJob:
    """A LoRA adapter: its parameters, the numbers per token that its matrices A take in over all layers, and whether it
    has dropout."""

    parameters: int
    inputs: int
    dropout: bool


@dataclass(frozen=True)
class Part:
    """One line of a budget."""

    name: str
    size: int


@dataclass(frozen=True)
class TrainerMemory:
    """One process's memory: `held` always, `backward` besides while gradients are computed, `step` besides while the
    optimizer steps."""

    held: tuple[Part, ...]
    backward: tuple[Part, ...]
    step: tuple[Part, ...]


def state_bytes(optimizer: str, zero_stage: int) -> int:
    """Bytes per trained parameter that an optimizer remembers, with DeepSpeed (`zero_stage` above 0) or without."""
    known = OPTIMIZER_STATES[optimizer]
    return _STATES_WITH_ZERO.get(optimizer, known) if zero_stage else known


def total(parts: Sequence[Part]) -> int:
    """The sizes' sum."""
    return sum(part.size for part in parts)


def trainer_memory(job: TrainerJob) -> TrainerMemory:
    """Weights, gradients, optimizer, reference model and activations, split over the processes as ZeRO splits them."""
    if job.launch.zero_stage:
        held, gradients, step = _with_zero(job)
    else:
        held, gradients, step = _without_zero(job)
    context = Part("CUDA context", CUDA_CONTEXT)
    return TrainerMemory((*held, context), (*gradients, *activations(job)), step)


def _with_zero(job: TrainerJob) -> tuple[list[Part], list[Part], tuple[Part, ...]]:
    """DeepSpeed casts the weights to the training's precision and keeps float32 master weights besides, of float32
    weights, too."""
    shape, launch, size = job.shape, job.launch, job.number_bytes
    trained, share = job.trained, _share(job.trained, launch.processes)
    parameters = shape.parameters + (trained if job.adapter else 0)
    kept = _share(parameters, launch.processes) if launch.zero_stage == 3 else parameters
    held = [] if launch.weights_on_host else [Part(f"weights ({8 * size} bit)", kept * size)]
    if not launch.optimizer_on_host:
        held.append(Part("master weights (32 bit)", share * 4))
        held.append(Part("optimizer states", share * job.state_bytes))
    if job.reference:
        held.append(Part(f"reference model ({8 * size} bit)", kept * size))
    gradients = Part("gradients", (trained if launch.zero_stage == 1 else share) * size)
    while_computed = [Part("ZeRO's gradient bucket", _ZERO_BUCKET * size)]
    if launch.zero_stage == 3:
        while_computed.append(Part("weights gathered for a layer", shape.head * size))
    if launch.optimizer_on_host:
        return held, while_computed, ()
    stepped = min(share, _ZERO3_SUB_GROUP) if launch.zero_stage == 3 else share
    step = (gradients, Part("gradients (32 bit)", stepped * 4))
    return held, [gradients, *while_computed], step


def _without_zero(job: TrainerJob) -> tuple[list[Part], list[Part], tuple[Part, ...]]:
    """float32 weights, gradients and states in every process; autocast makes bfloat16 copies of the weights. Weights
    beside an adapter do not learn and are in the training's precision from the beginning."""
    parameters = job.trained
    # bitsandbytes keeps the 8-bit states of embeddings in 32 bits, as transformers tells it to.
    embedded = job.shape.head if job.state_bytes in (1, 2) and job.adapter is None else 0
    states = (parameters - embedded) * job.state_bytes + embedded * job.state_bytes * 4
    held = [Part("weights (32 bit)", parameters * 4), Part("optimizer states", states)]
    if job.adapter is not None:
        size = job.number_bytes
        held[0] = Part("adapter (32 bit)", parameters * 4)
        held.insert(0, Part(f"weights ({8 * size} bit)", job.shape.parameters * size))
    if job.reference:
        held.append(Part("reference model (32 bit)", parameters * 4))
    gradients = [Part("gradients", parameters * 4)]
    if job.launch.processes > 1:
        gradients.append(Part("gradient buckets of DDP", parameters * 4))
    copies = [Part("autocast's copies of weights", parameters * 2)] if job.number_bytes == 2 else []
    return held, [*gradients, *copies], tuple(gradients)


def activations(job: TrainerJob) -> list[Part]:
    """What a micro-batch's forward pass leaves for its backward pass."""
    shape, layer = job.shape, layer_activations(job.shape, job.number_bytes) * job.tokens
    layer += adapter_activations(job) * job.tokens // shape.layers
    if not job.checkpointing:
        return [Part("activations", layer * shape.layers), Part("output head", head_memory(job))]
    # Without DeepSpeed the weights that learn are float32, and so is what goes from layer to layer.
    stream = job.number_bytes if job.launch.zero_stage or job.adapter else 4
    return [
        Part("activations kept (checkpoints)", shape.layers * shape.hidden * stream * job.tokens),
        # The head is through before the first layer is computed again.
        Part("one layer again, or output head", max(layer, head_memory(job))),
    ]


def adapter_activations(job: TrainerJob) -> int:
    """Bytes per token that an adapter keeps over all layers: with dropout, a copy of each of its inputs, and masks."""
    if job.adapter is None or not job.adapter.dropout:
        return 0
    return job.adapter.inputs * (job.number_bytes + 1)


def layer_activations(shape: ModelShape, size: int) -> int:
    """Bytes per token that a layer of a transformers model with gated MLP keeps, attention computed without its matrix.

    Two norms, computed in float32, keep their input so and their result; the projections of attention and MLP keep
    their inputs; attention keeps queries, keys, values (repeated for all heads) and its result; the MLP keeps gate,
    activated gate, up and their product.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (4 + size) * shape.hidden + (4 + size) * (queries + keys) * shape.normed_heads
    return norms + 2 * size * shape.hidden + 4 * size * queries + 4 * size * shape.mlp


def head_memory(job: TrainerJob) -> int:
    """A tile of logits, the float32 gradient of the head's matrix where it learns, and that of the last hidden
    states."""
    tokens, words = HEAD_TILE
    tile = min(job.tokens, tokens) * words * job.number_bytes
    matrix = 4 * job.shape.head if job.adapter is None else 0
    return tile + matrix + 4 * job.tokens * job.shape.hidden


def _share(parameters: int, processes: int) -> int:
    return -(-parameters // processes)


@dataclass(frozen=True)
class EngineJob:
    """One vLLM engine, as `VllmConfig` describes it; `number_bytes` of weights and cache. `adapters`: numbers that it
    has room for in its slots for adapters."""

    shape: ModelShape
    number_bytes: int
    gpus: int
    max_length: int
    max_num_seqs: int
    adapters: int = 0


@dataclass(frozen=True)
class EngineMemory:
    """One engine on each of its GPUs. `conversation` is the cache of one conversation of `max_length` tokens."""

    weights: int
    sampling: int
    conversation: int

    def cache(self, share: int) -> int:
        """What is left for the cache of a share of the GPU; negative if the share is too small for the rest."""
        return share - self.weights - self.sampling


def engine_memory(job: EngineJob) -> EngineMemory:
    """Weights and cache are split over the engine's GPUs, but a GPU has at least one head of keys and values."""
    shape = job.shape
    cached_heads = max(1, shape.kv_heads // job.gpus)
    per_layer_and_token = 2 * cached_heads * shape.head_dim * job.number_bytes
    tokens = sum(job.max_length if window is None else min(window, job.max_length) for window in shape.windows)
    return EngineMemory(
        weights=_share(shape.parameters + job.adapters, job.gpus) * job.number_bytes,
        sampling=job.max_num_seqs * shape.vocabulary * 4,
        conversation=tokens * per_layer_and_token,
    )
