"""Measures what the supervisor is worth in Marooned: the same sailor is trained several ways, with equal numbers of
games, and several versions of it are played on held-out islands, without a supervisor.

    rl           reinforcement learning alone, on the game's own rewards
    corrections  supervised passes over the supervisor's corrections alone: no reward, so RL's gradient is 0; the passes
                 have the learning rate that they have in "both"
    both         config/train_rl/marooned.yaml: rewards, penalties, and passes

    python -m benchmarks.marooned_arms [--folder runs/marooned_arms] [--seeds 1 2] [--steps 16] [--arms rl both …]

It needs the model of `make marooned-models`. Each training and each measured version is kept in the folder, so the same
command goes on where it was stopped; with `--report` it only prints what is there. Seeds begin with the same fine-tuned
model, and differ in the order of islands and in what is sampled.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.supervision_arms import Bench, measure
from classroom_rl.environments.marooned.episode import GameRecord
from classroom_rl.evaluation.episodes import figures_of, held_out
from classroom_rl.results.run_folder import read_lines
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.intervals import shown

FIGURES = ("valid", "ship", "reward")


class MaroonedBench(Bench):
    """The benchmark of supervision on islands."""

    arms = {
        "rl": [
            "supervisor_model=null",
            "generation.supervisor.on_invalid=observe",
            "train.turn_credit.mode=none",
            "train.corrections.mode=none",
        ],
        "corrections": [
            "train.turn_credit.mode=none",
            "train.reward_weights={return: 0.0}",
        ],
        "both": [],
    }
    record = GameRecord
    every = 8

    def figures(self, arm: str, seed: int, step: int, records: Sequence[GameRecord]) -> dict[str, Any]:
        return {
            name: {island: fmean(values) for island, values in by_island.items()}
            for name, by_island in figures_of(records).items()
        }

    def overrides(self, save_dir: Path, config: str = "marooned") -> list[str]:
        return [
            *("--config-name", "marooned"),
            f"logging.save_dir={save_dir}",
            f"teacher_model.model_name_or_path={self.models / 'sft' / 'model'}",
            f"dataset.train_datasets=[{{name_or_path: {self.models / 'world' / 'islands_train.jsonl'}}}]",
            f"generation.server_port={self.port}",
        ]


def report(lines: Sequence[Mapping]) -> str:
    """Of each figure: its mean by step and arm, each arm's change, and its difference to the first arm at the end."""
    measured = {(line["arm"], line["seed"], line["step"]): line for line in lines}
    arms = [arm for arm in MaroonedBench.arms if any(key[0] == arm for key in measured)]
    seeds = sorted(
        set.intersection(*({seed for measured_arm, seed, _ in measured if measured_arm == arm} for arm in arms))
    )
    steps = sorted(
        set.intersection(*({step for measured_arm, _, step in measured if measured_arm == arm} for arm in arms))
    )
    out = [f"seeds {seeds}; held-out islands, without a supervisor; [95 % intervals over islands of all seeds]"]
    for figure in FIGURES:
        out += ["", f"{figure:10}" + "".join(f"{arm:>28}" for arm in arms)]
        values = {
            (arm, step): {
                f"{seed}|{island}": [value]
                for seed in seeds
                for island, value in measured[arm, seed, step][figure].items()
            }
            for arm in arms
            for step in steps
        }
        for step in steps:
            out.append(f"{step:10}" + "".join(f"{_mean(values[arm, step]):28.3f}" for arm in arms))
        rows = {
            "change": [(values[arm, steps[0]], values[arm, steps[-1]]) for arm in arms],
            f"to {arms[0]}": [(values[arms[0], steps[-1]], values[arm, steps[-1]]) for arm in arms],
        }
        for name, pairs in rows.items():
            out.append(f"{name:>10}" + "".join(f"{_difference(*pair):>28}" for pair in pairs))
    return "\n".join(out)


def _mean(by_island: Mapping[str, Sequence[float]]) -> float:
    return fmean(value for values in by_island.values() for value in values)


def _difference(before: Mapping, after: Mapping) -> str:
    return shown(paired_change(before, after), "+")


def main() -> None:
    """Train and measure what is missing, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/marooned_arms"))
    parser.add_argument("--models", type=Path, default=Path("runs/marooned"), help="the folder of marooned-models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(MaroonedBench.arms), default=list(MaroonedBench.arms))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--port", type=int, default=8047)
    parser.add_argument("--report", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    if not (arguments.models / "sft" / "model").is_dir():
        sys.exit(f"{arguments.models} has no fine-tuned model: run make marooned-models, or give --models.")
    if arguments.steps % MaroonedBench.every:
        sys.exit(f"--steps is {arguments.steps}; it must be a multiple of {MaroonedBench.every}.")
    bench = MaroonedBench(arguments.folder.resolve(), arguments.models.resolve(), arguments.steps, arguments.port)
    bench.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        islands = [island.text for island in held_out(bench.models / "world" / "islands_heldout.jsonl")]
        measure(bench, [(arm, seed) for seed in arguments.seeds for arm in arguments.arms], islands)
    print(report(read_lines(bench.results)))


if __name__ == "__main__":
    main()
