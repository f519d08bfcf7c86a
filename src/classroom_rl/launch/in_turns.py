"""Trains tutor and student in turns: in each phase one of them, against the newest weights of the other.

    python -m classroom_rl.launch.in_turns --phases 4 --config-name quickstart logging.save_dir=runs/turns \\
        train.max_steps=25 student:train.learning_rate=1e-4

A phase is a whole training with a folder of its own, `phase_01_teacher`, `phase_02_student`, …; the reference for
`train.beta` is the model that it starts from. All arguments but --phases (2) and --first (teacher) are those of
./start_rl_training.sh; an override behind `teacher:` or `student:` is for the phases of that role alone. A student has
its own default for `train.reward_weights`. Started again with the same arguments, finished phases are not run again, an
interrupted one goes on from its checkpoint, and a larger --phases adds more. `turns.json` sums up the phases.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import USER_ERRORS, load, read_keys, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import TRAINS_STUDENT, TRAINS_TEACHER
from classroom_rl.errors import ConfigError
from classroom_rl.launch import cli
from classroom_rl.launch.commands import Arguments, split_arguments
from classroom_rl.results.run_folder import load_run
from classroom_rl.system.keys import print_error
from classroom_rl.system.processes import Interrupted, Signals
from classroom_rl.system.storage import write_whole

ROLES = (TRAINS_TEACHER, TRAINS_STUDENT)
BASE, SUMMARY = "turns", "turns.json"


@dataclass(frozen=True)
class Plan:
    """The phases of a training in turns.

    Attributes:
        config: what all phases share.
        own: role → the overrides of its phases alone.
        flags: for accelerate and the launcher.
    """

    phases: int
    first: str
    config: TrainRLConfig
    own: dict[str, list[str]]
    flags: list[str]

    @property
    def folder(self) -> Path:
        return Path(self.config.logging.save_dir)

    def role(self, phase: int) -> str:
        """The role that a phase trains; phases count from 1."""
        return ROLES[(ROLES.index(self.first) + phase - 1) % 2]

    def folder_of(self, phase: int) -> Path:
        return self.folder / f"phase_{phase:02d}_{self.role(phase)}"

    def is_finished(self, phase: int) -> bool:
        """Whether a phase has released its model, which is whole or absent."""
        return (self.folder_of(phase) / "model").is_dir()

    def arguments(self, phase: int) -> list[str]:
        """The launcher's arguments for a phase: each role plays with the model of its last phase before."""
        role = self.role(phase)
        arguments = [
            *("--config-dir", str(self.folder), "--config-name", BASE, *self.flags),
            f"generation.trained_role={role}",
            f"logging.save_dir={self.folder_of(phase)}",
            f"seed={self.config.seed + phase - 1}",  # other problems and personas than before
            *(["train.reward_weights=null"] if role == TRAINS_STUDENT else []),
        ]
        for player in ROLES:
            earlier_phases = [earlier for earlier in range(1, phase) if self.role(earlier) == player]
            if earlier_phases:
                arguments.append(f"{player}_model.model_name_or_path={self.folder_of(earlier_phases[-1]) / 'model'}")
        return [*arguments, *self.own[role]]


def make_plan(arguments: Sequence[str]) -> Plan:
    """Read the command line, and write what all phases share into the folder, from which each phase reads it.

    Raises:
        ConfigError: for a wrong argument, if a phase of either role would refuse its configuration, or if the folder
            holds phases of another configuration.
    """
    shared, overrides, options = [], {role: [] for role in ROLES}, {"--phases": "2", "--first": TRAINS_TEACHER}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        role, colon, override = argument.partition(":")
        flag, equals, value = argument.partition("=")
        if colon and role in overrides:
            overrides[role].append(override)
        elif flag in options:
            options[flag] = value if equals else (remaining.pop(0) if remaining else "")
        else:
            shared.append(argument)
    if not options["--phases"].isdecimal() or options["--first"] not in ROLES:
        raise ConfigError("--phases is a number of phases, and --first is teacher or student.")
    split = split_arguments(shared)
    config = load(TrainRLConfig, "train_rl", split.hydra, check_train_rl)
    if config.dry_run:
        raise ConfigError("dry_run=true shows one training: give it to ./start_rl_training.sh.")
    plan = Plan(int(options["--phases"]), options["--first"], config, overrides, _flags_of(split))
    order = f"# --first {plan.first}\n" + "".join(
        f"# {role}:{override}\n" for role in ROLES for override in overrides[role]
    )
    path, text = plan.folder / f"{BASE}.yaml", order + to_yaml(config)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{plan.folder} holds phases of another configuration ({path}): choose another folder.")
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    for phase in (1, 2):  # before the first is trained
        load(TrainRLConfig, "train_rl", split_arguments(plan.arguments(phase)).hydra, check_train_rl)
    return plan


def _flags_of(split: Arguments) -> list[str]:
    return [*split.accelerate, *(f"{flag}={value}" for flag, value in split.gpus.items())]


def run(plan: Plan) -> int:
    """Run the phases that are not finished; returns the exit status of the last one that ran."""
    for phase in range(1, plan.phases + 1):
        if plan.is_finished(phase):
            print(f"phase {phase} of {plan.phases}, the {plan.role(phase)}: is done", flush=True)
            continue
        print(f"phase {phase} of {plan.phases}: the {plan.role(phase)} is trained", flush=True)
        status = cli.main(plan.arguments(phase))
        if status:
            return status
    summary = [summary_of(plan, phase) for phase in range(1, plan.phases + 1)]
    write_whole(plan.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    print("\n".join(_lines(summary)), flush=True)
    return 0


def summary_of(plan: Plan, phase: int) -> dict[str, Any]:
    """What a phase came to: the first and last value of its reward, of both roles' rewards, and of the guard."""
    data = load_run(plan.folder_of(phase))
    summary: dict[str, Any] = {"phase": phase, "role": plan.role(phase), "steps": len(data.steps)}
    for name in ("reward", "rewards/student/mean", "rewards/pedagogical/mean", "guard/student_errs_when_drawn"):
        if points := data.series(name):
            summary[name] = [points[0][1], points[-1][1]]
    summary["pleases"] = any(value for _, value in data.series("guard/student_pleases"))
    return summary


def _lines(summary: Sequence[dict[str, Any]]) -> Iterator[str]:
    for entry in summary:
        values = (f"{name} {value[0]:.3f} → {value[1]:.3f}" for name, value in entry.items() if isinstance(value, list))
        warning = "; the student learns to please" if entry["pleases"] else ""
        yield f"phase {entry['phase']}, the {entry['role']}, {entry['steps']} steps: {', '.join(values)}{warning}"


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__ or "Python runs with -OO, which removes this text.")
        return 0
    read_keys()
    try:
        plan = make_plan(arguments)
        with Signals() as signals:
            from classroom_rl.launch.quickstart import ensure_models

            ensure_models(plan.config, signals)
        return run(plan)
    except Interrupted as interruption:
        return interruption.status
    except USER_ERRORS as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
