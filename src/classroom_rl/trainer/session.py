"""What a training begins with: the claimed run folder, the problems, the server, and the checkpoint."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState
from transformers.utils.logging import disable_progress_bar

from classroom_rl.config.checks import check_machines
from classroom_rl.config.load import record_run
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import NCCL
from classroom_rl.errors import ConfigError
from classroom_rl.memory.sources import machines_of
from classroom_rl.models.lora import check_checkpoint
from classroom_rl.results.hub import check_push
from classroom_rl.results.step_time import record_placement
from classroom_rl.rollout.environment import environment_of
from classroom_rl.rollout.problem import Problem
from classroom_rl.server.agreement import conversation_keys, refuse_other_weights
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.schemas import Health
from classroom_rl.system.run_lock import claim
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.checkpoints import last_checkpoint, remove_leftovers, run_id_of
from classroom_rl.trainer.collective import on_every_process, on_main_process
from classroom_rl.trainer.contents import Contents
from classroom_rl.trainer.resume import check_launch, check_problems, check_resume, contents_at_start
from classroom_rl.trainer.run_length import load_held_out_problems, load_training_problems, report_length
from classroom_rl.trainer.servers import AssignedServer, SharedGpus, assign_server

logger = logging.getLogger(__name__)
_LEAST_FOR_AN_ADAPTER = 5e-6


@dataclass
class TrainingSession:
    """One process's part of a training that is about to begin or to resume.

    Attributes:
        run_folder: the folder that trainer and server share.
        run_id: identifies this run's policies; it stays the same after a resume.
        problems: the training problems.
        client, server: the client of the server that plays this process's episodes, and that server's assignment. With
            more servers than processes, all servers together.
        gpus: puts the server's engines to sleep and wakes them, if trainer and server share GPUs.
        checkpoint: the checkpoint to resume from; None for a new training.
        contents: fingerprints of the problems, and of the files that the configuration names, as the training begins.
        held_out: the lessons that are measured during the training.
    """

    config: TrainRLConfig
    run_folder: Path
    run_id: str
    problems: list[Problem]
    client: ClassroomClient | BalancedServers
    server: AssignedServer
    gpus: SharedGpus
    checkpoint: str | None
    contents: Contents
    held_out: list[Problem] = field(default_factory=list)


@contextmanager
def training_session(config: TrainRLConfig) -> Iterator[TrainingSession]:
    """Claim the run folder, load the problems, connect to the server, and find the last checkpoint. All ranks take
    part; the process group must exist.

    Raises:
        ConfigError: if an adapter does not fit its model, or a checkpoint the configuration.
        DeadlineExceeded: if no server answers.
        ClassroomError: on every rank, if the server refuses or fails.
    """
    disable_progress_bar()  # the bars of loading and saving; the training has its own
    run_folder, state = Path(config.logging.save_dir).resolve(), PartialState()
    is_main = state.is_main_process
    with on_every_process(state, lambda: claim("train_rl", run_folder) if is_main else nullcontext()):
        yield _open(config, run_folder, state)


def _open(config: TrainRLConfig, run_folder: Path, state: PartialState) -> TrainingSession:
    on_every_process(state, lambda: check_machines(config, machines_of(os.environ), state.num_processes))
    on_main_process(state, lambda: check_push(config.huggingface))
    on_main_process(state, lambda: _log_config_changes(config, run_folder))
    run_id = on_main_process(state, lambda: _open_run_folder(config, run_folder))
    problems = on_every_process(state, lambda: load_training_problems(config))
    held_out = on_every_process(state, lambda: load_held_out_problems(config, problems))
    if state.is_main_process:
        report_length(config, len(problems)).log()
    on_main_process(state, lambda: check_problems(run_folder, problems))
    contents = on_main_process(state, lambda: contents_at_start(config, problems))
    server = on_every_process(state, lambda: assign_server(config.generation, state.process_index, state.num_processes))
    client = on_every_process(state, lambda: _connect(config, server, state, run_folder))
    checkpoint = on_every_process(state, lambda: _checkpoint(config, run_folder))
    gpus = SharedGpus.with_server(client, server, config.generation.colocate, run_folder)
    if config.train.max_staleness > 0:
        gpus.refuse_playing_ahead()
    if config.train.publish_through == NCCL:
        gpus.refuse_sending()
    on_main_process(state, lambda: record_placement(run_folder, gpus.placement))
    gpus.sleep_engines()
    return TrainingSession(config, run_folder, run_id, problems, client, server, gpus, checkpoint, contents, held_out)


def _checkpoint(config: TrainRLConfig, run_folder: Path) -> str | None:
    checkpoint = last_checkpoint(run_folder / "checkpoints")
    if checkpoint is not None:
        check_launch(Path(checkpoint), os.environ)
        check_checkpoint(Path(checkpoint), config.served_teacher, config.policy_model.adapter)
    return checkpoint


def _connect(
    config: TrainRLConfig, server: AssignedServer, state: PartialState, run_folder: Path
) -> ClassroomClient | BalancedServers:
    urls = config.generation.server_urls or []
    if len(urls) <= state.num_processes:
        return connect(config, server)
    clients = [
        connect(config, AssignedServer(index, url, is_leader=False), has_others=True) for index, url in enumerate(urls)
    ]
    return BalancedServers(clients, config, state, run_folder)


def connect(config: TrainRLConfig, server: AssignedServer, has_others: bool = False) -> ClassroomClient:
    """Connect to a server of this process.

    Args:
        has_others: whether the training goes on without this server if it is lost later.

    Raises:
        DeadlineExceeded: if it does not answer.
        ConfigError: if it belongs to another run, has another position among this run's servers, or plays or
            rewards its conversations otherwise than this training is configured.
    """
    generation, run_folder = config.generation, Path(config.logging.save_dir).resolve()
    client = ClassroomClient(
        server.url,
        generation.sample_timeout_s,
        generation.load_weights_timeout_s,
        generation.server_start_timeout_s,
        Path(config.logging.save_dir) / (f"server.{server.index}.log" if server.index else "server.log"),
        environment_of(config).Record,
        has_others,
    )
    health = client.wait_until_up(generation.server_start_timeout_s)
    _refuse_server_of_another_run(health, client.url, run_folder)
    if health.server_index != server.index:
        raise ConfigError(
            f"The server at {client.url} is number {health.server_index} of this run, but number {server.index} in "
            f"generation.server_urls: start it with generation.server_index={server.index}, or put them in order."
        )
    if health.reward_weights is not None:
        refuse_other_weights(health.reward_weights, reward_weights(config))
    client.expect(conversation_keys(config))
    return client


def _refuse_server_of_another_run(health: Health, url: str, run_folder: Path) -> None:
    if health.run_folder != str(run_folder):
        raise ConfigError(
            f"The server at {url} belongs to the run in {health.run_folder}, but this training's logging.save_dir is "
            f"{run_folder}. Start both with the same logging.save_dir, or give each run its own generation.server_port."
        )


def _open_run_folder(config: TrainRLConfig, run_folder: Path) -> str:
    """Record the configuration, and return the run's id."""
    _warn_about_truncation(config)
    _warn_about_learning_rate(config)
    record_run(config, "train_rl")
    remove_leftovers(run_folder)
    return run_id_of(run_folder)


def _log_config_changes(config: TrainRLConfig, run_folder: Path) -> None:
    """Log changed config keys, and refuse a change that is not allowed, before anything is written or loaded."""
    for change in check_resume(run_folder, config):
        logger.warning("%s", change)


def _warn_about_truncation(config: TrainRLConfig) -> None:
    options = config.policy_model.vllm
    if options.top_p < 1 or options.top_k != -1:
        logger.warning(
            "The policy is sampled with top_p %g and top_k %d, but GRPO trains the full softmax: the engine's "
            "log-probs are of the truncated distribution, and the importance-sampling correction has to bridge the "
            "difference "
            "(see mismatch/… in the metrics). Leave top_p at 1 and top_k at -1 unless you want this.",
            options.top_p,
            options.top_k,
        )


def _warn_about_learning_rate(config: TrainRLConfig) -> None:
    if config.policy_model.adapter is not None and config.train.learning_rate < _LEAST_FOR_AN_ADAPTER:
        logger.warning(
            "train.learning_rate is %g, which suits the training of all weights; an adapter hardly learns with it. "
            "Take ten times and more of what one would take there, usually from 1e-5 to 1e-4.",
            config.train.learning_rate,
        )
