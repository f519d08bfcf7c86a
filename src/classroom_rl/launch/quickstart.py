"""The quickstart: creates and trains a tiny tutor with the real programs, and writes a report about it.

    python -m classroom_rl.launch.quickstart [key=value …]               everything
    python -m classroom_rl.launch.quickstart --models-only [key=value …] only the models that the training starts from

An interrupted run, started again with the same overrides, continues where it was. A finished run, or one with other
overrides, is first moved to another folder; nothing is deleted.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from classroom_rl.config.load import USER_ERRORS, read_keys, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.evaluation.report.build import write_report, write_summary
from classroom_rl.evaluation.report.tables import comparison_table
from classroom_rl.launch.commands import (
    logged_steps,
    server_command,
    trainer_command,
    with_accelerate_config,
    with_precision,
)
from classroom_rl.launch.quickstart_plan import ModelCommands, QuickstartCommands, make_commands, overridden_key
from classroom_rl.launch.server_process import ServerProcess, SupervisedServer
from classroom_rl.results.learning import describe_learning, learning_of
from classroom_rl.results.run_folder import load_run
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.keys import print_error
from classroom_rl.system.processes import Child, Interrupted, Signals, refuse_taken_port

NOTES = "quickstart.json"
_RUN_FILES = ("run_id", "config/vllm_server.yaml", "config/train_rl.yaml")
_MODEL_FILES = {"world", "sft", "world.log", "sft.log"}


class StageFailed(ClassroomError):
    """A program of the quickstart ended with an error status."""

    def __init__(self, program: Child, status: int):
        super().__init__(
            f"{program.name} ended with status {status}. Its log is {program.log}. Started again with the same "
            "arguments, the command goes on from here."
        )
        self.exit_status = status


class Stages:
    """Prints a heading for each stage, and saves its duration in the run folder. A resumed run adds to it."""

    def __init__(self, count: int, folder: Path):
        self._count, self._folder = count, folder
        self._number, self._started = 0, time.monotonic()

    @contextmanager
    def stage(self, title: str, name: str) -> Iterator[None]:
        """Print the heading of a stage, and add the stage's seconds to the entry `name`."""
        self._heading(title)
        started = time.monotonic()
        yield
        notes = read_notes(self._folder) or {}
        seconds = notes.setdefault("seconds", {})
        seconds[name] = round(seconds.get(name, 0.0) + time.monotonic() - started, 3)
        write_notes(self._folder, notes)

    def skip(self, title: str, because: str) -> None:
        """Print the heading of a stage that has nothing to do."""
        self._heading(f"{title}: {because}, skipped")

    def _heading(self, text: str) -> None:
        self._number += 1
        seconds = int(time.monotonic() - self._started)
        print(f"\n[{self._number}/{self._count}] {text}  ({seconds // 60}:{seconds % 60:02d})", flush=True)


def read_notes(folder: Path) -> dict[str, Any] | None:
    """Read the quickstart's notes in a run folder; None if there are none."""
    path = folder / NOTES
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_notes(folder: Path, notes: dict[str, Any]) -> None:
    """Replace the quickstart's notes in a run folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{NOTES}.unfinished"
    unfinished.write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(folder / NOTES)


def prepare_folder(quickstart: QuickstartCommands) -> None:
    """Prepare the run folder: if this run cannot continue its content, rename it and start with an empty folder. Raises
    a `ConfigError` if the folder contains anything but a run."""
    folder = quickstart.folder
    reason = reason_to_move(quickstart)
    if reason is not None:
        moved_folder = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        if moved_folder.exists():
            raise ConfigError(f"{folder} should be moved aside to {moved_folder}, which exists already. Try again.")
        folder.rename(moved_folder)
        print(f"{folder} {reason}: moved to {moved_folder}", flush=True)
    elif (folder / NOTES).is_file():
        print(f"{folder} holds an unfinished run or its models: it goes on from there", flush=True)
    notes = read_notes(folder) or {"models": quickstart.recipe}
    write_notes(folder, {**notes, "overrides": sorted(quickstart.overrides)})


def reason_to_move(quickstart: QuickstartCommands) -> str | None:
    """Why this quickstart cannot continue the content of its folder; None if it can. Raises a `ConfigError` if the
    folder contains anything but a run."""
    folder, notes = quickstart.folder, read_notes(quickstart.folder)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    has_run = any((folder / file).is_file() for file in _RUN_FILES)
    if not names:
        return None
    if notes is None and not has_run and not names <= _MODEL_FILES:
        raise ConfigError(f"{folder} holds something else than a run. Choose another folder with logging.save_dir=…")
    if (folder / "summary.json").is_file():
        return "holds a finished run"
    if notes is None or notes.get("models") != quickstart.recipe:
        return "holds a run with other models"
    if "overrides" not in notes:
        return "holds a run that was started by other means" if has_run else None
    return None if notes["overrides"] == sorted(quickstart.overrides) else "holds a run with other overrides"


def run_program(
    name: str,
    command: Sequence[str],
    log: Path,
    signals: Signals,
    check: Callable = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run one of the project's programs until it ends, with its output on the terminal. Raises a `StageFailed` if the
    program ends with an error status."""
    with Child(name, command, signals, log, echo=True, environment=environment) as program:
        status = program.wait(check)
    if status:
        raise StageFailed(program, status)


