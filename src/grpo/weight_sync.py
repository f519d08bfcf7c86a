"""Publishing the trainer's weights to the server: written, flushed, marked complete, loaded in place."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from src.grpo.collective import on_main_process
from src.policy_folder import policy_path, remove_old_policies, write_policy
from src.turns import PolicyVersion
from src.vllm.client import ClassroomClient

if TYPE_CHECKING:
    from src.grpo.trainer import ClassroomGRPOTrainer


class WeightPublisher:
    """What TRL asks to synchronise its weights before a rollout.

    Attributes:
        policy: the version that was published last and that the next batch has to be sampled from.
    """

    def __init__(
        self, trainer: "ClassroomGRPOTrainer", client: ClassroomClient, run_folder: Path, run_id: str, keep: int
    ):
        self._trainer = trainer
        self._client = client
        self._run_folder = run_folder
        self._run_id = run_id
        self._keep = keep
        self.policy = PolicyVersion(run_id, -1)

    def sync_weights(self) -> None:
        """Publish the current weights as the version that the optimizer's step counts; all ranks take part.

        Raises:
            ClassroomError: on every rank, if the server did not load them.
        """
        started = time.monotonic()
        accelerator = self._trainer.accelerator
        self.policy = PolicyVersion(self._run_id, self._trainer.state.global_step)
        state = accelerator.get_state_dict(self._trainer.model_wrapped)
        on_main_process(accelerator, lambda: self._publish(state))
        self._trainer.record_metric("seconds/publish", time.monotonic() - started)

    def _publish(self, state: dict) -> None:
        folder = policy_path(self._run_folder, self.policy.version)

        def save(unfinished: Path) -> None:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
            model.save_pretrained(unfinished, state_dict=state)
            self._trainer.processing_class.save_pretrained(unfinished)

        write_policy(folder, self.policy, save, needed=sum(weight.nbytes for weight in state.values()))
        self._client.load_weights(self.policy, folder)
        remove_old_policies(self._run_folder, self._keep)
