"""A whole training, by any algorithm, from the configuration to the released model."""

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import PartialState
from prometheus_client import CollectorRegistry
from transformers.trainer_callback import PrinterCallback

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import ONLINE_DPO, PASS
from classroom_rl.config.values import PPO as PPO_NAME
from classroom_rl.errors import ConfigError, ProviderFailure, TooManyFailedJudgements, TrainingCollapsed
from classroom_rl.models.lora import check_adapter
from classroom_rl.models.policy_folder import write_whole
from classroom_rl.models.precision import check_precision
from classroom_rl.results.hub import release
from classroom_rl.results.learning import describe_learning, write_learning
from classroom_rl.results.rollout_files import drop_rollouts_from
from classroom_rl.results.supervision_summary import describe_supervision, write_supervision
from classroom_rl.results.trackers import keep_tracked_run
from classroom_rl.rollout.environment import environment_of
from classroom_rl.system.distributed import check_fsdp
from classroom_rl.trainer.arguments import training_arguments
from classroom_rl.trainer.callbacks import GRPOMetricsCallback, PlotCallback, last_metrics
from classroom_rl.trainer.checkpoints import step_of
from classroom_rl.trainer.collective import on_every_process, on_main_process
from classroom_rl.trainer.corrections import CorrectionPasses
from classroom_rl.trainer.grpo import GRPO
from classroom_rl.trainer.held_out_evaluation import measure_held_out
from classroom_rl.trainer.loop import TrainingLoop
from classroom_rl.trainer.model_loading import load_policy, prepare_cpu
from classroom_rl.trainer.online_dpo import OnlineDPO
from classroom_rl.trainer.ppo import PPO
from classroom_rl.trainer.prometheus import metrics_port, training_metrics
from classroom_rl.trainer.session import TrainingSession, training_session
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together, weight_bytes
from classroom_rl.trainer.weight_delta import parameter_movement

_STOPS = (ProviderFailure, TooManyFailedJudgements, TrainingCollapsed, ConfigError)
"""Errors that reach every rank before a step has changed any weight, so that a checkpoint can be saved."""


def train(config: TrainRLConfig) -> None:
    """Train the teacher with the running server, by the algorithm that is configured. Started again on the same
    `save_dir`, it resumes from the last checkpoint.

    Raises:
        ConfigError: if an adapter does not fit its model, a checkpoint does not fit the configuration, or accelerate is
            configured for another precision, or for an FSDP that cannot train as is wanted.
        DeadlineExceeded: if no server answers.
        ClassroomError: on every rank, if the server refuses or fails.
    """
    adapter, run_folder = config.policy_model.adapter, Path(config.logging.save_dir).resolve()
    check_precision(config.train.dtype, os.environ)
    has_second_model = config.train.has_reference and adapter is None or config.train.distillation.is_loaded
    check_fsdp(os.environ, has_second_model)
    if not torch.cuda.is_available():
        prepare_cpu(config.train.dtype)
    if adapter is not None:
        check_adapter("teacher_model", config.teacher_model.model_name_or_path, adapter)
    arguments = training_arguments(config, run_folder)  # sets up the process group, too
    state = PartialState()
    with ExitStack() as stack:

        def serve_metrics() -> CollectorRegistry | None:
            return stack.enter_context(metrics_port(config)) if state.is_main_process else None

        registry = on_every_process(state, serve_metrics)
        session = stack.enter_context(training_session(config))
        keep_tracked_run(arguments, session.run_id)
        checkpoint = None if session.checkpoint is None else Path(session.checkpoint)
        algorithm = algorithm_of(config, run_folder, checkpoint)
        _run(session, TrainingLoop(session, load_policy(config, arguments), algorithm, arguments), registry)


def algorithm_of(config: TrainRLConfig, run_folder: Path, checkpoint: Path | None) -> GRPO:
    """The algorithm that is configured; a critic resumes from the checkpoint."""
    if config.train.algorithm == PPO_NAME:
        return PPO(config, run_folder, checkpoint)
    return OnlineDPO(config) if config.train.algorithm == ONLINE_DPO else GRPO(config)


def _run(session: TrainingSession, loop: TrainingLoop, registry: CollectorRegistry | None) -> None:
    """Train to the end, from the checkpoint if there is one, then save the model, write `learning.json` (with a
    supervisor also `supervision.json`), and push to the Hub if configured.

    Raises:
        ClassroomError: on every rank, if the server refuses or fails. If judging or an API failed, the policy has
            collapsed, or a restarted server has another configuration, a checkpoint of the steps so far is saved first.
    """
    config, run_folder, state = session.config, session.run_folder, PartialState()
    loop.remove_callback(PrinterCallback)
    line_callbacks = []
    if registry is not None:
        metrics = training_metrics(config, loop.model.config, state.num_processes)
        registry.register(metrics)
        line_callbacks.append(metrics.record)
    loop.add_callback(GRPOMetricsCallback(run_folder, on_line=line_callbacks))
    loop.add_callback(PlotCallback(run_folder, loop))
    if config.train.corrections.mode == PASS:
        loop.add_callback(CorrectionPasses(loop, config))
    limit = min(config.generation.max_tokens_in_conversation, config.teacher_model.vllm.max_length)
    environment_of(config).check_problems(config, [*session.problems, *session.held_out], loop.processing_class, limit)
    on_main_process(state, lambda: drop_rollouts_from(run_folder, step_of(session.checkpoint)))
    try:
        loop.train(resume_from_checkpoint=session.checkpoint)
    except _STOPS:
        loop.save_progress()
        raise
    loop.player.wait_for_next(loop.accelerator)
    policy = loop.publisher.publish(loop, last=True)
    session.gpus.wake_engines()
    if loop.has_adapter:
        save_adapter_together(loop, lambda save: write_whole(run_folder / "adapter", save))
    needed = weight_bytes(loop.model)
    save_together(loop, lambda save: write_whole(run_folder / "model", save, needed))
    if loop.held_out is not None:  # only now: a judge that fails must not cost the model
        measure_held_out(loop, loop.held_out, policy, policy.version, last=True)
    base = config.policy_model.model_name_or_path
    movement = parameter_movement(loop, base)
    if state.is_main_process:  # not a collective: an upload may take longer than the other ranks would wait
        print(describe_learning(write_learning(run_folder, movement)), flush=True)
        if (supervision := write_supervision(run_folder)) is not None:
            print(describe_supervision(supervision), flush=True)
        release(run_folder / "model", config, base, config.train.algorithm, last_metrics(run_folder))
