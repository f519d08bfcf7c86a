"""What the ways of earlier trainers of this family cost: a whole step of training with each of them switched on.

    python -m benchmarks.earlier_ways quickstart [--models runs/quickstart] [--rounds 5] [--steps 3] [--folder …]
    python -m benchmarks.earlier_ways small_tutor --arms none lockstep+no_cache+restart+text

An arm is a way, or several joined by `+`; `benchmarks.earlier_launch` lists them, `none` is this project as it is. The
arms take turns, each round starts server and trainer anew, and the times are those between the ends of two steps, as in
`benchmarks.whole_step`. A ratio is that of the arm's step to this project's of the same round; their median is shown.
All ways together means without the sleeps, which are measured apart. Here one process trains; of several, all but the
first of each machine slept two minutes more, which no step could be shorter than: that is stated, not measured.
What is measured is kept in the folder, so the same command goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from benchmarks.earlier_launch import (
    LOCKSTEP,
    NO_CACHE,
    NONE,
    RESTART,
    RESTART_ALL,
    TEXT,
    WAYS,
    ways_of,
)
from benchmarks.rounds import SHAPES, Round, Rounds, overrides_of, play_project

TOGETHER = "+".join((LOCKSTEP, NO_CACHE, RESTART, TEXT))
TOGETHER_ALL_ENGINES = "+".join((LOCKSTEP, NO_CACHE, RESTART_ALL, TEXT))
ARMS = (NONE, *WAYS, TOGETHER, TOGETHER_ALL_ENGINES)


def play_arm(folder: Path, arm: str, overrides: Sequence[str], steps: int, port: int) -> Round:
    """A short training with the ways of an arm."""
    return play_project(folder, overrides, steps, port, (sys.executable, "-m", "benchmarks.earlier_launch", arm))


def report(rounds: Mapping[str, Sequence[Round]]) -> str:
    """Each arm's times, and their ratio to this project's."""
    out = ["arm                              seconds of a step, by round    median    ratio   messages   reward"]
    for arm, results in rounds.items():
        shown = ", ".join(f"{result.seconds:.1f}" for result in results)
        ratio = median(
            result.seconds / baseline.seconds for result, baseline in zip(results, rounds[NONE], strict=True)
        )
        messages, reward = fmean(result.messages for result in results), fmean(result.reward for result in results)
        middle = median(result.seconds for result in results)
        out.append(f"{arm:32} {shown:30} {middle:7.1f} {ratio:8.2f} {messages:10.0f} {reward:8.3f}")
    return "\n".join(out)


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=Path("runs/quickstart"), help="the folder of quickstart-models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a round")
    parser.add_argument("--arms", nargs="+", default=ARMS, help="`none` is always among them")
    parser.add_argument("--port", type=int, default=8063)
    parser.add_argument("--folder", type=Path, help="default: runs/earlier_ways/SHAPE")
    arguments = parser.parse_args()
    arms = list(dict.fromkeys((NONE, *arguments.arms)))
    for arm in arms:
        ways_of(arm)
    overrides, steps = overrides_of(arguments.shape, arguments.models), arguments.steps
    folder = (arguments.folder or Path("runs/earlier_ways") / arguments.shape).resolve()
    rounds = Rounds(folder, {"overrides": overrides, "steps": steps, "arms": arms})
    results: dict[str, list[Round]] = {arm: [] for arm in arms}
    for number in range(arguments.rounds):
        for arm in arms:
            play = partial(play_arm, arm=arm, overrides=overrides, steps=steps, port=arguments.port)
            results[arm].append(rounds.measure(number, arm, play))
        rounds.end(number)
    print(report(results))


if __name__ == "__main__":
    main()
