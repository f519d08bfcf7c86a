"""How long the quickstart takes, and what its tutor reaches, against an earlier commit of this repository.

    python -m benchmarks.quickstart_against COMMIT [--rounds 3] [--folder runs/quickstart_against]

Each round runs both quickstarts from nothing, the earlier one first in every other round, with the packages of this
environment. The seconds are of the whole command, from its start to its report. What is measured is kept in the folder,
so the same command goes on where it was stopped.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from benchmarks.rounds import CONVERSATIONS, Round, Rounds, run_in
from config.load import ROOT
from config.values import SAMPLED
from src.results.run_folder import RunData, load_run

NOW = "now"
_MODULE = "src.launch.quickstart"


def take_out(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder, if they are not there."""
    if (folder / "src").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def play_quickstart(folder: Path, source: Path) -> Round:
    """Run a quickstart; the files of its run are kept in `folder/run`."""
    started = time.perf_counter()
    run_in([sys.executable, "-m", _MODULE, f"logging.save_dir={folder / 'run'}"], folder, source)
    seconds = time.perf_counter() - started
    run = load_run(folder / "run")
    return Round(seconds, reward_after(run), CONVERSATIONS * fmean(line["conversation/messages"] for line in run.steps))


def reward_after(run: RunData) -> float:
    """The mean reward on held-out lessons, sampled as in training, after it."""
    if run.after is None:
        raise ValueError(f"{run.folder} holds no evaluation after the training.")
    return run.after.metrics[SAMPLED]["reward"]["mean"]


def report(rounds: Mapping[str, Sequence[Round]]) -> str:
    """Seconds and held-out rewards of both, by round, and the ratio of the seconds of each round."""
    out = []
    for name, found in rounds.items():
        seconds = ", ".join(f"{each.seconds:.0f}" for each in found)
        rewards = ", ".join(f"{each.reward:.3f}" for each in found)
        out.append(f"{name}: {seconds} s; held-out reward {rewards}")
    earlier, now = rounds.values()
    ratios = [ours.seconds / theirs.seconds for theirs, ours in zip(earlier, now, strict=True)]
    out.append(f"now it takes {median(ratios):.2f} x as long (by round: {', '.join(f'{each:.2f}' for each in ratios)})")
    return "\n".join(out)


def main() -> None:
    """Measure what is missing, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart_against"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    rounds = Rounds(folder, {"commit": options.commit})
    sources = {options.commit: folder / "earlier", NOW: ROOT}
    take_out(options.commit, sources[options.commit])
    found: dict[str, list[Round]] = {name: [] for name in sources}
    for number in range(options.rounds):
        for name in sorted(sources, key=lambda name: (name == NOW) == (number % 2 == 0)):
            found[name].append(rounds.measure(number, name, partial(play_quickstart, source=sources[name])))
    print(report(found))


if __name__ == "__main__":
    main()
