"""How many conversations the quickstart needs until a held-out reward, by what is done for more signal in each of them.

    keep                every group is trained on, problems in the order of the dataset
    drop, resample      groups without variance are left out, or further problems are played in their place
    curriculum          problems are drawn by how much they last taught
    curriculum_drop     both
    turn_credit         the rubric's findings on each message, beside the reward of the conversation
    turn_credit_drop    turn credit, and groups are left out where messages do not differ either

    python -m benchmarks.signal_arms [--folder runs/signal_arms] [--seeds 1 2 3] [--steps 24] [--arms keep drop …]

All arms begin with the same model; `make quickstart-models` makes it. Every third version plays the held-out lessons,
two conversations each. Each training and each measured version is kept in the folder, so the same command goes on where
it was stopped; with `--report` it only prints what is there. Every conversation that was played counts, those on
further problems, too.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.supervision_arms import (
    CONVERSATIONS_PER_STEP,
    WANTED_REWARD,
    Bench,
    conversations_needed,
    run,
    versions_by_arm,
)
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.run_folder import METRICS_NAME, read_lines

GROUP_SIZE = 8
_DROP, _RESAMPLE = (f"train.groups_without_variance={mode}" for mode in ("drop", "resample"))
_CURRICULUM = "dataset.curriculum=true"
_TURN_CREDIT = "train.turn_credit={mode: immediate, weight: 0.3, rewards: {judge: 1.0}}"


class SignalBench(Bench):
    """The benchmark of the ways to more signal."""

    arms = {
        "keep": [],
        "drop": [_DROP],
        "resample": [_RESAMPLE],
        "curriculum": [_CURRICULUM],
        "curriculum_drop": [_CURRICULUM, _DROP],
        "turn_credit": [_TURN_CREDIT],
        "turn_credit_drop": [_TURN_CREDIT, _DROP],
    }

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        rewards = defaultdict(list)
        for record in records:
            rewards[record.problem_id].append(record.reward)
        logged = read_lines(self.folder / arm / str(seed) / METRICS_NAME)
        return {
            "conversations": conversations_played([line for line in logged if line.get("step", 0) <= step]),
            "rewards": {problem: fmean(values) for problem, values in rewards.items()},
        }


def conversations_played(metrics: Sequence[Mapping[str, Any]]) -> float:
    """The conversations of these steps, further problems included."""
    usual = CONVERSATIONS_PER_STEP / GROUP_SIZE
    return sum(GROUP_SIZE * line.get("groups/played", usual) for line in metrics if "reward" in line)


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """By arm: the conversations needed by each seed, their mean, the mean of the ratios to `keep` of the same seed, and
    the reward after the last step."""
    by_arm = versions_by_arm(lines)
    out = [f"conversations until a held-out reward of {WANTED_REWARD:.2f}, by seed; mean; ratio to keep; last reward"]
    base = {seed: conversations_needed(versions) for seed, versions in by_arm["keep"].items()}
    for arm in (arm for arm in SignalBench.arms if arm in by_arm):
        needed = {seed: conversations_needed(versions) for seed, versions in sorted(by_arm[arm].items())}
        shown = [round(count) if count is not None else None for count in needed.values()]
        reached = [count for count in needed.values() if count is not None]
        ratios = [count / base[seed] for seed, count in needed.items() if count is not None and base.get(seed)]
        mean = f"{fmean(reached):.0f}" if len(reached) == len(needed) else "not reached by all"
        ratio = f"{fmean(ratios):.2f} {[round(value, 2) for value in ratios]}" if len(ratios) == len(needed) else "–"
        last = fmean(fmean(versions[max(versions)]["rewards"].values()) for versions in by_arm[arm].values())
        out.append(f"  {arm:18}{shown}  {mean}  {ratio}  {last:.3f}")
    return "\n".join(out)


def main() -> None:
    """Train and measure what is missing, then print the report."""
    run(SignalBench, report, __doc__, Path("runs/signal_arms"), steps=24, port=8049)


if __name__ == "__main__":
    main()
