"""The complete Marooned experiment: creates a tiny model that knows the game's rules only in part, trains it on the
tiny island with a supervisor, and evaluates it on held-out islands before and after.

    python -m classroom_rl.launch.marooned [key=value …]               everything
    python -m classroom_rl.launch.marooned --models-only [key=value …] only the model that the training starts from

Overrides go to server and trainer; those that begin with `sft.` go to the fine-tuning. An interrupted run, started
again with the same folder, continues where it was.
"""

import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.train_sft import TrainSFTConfig, check_train_sft
from classroom_rl.environments.marooned.episode import GameRecord
from classroom_rl.evaluation.episodes import SUMMARY, write_comparison
from classroom_rl.launch.commands import (
    logged_steps,
    server_command,
    trainer_command,
    with_accelerate_config,
    with_precision,
)
from classroom_rl.launch.quickstart import Stages, make_models, refuse_other_models, run_command, run_program
from classroom_rl.launch.quickstart_plan import SFT_PREFIX, ModelCommands
from classroom_rl.launch.server_process import ServerProcess, SupervisedServer
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME
from classroom_rl.results.rollout_files import read_records
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.processes import Signals

NAME = ["--config-name", "marooned"]
TITLES = ("islands, and decisions of scripted sailors", "a tiny model learns to write decisions (train_sft.py)")


class Marooned:
    """The stages of a run.

    Args:
        overrides: for server, trainer and fine-tuning.

    Raises:
        ConfigError: if server, trainer or fine-tuning would refuse their configuration.
    """

    def __init__(self, overrides: Sequence[str]):
        sft = tuple(override.removeprefix(SFT_PREFIX) for override in overrides if override.startswith(SFT_PREFIX))
        self._arguments = [*NAME, *(override for override in overrides if not override.startswith(SFT_PREFIX))]
        self.config = load(TrainRLConfig, "train_rl", self._arguments, check_train_rl)
        self.folder = Path(self.config.logging.save_dir)
        self.models = ModelCommands(
            self.folder, self.config.seed, sft, "marooned", "classroom_rl.environments.marooned.world", TITLES
        )
        load(TrainSFTConfig, "train_sft", self.models.sft_arguments(), check_train_sft)
        settings = [self.config.generation.identity(), self.config.teacher_model.vllm.temperature]
        self._settings = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]

    def make_models(self, stages: Stages, signals: Signals) -> None:
        """Create the world and the model that the training starts from, unless they exist. Raises a `ConfigError` if
        the folder contains a model that was made with other settings."""
        refuse_other_models(self.models)
        make_models(self.models, stages, signals)

    def run(self, signals: Signals) -> None:
        """Run all stages and print the results."""
        stages = Stages(6, self.folder)
        self.make_models(stages, signals)
        log = self.folder / "server.log"
        start = partial(ServerProcess, server_command(self._arguments), self.config.generation, signals, log)
        with SupervisedServer(start, logged_steps(self.folder)) as server:
            with stages.stage(f"the server loads the model (vllm_server.py), log {log}", "server_start"):
                server.process.wait_until_ready()
            before = self._measure("before", server, stages, signals)
            with stages.stage("training (train_rl.py)", "training"):
                flags = with_precision(with_accelerate_config([]), self.config.train.dtype)
                command = trainer_command(flags, self._arguments)
                run_program("train_rl.py", command, self.folder / "trainer.log", signals, server.restart_if_ended)
            after = self._measure("after", server, stages, signals)
            version = ClassroomClient(server.process.url, log=server.process.log).health().policy.version
        print(f"\n{write_comparison(before, after, version, GameRecord.figure_labels, self.folder)}")
        print(f"\nfigures: {self.folder / SUMMARY}\nplots: {self.folder / 'plots'}")
        print(f"the page with the games: python vllm_server.py --view {self.folder}")

    def _measure(self, when: str, server: SupervisedServer, stages: Stages, signals: Signals) -> list[GameRecord]:
        """The games on held-out islands, played by a separate program, unless this policy was measured before."""
        with stages.stage(f"measured on held-out islands {when} the training", "eval"):
            games = self.folder / "eval" / when / CONVERSATIONS_NAME
            islands = self.folder / "world" / "islands_heldout.jsonl"
            command = [
                sys.executable,
                "-m",
                "classroom_rl.evaluation.episodes",
                server.process.url,
                str(islands),
                str(games),
            ]
            command += [
                "--environment",
                "marooned",
                "--name",
                self._settings,
                *(["--untrained"] if when == "before" else []),
            ]
            log = self.folder / f"eval_{when}.log"
            run_program("the measurement", command, log, signals, server.restart_if_ended)
        return read_records(games, GameRecord)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    return run_command(arguments, __doc__, "Marooned", _start)


def _start(overrides: Sequence[str], models_only: bool, signals: Signals) -> None:
    run = Marooned(overrides)
    if models_only:
        run.make_models(Stages(2, run.folder), signals)
    else:
        run.run(signals)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
