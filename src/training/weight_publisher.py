"""Publishes the trainer's weights: writes them once, flushes them, marks the folder as complete, and has each server
load them in place."""

import time
from pathlib import Path

from src.models.policy_folder import policy_path, remove_old_policies, write_policy
from src.models.policy_version import PolicyVersion
from src.server.client import ClassroomClient
from src.training.collective import on_main_process
from src.training.context import TrainerContext
from src.training.server_assignment import AssignedServer
from src.training.sharded_save import save_adapter_together, save_together, weight_bytes


class WeightPublisher:
    """In place of TRL's `vllm_generation`, which TRL asks to sync the weights before a rollout.

    Attributes:
        policy: the version that was published last; the next batch is sampled from it.
    """

    def __init__(
        self,
        trainer: TrainerContext,
        client: ClassroomClient,
        server: AssignedServer,
        run_folder: Path,
        run_id: str,
        keep: int,
    ):
        self._trainer = trainer
        self._client = client
        self._server = server
        self._run_folder = run_folder
        self._run_id = run_id
        self._keep = keep
        self.policy = PolicyVersion(run_id, -1)

    def sync_weights(self) -> None:
        """Publish the current weights, or only the adapter if one is trained; the version is the optimizer step. All
        ranks call this together.

        Raises:
            ClassroomError: on every rank, if a server did not load them.
        """
        started = time.monotonic()
        accelerator = self._trainer.accelerator
        self.policy = PolicyVersion(self._run_id, self._trainer.state.global_step)
        folder = policy_path(self._run_folder, self.policy.version)
        needed = weight_bytes(self._trainer.model, only_trained=self._trainer.has_adapter)
        save_trained = save_adapter_together if self._trainer.has_adapter else save_together
        save_trained(self._trainer, lambda save: write_policy(folder, self.policy, save, needed))
        self._trainer.gpus.make_room()
        self._server.once_per_server(accelerator, lambda: self._client.load_weights(self.policy, folder))
        on_main_process(accelerator, lambda: remove_old_policies(self._run_folder, self._keep))
        self._trainer.record_metric("seconds/publish", time.monotonic() - started)
