"""The controls of a training: the same again with a learning rate of 0, which changes no weight, and with the rewards
of a batch dealt out at random. If the tutor gets better in one of them, what the training shows is not learning.

    python -m classroom_rl.launch.controls small_tutor [key=value …]     or quickstart

Overrides are those of the training. The controls stand beside its run folder, in folders that end in _still and
_shuffled. The command prints how far each changed the held-out reward, beside the training itself if that is there. A
control that is finished is not run again, and an interrupted one goes on where it was. The exit status is 1 if a
control got better.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch import quickstart, small_tutor
from classroom_rl.launch.quickstart import run_command
from classroom_rl.launch.quickstart_plan import overridden_key, quoted
from classroom_rl.results.learning import LearningEvidence, learning_of
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.intervals import shown
from classroom_rl.system.processes import Signals

TRAININGS: Mapping[str, Callable[[Sequence[str], bool, Signals], None]] = {
    "quickstart": quickstart.start,
    "small_tutor": small_tutor.start,
}
CONTROLS: Mapping[str, Sequence[str]] = {
    "still": ("train.learning_rate=0",),
    "shuffled": ("train.shuffle_rewards=true", "train.turn_credit.shuffle=true"),
}
_SAVE_DIR = "logging.save_dir"


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    name, *overrides = arguments or [""]
    if name not in TRAININGS:
        print(__doc__ or "Python runs with -OO, which removes this text.")
        return 0 if name in ("-h", "--help") else 2
    better: list[str] = []
    status = run_command(overrides, __doc__, "This command", partial(_run, name, better))
    return status or int(bool(better))


def _run(name: str, better: list[str], overrides: Sequence[str], models_only: bool, signals: Signals) -> None:
    """Run the controls that are missing, and print the table; `better` gets the names of those that got better."""
    if models_only:
        raise ConfigError("The controls have no models of their own: leave --models-only out.")
    folder = Path(load(TrainRLConfig, "train_rl", ["--config-name", name, *overrides], check_train_rl).logging.save_dir)
    folders = {control: folder.with_name(f"{folder.name}_{control}") for control in CONTROLS}
    own = [each for each in overrides if overridden_key(each) != _SAVE_DIR]
    for control, place in folders.items():
        if (place / "summary.json").is_file():
            print(f"{control}: {place} is finished", flush=True)
            continue
        print(f"{control}: {place}", flush=True)
        TRAININGS[name]([*own, *CONTROLS[control], f"{_SAVE_DIR}={quoted(place)}"], False, signals)
    finished = {"trained": folder} if (folder / "summary.json").is_file() else {}
    runs = {label: learning_of(load_run(place)) for label, place in (finished | folders).items()}
    better += [label for label, (learning, _) in runs.items() if label in CONTROLS and learning.learned]
    print("\n" + table({label: evidence for label, (_, evidence) in runs.items()}))


def table(runs: Mapping[str, LearningEvidence]) -> str:
    """How far each run changed the held-out reward, with the 95 % interval over lessons, and its parameters."""
    lines = [
        "held-out reward, change by         sampled                      greedy                       weights moved"
    ]
    for label, evidence in runs.items():
        cells = []
        for sampling in ("sampled", "greedy"):
            change = evidence.held_out.get(sampling)
            cells.append(shown(change, "+") if change and change["n"] else "not measured")
        moved = "?" if evidence.movement is None else f"{evidence.movement.relative_norm:.2e}"
        lines.append(f"{label:34} {cells[0]:28} {cells[1]:28} {moved}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
