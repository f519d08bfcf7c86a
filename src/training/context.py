"""What the parts of a training need of its trainer, whatever its algorithm."""

from collections.abc import Sequence
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from src.models.policy_version import PolicyVersion
from src.rollout.trajectory import Trajectory
from src.training.gpu_sharing import SharedGpus


class TrainerContext(Protocol):
    """A trainer of transformers, with what this project adds to one.

    Attributes:
        policy: the version that was published last, and that the next batch has to be sampled from.
        gpus: whose turn it is on GPUs that trainer and server share.
        has_adapter: whether an adapter is trained in place of the model's own weights.
    """

    accelerator: Accelerator
    state: TrainerState
    model: PreTrainedModel
    model_wrapped: Any
    processing_class: PreTrainedTokenizerBase
    gpus: SharedGpus
    has_adapter: bool

    @property
    def policy(self) -> PolicyVersion: ...

    def record_metric(self, name: str, value: float) -> None:
        """Log a number with this step's metrics; it is averaged over processes."""

    def show_conversations(self, records: Sequence[Trajectory]) -> None:
        """Send a batch's conversations to the tracker, if it shows such."""
