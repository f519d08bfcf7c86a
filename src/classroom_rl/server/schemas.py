"""Request and response models of the server's HTTP API, used by the routes, the client and the journal."""

from pydantic import BaseModel, ConfigDict, Field

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo, TransferGroup
from classroom_rl.rollout.engine import EngineHealth
from classroom_rl.rollout.requests import StrictModel

LARGEST_BODY = 64 * 1024**2
"""The most bytes that a request's body may have: 16 KiB for each conversation of the largest batch."""


class PlayedResponse(BaseModel):
    """Response of `POST /play_conversations`: the policy is not needed for this request any more, so other weights may
    be loaded."""

    request_id: str


class RewardRequest(StrictModel):
    """Body of `POST /get_{name}_reward`: conversation ids."""

    conversations: list[str] = Field(min_length=1)


class RewardResponse(BaseModel):
    """One reward per id, null for a conversation without a verdict."""

    rewards: list[float | None]


class LoadWeightsRequest(StrictModel):
    """Body of `POST /load_weights`: a folder inside the run folder with a complete published policy."""

    run_id: str = Field(min_length=1)
    version: int = Field(ge=0)
    path: str


class ReceiveWeightsRequest(StrictModel):
    """Body of `POST /weights/receive`: the group in which the trainer sends this policy's weights now, and all tensors
    in the order in which they come. If the engine's workers are not in the group, they join it first."""

    run_id: str = Field(min_length=1)
    version: int = Field(ge=0)
    group: TransferGroup
    tensors: list[TensorInfo] = Field(min_length=1)


class LoadWeightsResponse(BaseModel):
    """Response of `POST /load_weights` and `POST /weights/receive`: the loaded policy, and a fingerprint of its
    weights. `seconds` includes the wait for turns in flight."""

    policy: PolicyVersion
    seconds: float
    weights: str = ""


class ProcessId(StrictModel):
    """A process on a machine; `started` (seconds since 1970) distinguishes it from a later one with the same id."""

    host: str
    pid: int
    started: float


class SleepRequest(StrictModel):
    """Body of `POST /sleep`: the trainer's processes. When all of them have ended, the engines wake."""

    borrowers: list[ProcessId] = Field(min_length=1)


class SleepResponse(BaseModel):
    """Response of `POST /sleep` and `POST /wake_up`: whether each role's engine sleeps now, and how long it took."""

    asleep: dict[str, bool]
    seconds: float


class Health(BaseModel):
    """Response of `GET /health`. `server_index` is the server's position in `generation.server_urls`. `reward_weights`
    are the weights with which it sums up the rewards. `plays` holds the configuration values that its conversations
    depend on, as text by config key; null if the server does not say. In JSON, `roles` is called `seats`: programs that
    watch servers know it by that name."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    status: str
    roles: dict[str, EngineHealth] = Field(alias="seats")
    policy: PolicyVersion
    run_folder: str
    server_index: int = 0
    reward_weights: dict[str, float] | None = None
    plays: dict[str, str] | None = None
    running_requests: list[str]
    running_conversations: int
    finished_conversations: int
