"""How much faster a training is if the next batch is played while this one is judged and trained on, with a judge far
away.

    waits_2, overlaps_2         a judge that answers after 2 s, with train.max_staleness 0 and 1
    waits_0.5, overlaps_0.5     one that answers after 0.5 s

    python -m benchmarks.overlap [--folder runs/overlap] [--seeds 1 2 3] [--steps 24] [--arms waits_2 overlaps_2]

They train the quickstart with the rubric behind HTTP, from the models of `make quickstart-models`. A step's time is
that from one line of metrics.jsonl to the next; the first two are left out. The arms of a seed run one after the other,
so on a machine with other work give several seeds. Every third version plays the held-out lessons, judged by the rubric
itself.

Two ceilings stand beside each ratio, from the parts of a step of `waits` by its journal and log: the playing until the
last message, the judging after it, and the rest, which is training and publishing. No weights are more than a batch
older, so a step is never shorter than half the sum. Beyond that, the judging is all that can be hidden where engines
and trainer share their cores; with cores of their own, a step is never shorter than playing, or than the rest.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks.group_judge_noise import Errors, NoiseBench, verdict_of
from benchmarks.supervision_arms import run
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.run_folder import METRICS_NAME, read_lines
from classroom_rl.rollout.intervals import mean_with_ci, shown
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal, request_of
from tests.support.judge_endpoint import Behaviour, Exchange, judge_endpoint, says

DELAYS_S = (2.0, 0.5)
_WARM_UP = 2
"""Steps at the beginning that are left out."""


class OverlapBench(NoiseBench):
    """The benchmark of playing ahead."""

    arms: Mapping[str, Sequence[str]] = {
        f"{name}_{delay_s:g}": [f"train.max_staleness={staleness}"]
        for delay_s in DELAYS_S
        for name, staleness in (("waits", 0), ("overlaps", 1))
    }

    def train(self, arm: str, seed: int) -> Path:
        delay_s = float(arm.partition("_")[2])
        with judge_endpoint(answers_after(delay_s), self.port + 1) as endpoint:
            return self.train_with(arm, seed, self.judged_at(endpoint.url, Errors(0, 0), in_groups=False))

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        logged = [line for line in read_lines(self.folder / arm / str(seed) / METRICS_NAME) if "reward" in line]
        steps = [after["time"] - before["time"] for before, after in pairwise(logged)][_WARM_UP:]
        parts = {name: median(line[f"seconds/{name}"] for line in logged[_WARM_UP:]) for name in ("rollout", "train")}
        played = played_and_judged(self.folder / arm / str(seed) / JOURNAL_NAME)[_WARM_UP:]
        parts |= {name: median(seconds[index] for seconds in played) for index, name in enumerate(("play", "judge"))}
        return {**super().figures(arm, seed, step, records), "seconds": median(steps), **parts}


def played_and_judged(journal: Path) -> list[tuple[float, float]]:
    """Of each batch in a journal, in order: the seconds from its begin to its last message, and from there to its last
    conversation's end."""
    begun: dict[str, float] = {}
    last: dict[str, dict[str, float]] = defaultdict(dict)
    for event in read_journal(journal):
        if event["event"] == "batch":
            begun.setdefault(event["request"], event["time"])
        elif event["event"] in ("turn", "conversation"):
            last[request_of(event["conversation"])][event["event"]] = event["time"]
    complete = {request: ends for request, ends in last.items() if len(ends) == 2}
    return [(ends["turn"] - begun[request], ends["conversation"] - ends["turn"]) for request, ends in complete.items()]


def ceilings(step_s: float, play_s: float, judge_s: float) -> tuple[float, float]:
    """How many times as fast a step can become at most, where engines and trainer share their cores, and with cores of
    their own, from the parts of a step without overlap."""
    rest_s = step_s - play_s - judge_s
    return step_s / max(step_s - judge_s, step_s / 2), step_s / max(play_s, rest_s, step_s / 2)


def answers_after(seconds: float) -> Callable[[dict, int], Behaviour]:
    """A judge that gives the rubric's verdict after so many seconds."""

    def script(body: dict, nth: int) -> Behaviour:
        def act(exchange: Exchange) -> None:
            arrived = time.monotonic()
            text = verdict_of(body, Random(nth))
            time.sleep(max(0.0, arrived + seconds - time.monotonic()))
            says(text)(exchange)

        return act

    return script


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """By delay: seconds per step by seed, their ratio and its ceiling, and the difference in held-out reward."""
    last: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for line in sorted(lines, key=lambda line: line["step"]):
        last[line["arm"]][line["seed"]] = line
    out = []
    for delay_s in DELAYS_S:
        waits, overlaps = (last[f"{name}_{delay_s:g}"] for name in ("waits", "overlaps"))
        seeds = sorted(set(waits) & set(overlaps))
        if not seeds:
            continue
        ratio = median(waits[seed]["seconds"] / overlaps[seed]["seconds"] for seed in seeds)
        bounds = [ceilings(line["seconds"], line["play"], line["judge"]) for line in map(waits.get, seeds)]
        shared, apart = (median(values) for values in zip(*bounds, strict=True))
        parts = [median(waits[seed][name] for seed in seeds) for name in ("play", "judge")]
        out.append(f"judge {delay_s:g} s away, seeds {seeds}: a step takes")
        for name, arm in (("waits", waits), ("overlaps", overlaps)):
            steps = ", ".join(f"{arm[seed]['seconds']:.2f}" for seed in seeds)
            reward = fmean(fmean(arm[seed]["rewards"].values()) for seed in seeds)
            out.append(f"  {name:9}{steps} s; held-out reward after {arm[seeds[0]]['step']} steps {reward:.3f}")
        gaps: dict[str, list[float]] = defaultdict(list)
        for seed in seeds:
            for lesson, reward in overlaps[seed]["rewards"].items():
                gaps[lesson].append(reward - waits[seed]["rewards"][lesson])
        gap = mean_with_ci(gaps, (-1.0, 1.0))
        out.append(
            f"  {ratio:.2f} x as fast (at most {shared:.2f} on shared cores, {apart:.2f} on cores of their own: "
            f"{parts[0]:.2f} s of playing, {parts[1]:.2f} s of judging after it); "
            f"reward {shown(gap, '+')}"
        )
    return "\n".join(out)


def main() -> None:
    """Train and measure what is missing, then print the report."""
    run(OverlapBench, report, __doc__, Path("runs/overlap"), steps=24, port=8057)


if __name__ == "__main__":
    main()
