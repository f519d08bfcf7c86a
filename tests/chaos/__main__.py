"""The chaos suite: what a run survives, what it counts, and what it must never do.

    python -m tests.chaos [--only judge soak …] [--shard 1/4] [--folder runs/chaos] [--again]

A case that was played to its end without a fault is not played again, unless with --again. After its cases, each part
prints a table of all results that are in the folder, from other shards, too. The exit status is 1 if anything was not
as it has to be.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos import damage, judge_calls, kills, network, openapi, soak, trainings, transfer, twice
from tests.chaos.cases import Case, Result, Results, Settings, in_shard

PARTS: dict[str, tuple[Callable[[Settings], list[Case]], Callable[[Sequence[Result]], str]]] = {
    "judge": (judge_calls.cases, judge_calls.summary),
    "kill": (kills.kill_cases, trainings.summary),
    "stop": (kills.stop_cases, trainings.summary),
    "transfer": (transfer.cases, transfer.summary),
    "disk": (damage.disk_cases, trainings.summary),
    "damage": (damage.damage_cases, trainings.summary),
    "twice": (twice.cases, trainings.summary),
    "network": (network.cases, trainings.summary),
    "soak": (soak.cases, soak.summary),
    "openapi": (openapi.cases, openapi.summary),
}
"""By part: its cases, and its results as a table."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--cases", nargs="+", help="only cases with one of these in their names")
    parser.add_argument("--shard", default="1/1", help="k/n: the k-th of n shares of the cases")
    parser.add_argument("--calls", type=int, default=10_000, help="judge calls")
    parser.add_argument("--batches", type=int, default=1000, help="batches of the soak")
    parser.add_argument("--kills", type=int, default=20, help="for each program")
    parser.add_argument("--stopped", type=float, default=60.0, help="seconds for which a program is stopped")
    parser.add_argument("--requests", type=int, default=200, help="of each kind to each route")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--again", action="store_true", help="also play cases that were played already")
    options = parser.parse_args(arguments)
    settings = Settings(
        options.folder.resolve(), options.calls, options.batches, options.kills, options.stopped, options.requests
    )
    results = Results(settings.folder)
    by_part = {part: PARTS[part][0](settings) for part in options.only}
    cases = [case for part_cases in by_part.values() for case in part_cases]
    if options.cases:
        cases = [case for case in cases if any(word in case.name for word in options.cases)]
    for case in in_shard(cases, options.shard):
        _play(case, settings, results, options.again)
    any_wrong = False
    for part, part_cases in by_part.items():
        part_results = results.of(part_cases)
        any_wrong |= any(result.wrong for result in part_results)
        left_out = sum(bool(result.left_out) for result in part_results)
        played = f"{len(part_results) - left_out} of {len(part_cases)} cases" + (
            f", {left_out} left out" if left_out else ""
        )
        print(f"\n{part}: {played}\n\n{PARTS[part][1](part_results)}")
    return 1 if any_wrong else 0


def _play(case: Case, settings: Settings, results: Results, again: bool) -> None:
    previous = results.get(case)
    if previous is not None and not (previous.wrong or previous.left_out or again):
        return
    folder = settings.folder / case.part / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{case.part} {case.name} …", flush=True)
    started = time.monotonic()
    result = case.play(folder, settings)
    results.keep(case, result)
    outcome = "; ".join(result.wrong) or (f"left out: {result.left_out}" if result.left_out else "as it has to be")
    print(f"  {outcome} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
