"""A file in the run folder that says that the trainer uses the GPUs, for a server that starts meanwhile.

A server forgets that its engines slept (`server/engine_sleep.py`) when its process ends. If it dies while the
trainer steps and starts again, it would find no room on the GPU, or take the trainer's. So the trainer writes the file
once the engines sleep and removes it when it has made room; a server loads no model before that. A trainer that died
holds no lease, whatever the file says.
"""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from classroom_rl.errors import ConfigError, DeadlineExceeded
from classroom_rl.server.engine_sleep import is_alive
from classroom_rl.server.schemas import ProcessId
from classroom_rl.system.run_lock import is_claimed
from classroom_rl.system.storage import storage_errors, write_whole

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_MESSAGES = 30.0


class GpuLease:
    """The trainer's lease on the GPUs of one server.

    Args:
        run_folder: the folder that server and trainer share.
        server_index: the server's place in `generation.server_urls`.
    """

    def __init__(self, run_folder: Path, server_index: int = 0):
        self._run_folder = run_folder
        self._path = run_folder / (f"gpu_lease.{server_index}.json" if server_index else "gpu_lease.json")

    def take(self, trainer: Sequence[ProcessId]) -> None:
        """Record that these processes use the GPUs from now on.

        Raises:
            StorageError: if it cannot be written.
        """
        write_whole(self._path, json.dumps([each.model_dump() for each in trainer]))

    def end(self) -> None:
        """End the lease: the GPUs have room for the engines again.

        Raises:
            StorageError: if the file cannot be removed.
        """
        with storage_errors(self._path):
            self._path.unlink(missing_ok=True)

    def holders(self) -> list[ProcessId]:
        """The processes of a living trainer that use the GPUs; empty if the engines have room.

        Raises:
            ConfigError: if the file is damaged.
        """
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        try:
            written = [ProcessId.model_validate(each) for each in json.loads(text)]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._path} is damaged and does not say which processes of a trainer use the GPUs. Remove it if no "
                "trainer runs."
            ) from error
        if not is_claimed("train_rl", self._run_folder):
            return []  # also if the trainer ran on another machine, or in a container that ended
        return [each for each in written if is_alive(each)]

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the trainer has made room or has ended.

        Raises:
            DeadlineExceeded: if neither happened within `timeout_s` seconds.
        """
        started, told = time.monotonic(), None
        while holders := self.holders():
            now = time.monotonic()
            pids = ", ".join(f"{each.pid} on {each.host}" for each in holders)
            if now - started > timeout_s:
                raise DeadlineExceeded(
                    f"The trainer (process {pids}) has not made room on the GPU within generation.sample_timeout_s = "
                    f"{timeout_s:g} s, so no engine was loaded. Its log is trainer.log in {self._run_folder}; if it "
                    "hangs, end it; then start the server again."
                )
            if told is None or now - told >= _SECONDS_BETWEEN_MESSAGES:
                logger.info(
                    "the trainer (process %s) uses the GPU: the engines are loaded when it makes room (%.0f s, at most "
                    "%.0f s)",
                    pids,
                    now - started,
                    timeout_s,
                )
                told = now
            time.sleep(_SECONDS_BETWEEN_LOOKS)
