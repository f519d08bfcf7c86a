"""The interface of a trainer that the parts of a training use, for any algorithm."""

from collections.abc import Sequence
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.servers import SharedGpus


class TrainerContext(Protocol):
    """A transformers `Trainer` with this project's additions.

    Attributes:
        policy: the version that was published last; the next batch is sampled from it.
        gpus: puts the server's engines to sleep and wakes them, if trainer and server share GPUs.
        has_adapter: whether an adapter is trained instead of the model's own weights.
        steps_of_batch: optimizer steps on each batch.
    """

    accelerator: Accelerator
    state: TrainerState
    model: PreTrainedModel
    model_wrapped: Any
    processing_class: PreTrainedTokenizerBase
    gpus: SharedGpus
    has_adapter: bool

    steps_of_batch: int

    @property
    def policy(self) -> PolicyVersion: ...

    def prompts_of(self, step: int) -> list[str]:
        """The prompts of this process's part of the batch that begins at an optimizer step."""

    def record_metric(self, name: str, value: float) -> None:
        """Log a metric of this step; values are averaged over processes."""

    def show_conversations(self, records: Sequence[Trajectory]) -> None:
        """Send a batch's conversations to a tracker that can show them, if one is configured."""
