"""How long the quickstart takes, and what its tutor reaches, against an earlier commit of this repository.

    python -m benchmarks.quickstart_against COMMIT [--rounds 3] [--busy 2] [--folder runs/quickstart_against]

Each round runs both quickstarts from nothing, the earlier one first in every other round, with the packages of this
environment. The seconds are of the whole command, from its start to its report. The judge's rules became stricter over
time, so the held-out conversations of both are judged again, by today's. With `--busy`, that many processes compute
beside both without a pause. What is measured is kept in the folder, so the same command goes on where it was stopped.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from benchmarks.rounds import CONVERSATIONS, Round, Rounds, busy_processes, full_name, run_in, take_out
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import SAMPLED
from classroom_rl.evaluation.rejudge import judge_again
from classroom_rl.results.evaluation_files import group_by_problem
from classroom_rl.results.run_folder import Measurement, RunData, load_run
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.intervals import mean_with_ci, shown
from classroom_rl.server.open_models import embedded_judge

NOW = "now"
RUN = "run"
"""The run folder in that of a round."""
_MODULE = "classroom_rl.launch.quickstart"
_FORMER_MODULE = "src.launch.quickstart"
"""The quickstart of version 0.1, which had no package."""


def play_quickstart(folder: Path, source: Path) -> Round:
    """Run a quickstart; the files of its run are kept in its folder `RUN`."""
    started = time.perf_counter()
    module = _MODULE if (source / "src/classroom_rl").is_dir() else _FORMER_MODULE
    run_in([sys.executable, "-m", module, f"logging.save_dir={folder / RUN}"], folder, source)
    seconds = time.perf_counter() - started
    run = load_run(folder / RUN)
    return Round(seconds, reward_after(run), CONVERSATIONS * fmean(line["conversation/messages"] for line in run.steps))


def _after(run: RunData) -> Measurement:
    if run.after is None:
        raise ValueError(f"{run.folder} holds no evaluation after the training.")
    return run.after


def reward_after(run: RunData) -> float:
    """The mean reward on held-out lessons, sampled as in training, after it, as its own judge saw it."""
    return _after(run).metrics[SAMPLED]["reward"]["mean"]


def judged_today(run: RunData) -> dict[str, dict[str, list[float]]]:
    """Sampling → lesson → the rewards of its conversations after the training, by today's rubric and configuration."""
    config = load(TrainRLConfig, "train_rl", ("--config-name", "quickstart"))
    judge = embedded_judge(config.judge_model.model_name_or_path)
    return {
        sampling: {
            lesson: [judge_again(judge, record, config).now for record in group]
            for lesson, group in group_by_problem(records).items()
        }
        for sampling, records in _after(run).records.items()
    }


def report(
    rounds: Mapping[str, Sequence[Round]], judged: Mapping[str, Sequence[dict]], stages: Mapping[str, Sequence[dict]]
) -> str:
    """Seconds and held-out rewards of both, by round, and how they compare in each round.

    Args:
        judged: what `judged_today` found, by program and round.
        stages: the seconds of all training steps by stage (`RunData.step_seconds`), by program and round.
    """
    out = []
    for name, results in rounds.items():
        seconds = ", ".join(f"{result.seconds:.0f}" for result in results)
        rewards = ", ".join(f"{result.reward:.3f}" for result in results)
        out.append(f"{name}: {seconds} s; held-out reward by its own judge {rewards}")
        for stage in stages[name][0]:
            out.append(f"    of it {stage}: {', '.join(f'{by_stage[stage]:.0f}' for by_stage in stages[name])} s")
        for sampling in judged[name][0]:
            rewards = ", ".join(shown(mean_with_ci(by_sampling[sampling])) for by_sampling in judged[name])
            out.append(f"    by today's, {sampling}: {rewards}")
    (earlier, now), (before, after) = rounds.values(), judged.values()
    for sampling in before[0]:
        changes = [
            paired_change(*(by_sampling[sampling] for by_sampling in pair)) for pair in zip(before, after, strict=True)
        ]
        out.append(f"the reward changed, {sampling}: {', '.join(shown(change, '+') for change in changes)}")
    ratios = [ours.seconds / theirs.seconds for theirs, ours in zip(earlier, now, strict=True)]
    out.append(
        f"now it takes {median(ratios):.2f} x as long (by round: {', '.join(f'{value:.2f}' for value in ratios)})"
    )
    return "\n".join(out)


def main() -> None:
    """Measure what is missing, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart_against"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    rounds = Rounds(folder, {"commit": full_name(options.commit), "busy": options.busy})
    sources = {options.commit: folder / "earlier", NOW: ROOT}
    take_out(options.commit, sources[options.commit])
    results: dict[str, list[Round]] = {name: [] for name in sources}
    runs: dict[str, list[Path]] = {name: [] for name in sources}
    for number in range(options.rounds):
        for name in sorted(sources, key=lambda name: (name == NOW) == (number % 2 == 0)):
            runs[name].append(rounds.folder_of(number, name) / RUN)
            with busy_processes(options.busy):
                results[name].append(rounds.measure(number, name, partial(play_quickstart, source=sources[name])))
    data = {name: [load_run(run) for run in folders] for name, folders in runs.items()}
    judged = {name: [judged_today(run) for run in loaded] for name, loaded in data.items()}
    stages = {name: [run.step_seconds() for run in loaded] for name, loaded in data.items()}
    print(report(results, judged, stages))


if __name__ == "__main__":
    main()
