"""Publishes the trainer's weights: writes them once, to disk or into shared memory, marks the folder as complete, and
has each server load them in place."""

import shutil
import time
from pathlib import Path

from classroom_rl.config.train_rl import TrainConfig
from classroom_rl.config.values import MEMORY
from classroom_rl.models.policy_folder import (
    oldest_policy,
    open_shared_memory,
    policies_folder,
    policy_name,
    remove_old_policies,
    shared_memory_folder,
    write_policy,
)
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.collective import on_main_process
from classroom_rl.trainer.context import TrainerContext
from classroom_rl.trainer.servers import AssignedServer
from classroom_rl.trainer.sharded_save import (
    Save,
    save_adapter_together,
    save_together,
    save_weights_together,
    weight_bytes,
)
from classroom_rl.trainer.weight_files import KeptFiles


class WeightPublisher:
    """In place of TRL's `vllm_generation`, which TRL asks to sync the weights before a rollout.

    Args:
        train: says where weights are published, and how many versions are kept.

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
        train: TrainConfig,
    ):
        self._trainer = trainer
        self._client = client
        self._server = server
        self._run_folder = run_folder
        self._run_id = run_id
        self._keep = train.keep_published_policies
        self._in_memory, self._disk_every = train.publish_through == MEMORY, train.publish_to_disk_every
        self._on_disk = 0
        self._kept = KeptFiles()
        self.policy = PolicyVersion(run_id, -1)

    def sync_weights(self, last: bool = False) -> None:
        """Publish the current weights, or only the adapter if one is trained; the version is the optimizer step. All
        ranks call this together.

        Args:
            last: the training ends: the weights go to disk, and shared memory is freed.

        Raises:
            ClassroomError: on every rank, if a server did not load them.
        """
        started = time.monotonic()
        accelerator = self._trainer.accelerator
        if self._trainer.rollout_func.wait_for_next():
            accelerator.wait_for_everyone()  # other ranks' conversations are played with the same engine
        step = self._trainer.state.global_step
        self.policy = PolicyVersion(self._run_id, step)
        in_memory = self._in_memory and not last and step - self._on_disk < self._disk_every
        if not in_memory:
            self._on_disk = step
        parent = on_main_process(accelerator, lambda: self._parent(in_memory))
        folder = parent / policy_name(self.policy.version)
        self._write(folder, in_memory)
        self._trainer.gpus.make_room()
        self._server.once_per_server(accelerator, lambda: self._client.load_weights(self.policy, folder))
        on_main_process(accelerator, lambda: self._remove_old(last))
        self._trainer.record_metric("seconds/publish", time.monotonic() - started)

    def _write(self, folder: Path, in_memory: bool) -> None:
        """Write the version. In memory whole weights go over those of the oldest version, if there are more than have
        to be kept: no server reads that any more."""
        trainer, whole_in_memory = self._trainer, in_memory and not self._trainer.has_adapter
        needed = weight_bytes(trainer.model, only_trained=trainer.has_adapter)

        def write(save: Save) -> None:
            over, versions = None, 1
            if whole_in_memory:
                over = oldest_policy(folder.parent, self._keep)
                versions = self._keep + 1 - len(list(folder.parent.iterdir()))  # room for all, from the first one on
            write_policy(folder, self.policy, save, versions * needed, over)

        if whole_in_memory:
            save_weights_together(trainer, write, self._kept)
        else:
            save_trained = save_adapter_together if trainer.has_adapter else save_together
            save_trained(trainer, write)

    def _parent(self, in_memory: bool) -> Path:
        return open_shared_memory(self._run_folder) if in_memory else policies_folder(self._run_folder)

    def _remove_old(self, last: bool) -> None:
        remove_old_policies(policies_folder(self._run_folder), self._keep, self.policy.version)
        shared = shared_memory_folder(self._run_folder)
        if last or not self._in_memory:  # what is there then is of a training that published through memory
            shutil.rmtree(shared, ignore_errors=True)
            self._kept.forget()
        else:
            remove_old_policies(shared, self._keep + 1, self.policy.version)  # the next is written over the oldest
