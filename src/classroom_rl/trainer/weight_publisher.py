"""Publishes the trainer's weights: writes them once, to disk or into shared memory, marks the folder as complete, and
has each server load them in place; or sends them from the trainer's memory into the servers' engines. With more servers
than processes, a server that is lost misses a version, and gets the next one once it is back."""

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import Trainer

from classroom_rl.config.values import MEMORY, NCCL
from classroom_rl.errors import DeadlineExceeded, EngineFailure
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
from classroom_rl.models.weight_transfer import TensorInfo
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.collective import on_main_process
from classroom_rl.trainer.servers import clients_of_all_servers
from classroom_rl.trainer.session import TrainingSession
from classroom_rl.trainer.sharded_save import (
    Save,
    Weights,
    described_weights,
    gathered_weights,
    save_adapter_together,
    save_together,
    save_weights_together,
    trained_model,
    use_together,
    weight_bytes,
)
from classroom_rl.trainer.weight_files import KeptFiles
from classroom_rl.trainer.weight_sender import WeightSender

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes versions of the policy, before each batch and at the end.

    Args:
        session: the server, the run folder, and the configuration of where weights are published and how many versions
            are kept.

    Attributes:
        sends: whether they are sent from memory to memory. A server that restarts has no weights then until they are
            published again.
        can_repeat: whether a version that a server lacks is published again: if it is sent, and with more servers than
            processes, where one may have been away when it was published.
    """

    def __init__(self, session: TrainingSession):
        train = session.config.train
        self._client, self._server, self._gpus = session.client, session.server, session.gpus
        self._generation = session.config.generation
        self._run_folder, self._run_id = session.run_folder, session.run_id
        self._has_adapter = session.config.policy_model.adapter is not None
        self._keep = train.keep_published_policies
        self._in_memory, self._disk_every = train.publish_through == MEMORY, train.publish_to_disk_every
        self.sends = train.publish_through == NCCL
        self.can_repeat = self.sends or isinstance(session.client, BalancedServers)
        self._on_disk = 0
        self._kept = KeptFiles()
        self._sender: WeightSender | None = None

    def publish(self, trainer: Trainer, last: bool = False) -> PolicyVersion:
        """Publish the current weights, or only the adapter if one is trained; the version is the optimizer step. All
        processes call this together.

        Args:
            last: the training ends: the weights go to disk, and shared memory is freed.

        Raises:
            ClassroomError: on every process, if a server did not load them.
        """
        accelerator, step = trainer.accelerator, trainer.state.global_step
        policy = PolicyVersion(self._run_id, step)
        to_disk = last or not (self._in_memory or self.sends) or step - self._on_disk >= self._disk_every
        if to_disk:
            self._on_disk = step
        if to_disk or not self.sends:
            parent = on_main_process(accelerator, lambda: self._parent(in_memory=not to_disk))
            folder = parent / policy_name(step)
            self._write(trainer, policy, folder, in_memory=not to_disk)
        if self.sends:
            self._send(trainer, policy)
        else:
            self._gpus.make_room()
            self._server.once_per_server(accelerator, lambda: self._client.load_weights(policy, folder))
        on_main_process(accelerator, lambda: self._remove_old(step, last))
        return policy

    def _send(self, trainer: Trainer, policy: PolicyVersion) -> None:
        """Send a version to all servers, again if a server fails meanwhile and comes back."""
        model, accelerator = trained_model(trainer), trainer.accelerator
        if self._sender is None:
            timeout_s = self._generation.load_weights_timeout_s
            # accelerate names the device of a single process without its number, and vLLM's communicator with it.
            device = accelerator.device
            device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
            self._sender = WeightSender(clients_of_all_servers(self._generation), device, timeout_s)
        tensors = described_weights(model)
        limit_s = self._generation.server_start_timeout_s
        give_up_at = time.monotonic() + limit_s
        sent = False
        while not sent:
            on_main_process(accelerator, lambda: self._wait_for_servers(self._sender, limit_s))
            pieces = gathered_weights(model, accelerator.is_main_process, accelerator.device)
            try_to_send = partial(self._try_to_send, policy, tensors, pieces, give_up_at)
            sent = use_together(trainer, pieces, try_to_send)

    def _wait_for_servers(self, sender: WeightSender, timeout_s: float) -> None:
        if isinstance(self._client, BalancedServers):
            sender.send_to(self._client.reachable(timeout_s))
        else:
            sender.wait_for_servers(timeout_s)

    def _try_to_send(
        self, policy: PolicyVersion, tensors: Sequence[TensorInfo], pieces: Iterator[Weights], give_up_at: float
    ) -> bool:
        try:
            self._sender.send(policy, tensors, pieces)
        except (DeadlineExceeded, EngineFailure) as error:
            if time.monotonic() > give_up_at:
                raise
            logger.warning("policy %s is sent again, because a server has not received all of it: %s", policy, error)
            return False
        return True

    def _write(self, trainer: Trainer, policy: PolicyVersion, folder: Path, in_memory: bool) -> None:
        """Write the version. In memory whole weights go over those of the oldest version, if there are more than have
        to be kept: no server reads that any more."""
        whole_in_memory = in_memory and not self._has_adapter
        needed = weight_bytes(trainer.model, only_trained=self._has_adapter)

        def write(save: Save) -> None:
            overwritten, versions = None, 1
            if whole_in_memory:
                overwritten = oldest_policy(folder.parent, self._keep)
                versions = self._keep + 1 - len(list(folder.parent.iterdir()))  # room for all, from the first one on
            write_policy(folder, policy, save, versions * needed, overwritten)

        if whole_in_memory:
            save_weights_together(trainer, write, self._kept)
        else:
            save_trained = save_adapter_together if self._has_adapter else save_together
            save_trained(trainer, write)

    def _parent(self, in_memory: bool) -> Path:
        return open_shared_memory(self._run_folder) if in_memory else policies_folder(self._run_folder)

    def _remove_old(self, step: int, last: bool) -> None:
        remove_old_policies(policies_folder(self._run_folder), self._keep, step)
        shared_folder = shared_memory_folder(self._run_folder)
        if last or not self._in_memory:  # what is there then is of a training that published through memory
            shutil.rmtree(shared_folder, ignore_errors=True)
            self._kept.forget()
        else:
            remove_old_policies(shared_folder, self._keep + 1, step)  # the next is written over the oldest