def make_models(models: ModelCommands, stages: Stages, signals: Signals) -> None:
    """Create the world, and the model from which teacher and student start, unless the model exists."""
    if models.model.is_dir():
        for title in models.titles:
            stages.skip(title, "is there")
        return
    write_notes(models.folder, {**(read_notes(models.folder) or {}), "models": models.recipe})
    with stages.stage(models.titles[0], "world"):
        run_program("the making of the world", models.world_command(), models.folder / "world.log", signals)
    with stages.stage(models.titles[1], "sft"):
        log, environment = models.folder / "sft.log", models.sft_environment()
        run_program("train_sft.py", models.sft_command(), log, signals, environment=environment)


def ensure_models(config: TrainRLConfig, signals: Signals) -> None:
    """Create the quickstart's models if the configured teacher is the quickstart's model and does not exist yet. Raises
    a `StageFailed` if one of the programs that create them fails."""
    models = ModelCommands(Path(config.logging.save_dir), config.seed)
    if Path(config.teacher_model.model_name_or_path) == models.model and not models.model.is_dir():
        make_models(models, Stages(2, models.folder), signals)


def refuse_other_models(models: ModelCommands) -> None:
    """Refuse a run folder whose models were made with other settings. Raises a `ConfigError` if the run folder contains
    such models."""
    recipe = (read_notes(models.folder) or {}).get("models", models.recipe)
    if models.model.is_dir() and recipe != models.recipe:
        raise ConfigError(
            f"{models.model} was made with {recipe}, not with {models.recipe}. Choose another folder with "
            "logging.save_dir=…, or move that one away."
        )


def run_quickstart(quickstart: QuickstartCommands, signals: Signals) -> None:
    """Run all stages (model creation only if the plan has it) and print the results. Raises a `StageFailed` if a
    program fails, and a `ConfigError` if the server's port is taken, or the run folder contains anything but a run."""
    generation = quickstart.config.generation
    refuse_taken_port(generation.server_host, generation.server_port)
    print("\n".join(f"configuration: {file}" for file in quickstart.files), flush=True)
    prepare_folder(quickstart)
    stages = Stages(5 if quickstart.models is None else 7, quickstart.folder)
    if quickstart.models is not None:
        make_models(quickstart.models, stages, signals)
    if (quickstart.folder / "eval" / "after" / "metrics.json").is_file():
        for title in ("the server", "measured before", "training", "measured after"):
            stages.skip(title, "is done")
    else:
        _train_and_measure(quickstart, stages, signals)
    with stages.stage("the report", "report"):
        seconds = read_notes(quickstart.folder)["seconds"]
        stage_seconds = {name: seconds[name] for name in ("sft", "server_start", "eval") if name in seconds}
        write_summary(quickstart.folder, {**stage_seconds, "total": round(sum(seconds.values()), 3)})
        report = write_report(quickstart.folder)
    data = load_run(quickstart.folder)
    print(f"\n{comparison_table(data)}\n\n{describe_learning(learning_of(data)[0])}")
    print(f"\nThe report, to be opened in a browser: {report.resolve()}")


