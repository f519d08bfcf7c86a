"""Control experiments for a training: the same training with a learning rate of 0, which changes no weight, and with
the rewards of each batch shuffled. If the tutor improves in one of them, the improvement of the training is not
learning.

    python -m classroom_rl.launch.controls small_tutor [key=value …]     or quickstart

Overrides are those of the training. The controls are written next to its run folder, into folders that end in _still
and _shuffled. The command prints how much each control changed the held-out reward, together with the training itself
if its run is finished. A finished control is not run again, and an interrupted one continues. The exit status is 1 if a
control improved.
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
    improved: list[str] = []
    status = run_command(overrides, __doc__, "This command", partial(_run, name, improved))
    return status or int(bool(improved))


def _run(name: str, improved: list[str], overrides: Sequence[str], models_only: bool, signals: Signals) -> None:
    """Run the controls that are not finished, and print the table. Appends the names of those in which the tutor
    improved to `improved`."""
    if models_only:
        raise ConfigError("The controls have no models of their own: leave --models-only out.")
    folder = Path(load(TrainRLConfig, "train_rl", ["--config-name", name, *overrides], check_train_rl).logging.save_dir)
    folders = {control: folder.with_name(f"{folder.name}_{control}") for control in CONTROLS}
    without_folder = [override for override in overrides if overridden_key(override) != _SAVE_DIR]
    for control, control_folder in folders.items():
        if (control_folder / "summary.json").is_file():
            print(f"{control}: {control_folder} is finished", flush=True)
            continue
        print(f"{control}: {control_folder}", flush=True)
        control_overrides = [*without_folder, *CONTROLS[control], f"{_SAVE_DIR}={quoted(control_folder)}"]
        TRAININGS[name](control_overrides, False, signals)
    training = {"trained": folder} if (folder / "summary.json").is_file() else {}
    runs = {label: learning_of(load_run(run_folder)) for label, run_folder in (training | folders).items()}
    improved += [label for label, (learning, _) in runs.items() if label in CONTROLS and learning.learned]
    print("\n" + table({label: evidence for label, (_, evidence) in runs.items()}))


def table(runs: Mapping[str, LearningEvidence]) -> str:
    """A table: how much each run changed the held-out reward, with the 95 % interval over lessons, and the weights."""
    lines = [
        "held-out reward, change by         sampled                      greedy                       weights moved"
    ]
    for label, evidence in runs.items():
        cells = []
        for sampling in ("sampled", "greedy"):
            change = evidence.held_out.get(sampling)
            cells.append(shown(change, "+") if change and change["n"] else "not measured")
        movement = "?" if evidence.movement is None else f"{evidence.movement.relative_norm:.2e}"
        lines.append(f"{label:34} {cells[0]:28} {cells[1]:28} {movement}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
