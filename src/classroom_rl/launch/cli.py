"""Runs server and trainer with one command.

    ./start_rl_training.sh                                           the complete quickstart, with a report at the end
    ./start_rl_training.sh seed=2 logging.save_dir=runs/second       the quickstart with overrides
    ./start_rl_training.sh --config-name quickstart train.mu=2       server and trainer, on this machine's GPU or CPU
    ./start_rl_training.sh --config_file config/deepspeed/zero3_4GPU.yaml --config-dir my_configs --config-name mine \\
        --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.learning_rate=1e-6
    ./start_rl_training.sh --config-name mine --server-gpus 0-3 --trainer-gpus 4-7 train.max_staleness=1

--config-name and --config-dir go to Hydra: they choose the YAML file that configures both programs (config/train_rl/…).
--server-gpus and --trainer-gpus give each program GPUs of its own. Without them both use all GPUs in turns; with
train.max_staleness=1 the server gets the first half. All other flags go to accelerate. Without --config_file it uses
config/deepspeed/1GPU.yaml, with several GPUs zero2_4GPU.yaml or zero3_4GPU.yaml and a process for each, without a GPU
config/accelerate/1CPU.yaml. Overrides (key=value) apply to both programs. On several machines, run this command on
each: every machine has its own server, and generation.server_urls lists the servers in the order of --machine_rank.
dry_run=true starts nothing. It renders the prompts, and shows the configuration, the length of the training, the GPU
memory that it needs, and the two commands.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from classroom_rl.config.checks import check_environment, check_train_rl
from classroom_rl.config.load import USER_ERRORS, command_line, load, read_keys, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import GROUP, KEEP, NCCL
from classroom_rl.errors import ConfigError
from classroom_rl.launch.before_start import check_prompts_fit, check_start, show_before_start
from classroom_rl.launch.commands import (
    FLAGS_WITH_DEEPSPEED,
    OVERRIDE,
    Arguments,
    GpuSplit,
    check_accelerate_flags,
    gpu_split,
    logged_steps,
    server_command,
    split_arguments,
    trainer_command,
    with_accelerate_config,
    with_precision,
)
from classroom_rl.launch.server_process import ServerProcess, SupervisedServer
from classroom_rl.memory.sources import NotEstimated, gpu_is_there, launch_of_flags, like_gpus
from classroom_rl.results.hub import check_push
from classroom_rl.system.keys import print_error
from classroom_rl.system.processes import Child, Interrupted, Signals
from classroom_rl.system.shipped import find_shipped
from classroom_rl.trainer.resume import check_resume


def launch(
    config: TrainRLConfig,
    server: Sequence[str],
    trainer: Sequence[str],
    rank: str,
    signals: Signals,
    split: GpuSplit | None = None,
) -> int:
    """Run the server, and the trainer once the server is ready. Stop the server when the trainer has ended.

    Args:
        server, trainer: the commands of both programs.
        rank: this machine's rank; "0" if there is only one machine.
        split: the GPUs of both programs; None if they see the same.

    Returns:
        The trainer's exit status.

    Raises:
        ConfigError: if the server's port is taken.
        EngineFailure: if the server ends while it loads, or too often before the trainer is done.
        DeadlineExceeded: if the server is not ready in time.
        Interrupted: on a signal.
    """
    folder = Path(config.logging.save_dir)
    suffix = "" if rank == "0" else f".{rank}"
    log = folder / f"server{suffix}.log"
    server_environment, trainer_environment = (
        ({}, {}) if split is None else (split.environment(split.server), split.environment(split.trainer))
    )
    with SupervisedServer(
        lambda: ServerProcess(server, config.generation, signals, log, server_environment), logged_steps(folder)
    ) as supervised:
        supervised.process.wait_until_ready()
        print(f"the server is ready at {supervised.process.url}; the trainer starts", flush=True)
        trainer_log = folder / f"trainer{suffix}.log"
        with Child(
            "the trainer", trainer, signals, trainer_log, True, environment=trainer_environment
        ) as running_trainer:
            status = running_trainer.wait(check=supervised.restart_if_ended)
    if status:
        print(f"error: the trainer ended with status {status}. Its log is {running_trainer.log}.", file=sys.stderr)
    return status


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__ or "Python runs with -OO, which removes this text.")
        return 0
    if all(OVERRIDE.match(argument) for argument in arguments):
        from classroom_rl.launch.quickstart import main as quickstart

        return quickstart(arguments)
    read_keys()
    try:
        with Signals() as signals:
            return _launch_from(arguments, signals)
    except Interrupted as interruption:
        print(f"\n{interruption}; everything that was started has ended", file=sys.stderr)
        return interruption.status
    except USER_ERRORS as error:
        print_error(error)
        return 2


def _launch_from(arguments: Sequence[str], signals: Signals) -> int:
    split = split_arguments(arguments)
    file = command_line("train_rl", split.hydra).file
    config = load(TrainRLConfig, "train_rl", split.hydra, check_train_rl)
    check_push(config.huggingface)
    count = 0 if config.train.gpu_memory_gib else len(like_gpus())
    apart = config.train.max_staleness > 0 or config.train.publish_through == NCCL
    gpus = gpu_split(split.gpus, count, apart)
    flags = _accelerate_flags(split, config, gpus, count)
    check_accelerate_flags(flags)
    hydra_arguments = [argument for argument in split.hydra if not argument.lstrip("+").startswith("dry_run=")]
    rank = split.accelerate_value("--machine_rank")
    if rank is not None and config.generation.server_urls is not None:
        hydra_arguments_of_server = [*hydra_arguments, f"generation.server_index={rank}"]
    else:
        hydra_arguments_of_server = hydra_arguments
    trainer = trainer_command(flags, hydra_arguments)
    server_gpus = None if gpus is None else len(gpus.server)
    if config.dry_run:
        from classroom_rl.memory.report import report, show
        from classroom_rl.trainer.run_length import report_length_before_training

        print(f"# configuration: {file}\n{to_yaml(config)}")
        check_environment(config)
        show_before_start(config)
        check_prompts_fit(config)
        report_length_before_training(config).show()
        budget = report(config, lambda: launch_of_flags(flags), server_gpus=server_gpus)
        show(budget)
        server = server_command([*hydra_arguments_of_server, *(budget.placement.overrides if budget.placement else [])])
        print(f"\n{shlex.join(server)}\n{shlex.join(trainer)}")
        return 0
    print(f"configuration: {file}", flush=True)
    check_resume(Path(config.logging.save_dir), config)  # before any model is loaded; the trainer reports changes
    _report_checkpoints(Path(config.logging.save_dir))
    from classroom_rl.launch.quickstart import ensure_models
    from classroom_rl.memory.report import check_budget

    check_start(config, loads_models=True, reports=True)
    ensure_models(config, signals)
    placement_overrides = []
    if gpu_is_there():  # without one, both programs report what they lack
        placement = check_budget(config, lambda: launch_of_flags(flags), with_engines=True, server_gpus=server_gpus)
        placement_overrides = [] if placement is None else placement.overrides
    check_prompts_fit(config)
    server = server_command([*hydra_arguments_of_server, *placement_overrides])
    return launch(config, server, trainer, rank or "0", signals, gpus)


_SAYS_HOW_MANY = ("--config_file", "--gpu_ids", "--use_fsdp", *FLAGS_WITH_DEEPSPEED)


def _accelerate_flags(split: Arguments, config: TrainRLConfig, gpus: GpuSplit | None, count: int) -> list[str]:
    """Accelerate's flags. If they say nothing about processes, and the trainer has several GPUs, it gets a process on
    each, or on as many as the batch can be divided among; ZeRO-3 only where ZeRO-2 does not fit. Raises a `ConfigError`
    if the trainer would have more processes than GPUs."""
    count = count if gpus is None else len(gpus.trainer)
    processes = (
        1 if any(split.accelerate_value(flag) is not None for flag in _SAYS_HOW_MANY) else _processes(config, count)
    )
    if processes < 2:
        flags = with_precision(with_accelerate_config(split.accelerate), config.train.dtype)
        if gpus is not None:
            _refuse_shared_processes(flags, len(gpus.trainer))
        return flags
    from classroom_rl.memory.report import report

    for name in ("zero2_4GPU", "zero3_4GPU"):
        file = find_shipped(f"config/deepspeed/{name}.yaml")
        launch_flags = ["--config_file", file, "--num_processes", str(processes), *split.accelerate]
        flags = with_precision(launch_flags, config.train.dtype)
        server_gpus = None if gpus is None else len(gpus.server)
        if not report(config, lambda flags=flags: launch_of_flags(flags), server_gpus=server_gpus).refusals:
            break
    return flags


def _processes(config: TrainRLConfig, count: int) -> int:
    """How many processes a trainer with so many GPUs gets: those of the run's checkpoint, or as many as the batch's
    micro-batches, and where groups stay together its groups, can be divided among."""
    train = config.train
    checkpoints = _checkpoints(Path(config.logging.save_dir))
    if checkpoints:
        return max(1, len(list(checkpoints[max(checkpoints)].glob("rng_state_*.pth"))))
    whole_groups = config.judge_model.mode == GROUP or train.groups_without_variance != KEEP
    parts = train.number_of_problems_per_batch
    if not whole_groups:
        parts = max(1, parts * train.num_samples_per_problem // train.per_device_train_batch_size)
    return next(number for number in range(max(1, count), 0, -1) if parts % number == 0)


def _refuse_shared_processes(flags: Sequence[str], count: int) -> None:
    """Refuse more processes than the trainer has GPUs: two would share one, which NCCL refuses once all is loaded."""
    try:
        launch = launch_of_flags(flags)
    except NotEstimated:
        return
    if launch.processes // launch.machines > count:
        raise ConfigError(
            f"accelerate would start {launch.processes // launch.machines} processes, but the trainer has {count} GPUs "
            f"(--trainer-gpus): add --num_processes {count * launch.machines}, or give the trainer more GPUs."
        )


def _checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run folder, by step."""
    return {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoints/checkpoint-*")}


def _report_checkpoints(folder: Path) -> None:
    """Print that the training continues, if the run folder holds checkpoints."""
    checkpoints = _checkpoints(folder)
    if checkpoints:
        print(
            f"{folder} holds a checkpoint of step {max(checkpoints)}: the training goes on from there. For a new run "
            "give another folder, logging.save_dir=…",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
