"""What trainer and server tell each other about weights that go from the one's memory into the other's engine: which
tensors come, and which group of processes sends and receives them. Their bytes do not pass through HTTP."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

TensorType = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "uint8", "bool"]
"""torch's names of the types that weights may have."""
TRANSFER_ENGINE = "classroom"
"""The name of `engines/vllm/transfer_engine.py` among vLLM's ways to transfer weights."""
LARGEST_BUFFER = 2**31
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the Hub's format: its name, its type by torch's name, and its shape."""

    __pydantic_config__ = _STRICT

    name: str
    dtype: TensorType
    shape: list[Annotated[int, Field(ge=0)]]


@dataclass(frozen=True)
class TransferGroup:
    """The processes between which weights travel, as one server's workers join them. The trainer's main process has
    rank 0; the workers of all servers follow. The members meet through `nccl_unique_id_b64` on GPUs, and at
    `master_address` and `master_port` on CPUs.

    Attributes:
        id: no two groups have the same.
        rank_offset: the rank of this server's first worker.
        world_size: how many processes there are.
        packed_buffer_size_bytes: tensors are sent in buffers of at most this size; a larger tensor has its own.
        nccl_unique_id_b64: NCCL's id of the group, in base64.
        master_address, master_port: where the trainer waits for the others.
    """

    __pydantic_config__ = _STRICT

    id: Annotated[str, Field(min_length=1, max_length=64)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=LARGEST_BUFFER)]
    nccl_unique_id_b64: str | None = None
    master_address: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        if self.rank_offset >= self.world_size:
            raise ValueError(f"rank_offset is {self.rank_offset}, in a group of {self.world_size} processes")
        if (self.nccl_unique_id_b64 is None) == (self.master_address is None or self.master_port is None):
            raise ValueError("the members meet either by nccl_unique_id_b64, or at master_address and master_port")

    def as_init_info(self) -> dict[str, Any]:
        """The arguments of vLLM's `NCCLWeightTransferInitInfo`, whose names these are."""
        return {name: value for name, value in asdict(self).items() if name != "id" and value is not None}