def _train_and_measure(quickstart: QuickstartCommands, stages: Stages, signals: Signals) -> None:
    command = server_command(quickstart.rl_arguments)
    log = quickstart.folder / "server.log"
    start = partial(ServerProcess, command, quickstart.config.generation, signals, log)
    with SupervisedServer(start, logged_steps(quickstart.folder)) as server:
        with stages.stage(f"the server loads its models (vllm_server.py), log {log}", "server_start"):
            server.process.wait_until_ready()
        _measure("before", quickstart, server, stages, signals)
        with stages.stage("training (train_rl.py)", "training"):
            run_program(
                "train_rl.py",
                _trainer_command(quickstart),
                quickstart.folder / "trainer.log",
                signals,
                server.restart_if_ended,
            )
        _refuse_untrained(quickstart.folder, server.process)
        _measure("after", quickstart, server, stages, signals)


def _trainer_command(quickstart: QuickstartCommands) -> list[str]:
    flags = with_precision(with_accelerate_config([]), quickstart.config.train.dtype)
    return trainer_command(flags, quickstart.rl_arguments)


def _measure(
    when: str, quickstart: QuickstartCommands, server: SupervisedServer, stages: Stages, signals: Signals
) -> None:
    title = f"measured on held-out lessons {when} training (eval.py)"
    if (quickstart.folder / "eval" / when / "metrics.json").is_file():
        stages.skip(title, "is done")
        return
    with stages.stage(title, "eval"):
        log = quickstart.folder / f"eval_{when}.log"
        run_program("eval.py", quickstart.eval_command(when), log, signals, server.restart_if_ended)


def _refuse_untrained(folder: Path, server: ServerProcess) -> None:
    """Check after training that the server has loaded a policy of this run. Raises a `ClassroomError` if it has not."""
    policy = ClassroomClient(server.url, log=server.log).health().policy
    run_id = (folder / "run_id").read_text(encoding="utf-8")
    if policy.run_id != run_id or policy.version < 1:
        raise ClassroomError(f"After training, the server holds policy {policy}, not one that run {run_id} published.")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    return run_command(arguments, __doc__, "The quickstart", start)


def start(overrides: Sequence[str], models_only: bool, signals: Signals) -> None:
    """Run the quickstart, or create only its models, or with dry_run=true show what would be run."""
    quickstart = make_commands(without_dry_run(overrides))
    if is_dry_run(overrides):
        show(quickstart)
    elif models_only:
        refuse_other_models(quickstart.models)
        make_models(quickstart.models, Stages(2, quickstart.folder), signals)
    else:
        run_quickstart(quickstart, signals)


def run_command(
    arguments: Sequence[str], usage: str, name: str, start: Callable[[Sequence[str], bool, Signals], None]
) -> int:
    """Handle a command line of overrides and --models-only. Returns the exit status.

    Args:
        usage: the text that `--help` prints.
        start: called with the overrides, whether only the models are requested, and the signals.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage or "Python runs with -OO, which removes this text.")
        return 0
    read_keys()
    try:
        flags = [argument for argument in arguments if argument.startswith("-")]
        if flags not in ([], ["--models-only"]):
            raise ConfigError(f"{name} takes overrides and --models-only, not {' '.join(flags)}.")
        with Signals() as signals:
            start([argument for argument in arguments if not argument.startswith("-")], bool(flags), signals)
    except Interrupted as interruption:
        print(f"\n{interruption}; everything that was started has ended", file=sys.stderr)
        return interruption.status
    except StageFailed as failure:
        print(file=sys.stderr)
        print_error(failure)
        return failure.exit_status
    except USER_ERRORS as error:
        print(file=sys.stderr)
        print_error(error)
        return 2
    return 0


def is_dry_run(overrides: Sequence[str]) -> bool:
    """Whether the commands are only to be shown."""
    return "dry_run=true" in [override.lower() for override in overrides]


def without_dry_run(overrides: Sequence[str]) -> list[str]:
    """The overrides for the programs themselves, without dry_run."""
    return [override for override in overrides if overridden_key(override) != "dry_run"]


def show(quickstart: QuickstartCommands) -> None:
    """Print the configuration of server and trainer, and the commands."""
    models = quickstart.models
    commands = (
        *(() if models is None else (models.world_command(), models.sft_command())),
        server_command(quickstart.rl_arguments),
        quickstart.eval_command("before"),
        _trainer_command(quickstart),
        quickstart.eval_command("after"),
    )
    print("\n".join(f"# configuration: {file}" for file in quickstart.files))
    print(to_yaml(quickstart.config))
    print("\n".join(shlex.join(command) for command in commands))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
