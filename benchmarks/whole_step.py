"""A whole step of training (rollout, judging, gradients, publishing): this project against TRL alone, and its bound.

    python -m benchmarks.whole_step quickstart [--models runs/quickstart] [--rounds 5] [--steps 4] [--folder …]
    python -m benchmarks.whole_step small_tutor
    python -m benchmarks.whole_step small_tutor [key=value …] --against COMMIT

The two take turns, so that what else runs on the machine meets both. Each round starts both programs anew. The times
are those between the ends of two steps, so what loads and warms up is left out; a round counts with its median. Both
play as many conversations on the same lessons, with the same prompts, limits, judge and arguments of TRL. How many
messages these have is shown beside the times: it depends on what the models say. TRL alone is `benchmarks.trl_alone`,
without this project's loop and its changes to torch (trainer/loop.py, trainer/model_loading.py). With --deepspeed, this
project's training is measured with DeepSpeed's ZeRO-2 in its one process, too.
With --against, this project takes turns with an earlier commit of its own instead. Keys are set for all programs, such
as train.number_of_problems_per_batch=2 for smaller batches.
The bound is `benchmarks.step_bound`: this project's messages again, without anything but models, gradients and weights.
What is measured is kept in the folder, so the same command goes on where it was stopped.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

from benchmarks.rounds import PROJECT, SHAPES, Round, Rounds, full_name, overrides_of, play_project, run_in, take_out
from classroom_rl.results.run_folder import read_lines

BOUND, TRL_ALONE, DEEPSPEED = "bound", "TRL alone", "with DeepSpeed"
_WITH_DEEPSPEED = ("./start_rl_training.sh", "--config_file", "config/deepspeed/1CPU.yaml")


def replay_bound(folder: Path, project: Path, overrides: Sequence[str], played: Round) -> Round:
    """The bound of the training that `play_project` made in the folder `project`."""
    run_in([sys.executable, "-m", "benchmarks.step_bound", str(project / "run"), *overrides], folder)
    lines = (folder / "output.log").read_text().splitlines()
    seconds = json.loads(next(line for line in reversed(lines) if line.startswith("{")))["step"]
    return replace(played, seconds=median(seconds[1:]))


def play_trl_alone(folder: Path, overrides: Sequence[str], steps: int) -> Round:
    """A short training by TRL alone."""
    out = folder / "steps.jsonl"
    run_overrides = [f"train.max_steps={steps + 1}", f"logging.save_dir={folder / 'run'}"]
    run_in([sys.executable, "-m", "benchmarks.trl_alone", str(out), *overrides, *run_overrides], folder)
    return Round.of(read_lines(out))


def report(rounds: Mapping[str, Sequence[Round]]) -> str:
    """Each program's times and figures, and the ratio of the rounds."""
    out = ["                seconds of a step, by round             median   messages   reward"]
    for name, results in rounds.items():
        shown = ", ".join(f"{result.seconds:.1f}" for result in results)
        middle, messages = median(result.seconds for result in results), fmean(result.messages for result in results)
        out.append(
            f"{name:15} {shown:40} {middle:5.1f} {messages:10.0f} {fmean(result.reward for result in results):8.3f}"
        )
    *_, other = (name for name in rounds if name not in (BOUND, DEEPSPEED))
    pairs = list(zip(rounds[other], rounds[PROJECT], strict=True))
    ratio = median(theirs.seconds / ours.seconds for theirs, ours in pairs)
    per_message = median((theirs.seconds / theirs.messages) / (ours.seconds / ours.messages) for theirs, ours in pairs)
    if BOUND in rounds:
        above = median(ours.seconds / least.seconds for ours, least in zip(rounds[PROJECT], rounds[BOUND], strict=True))
        out.append(f"this project takes {above:.2f} x the time of its bound")
    if DEEPSPEED in rounds:
        both = zip(rounds[DEEPSPEED], rounds[PROJECT], strict=True)
        zero = median(theirs.seconds / ours.seconds for theirs, ours in both)
        out.append(f"with DeepSpeed it takes {zero:.2f} x the time of a step")
    out.append(f"{other} takes {ratio:.2f} x the time of a step, {per_message:.2f} x per message (medians of rounds)")
    return "\n".join(out)


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--models", type=Path, default=Path("runs/quickstart"), help="the folder of quickstart-models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a round")
    parser.add_argument("--deepspeed", action="store_true", help="measure this project with DeepSpeed, too")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit instead of TRL alone and the bound")
    parser.add_argument("--port", type=int, default=8061)
    parser.add_argument("--folder", type=Path, help="default: runs/whole_step/SHAPE")
    arguments = parser.parse_args()
    overrides, steps = [*overrides_of(arguments.shape, arguments.models), *arguments.overrides], arguments.steps
    folder = (arguments.folder or Path("runs/whole_step") / arguments.shape).resolve()
    play = partial(play_project, overrides=overrides, steps=steps, port=arguments.port)
    others = [BOUND, TRL_ALONE, *([DEEPSPEED] if arguments.deepspeed else [])]
    if arguments.against:
        others = [full_name(arguments.against)[:12]]
        take_out(others[0], folder / "earlier")
    programs = [PROJECT, *others]
    rounds = Rounds(folder, {"overrides": overrides, "steps": steps, "programs": programs})
    ways: dict[str, Callable[[Path], Round]] = {
        PROJECT: play,
        TRL_ALONE: partial(play_trl_alone, overrides=overrides, steps=steps),
        DEEPSPEED: partial(play, command=_WITH_DEEPSPEED),
    }
    results: dict[str, list[Round]] = {name: [] for name in programs}
    for number in range(arguments.rounds):
        for name in programs:
            way = ways.get(name, partial(play, source=folder / "earlier"))
            if name == BOUND:
                project = rounds.folder_of(number, PROJECT)
                way = partial(replay_bound, project=project, overrides=overrides, played=results[PROJECT][-1])
            results[name].append(rounds.measure(number, name, way))
        rounds.end(number)
    print(report(results))


if __name__ == "__main__":
    main()
