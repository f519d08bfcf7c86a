"""What the quickstart learns when it is paid for form, for form under the ledger's cap, and for the outcome.

    form      the quickstart: the reward is the judge's view of the form
    cap       the same, at most the share of the lesson that the teacher did not give away
    outcome   config/train_rl/quickstart_outcome.yaml: four fifths are the delayed post-test

    python -m benchmarks.outcome_arms [--folder runs/outcome_arms] [--seeds 1 2 3] [--steps 24] [--arms form cap …]

All arms begin with the same model; `make quickstart-models` makes it. Every third version plays the held-out lessons,
two conversations each, and all arms are measured by all three rewards. Each training and each measured version is kept
in the folder, so the same command goes on where it was stopped; with `--report` it only prints what is there. The last
version's conversations are kept in `ARM/SEED/held_out.jsonl`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.supervision_arms import WANTED_REWARD, Bench, conversations_needed, run, versions_by_arm
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import LEDGER
from classroom_rl.environments.classroom.config import classroom_rules
from classroom_rl.environments.classroom.conversation import ClassroomRules
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.rewards import reward_of
from classroom_rl.results.statistics import read_exchanges
from classroom_rl.rollout.runner import weighted_sum

FORM, CAP, OUTCOME = "form", "cap", "outcome"
PAID_BY = {"rewards": FORM, "cap": CAP, "outcome": OUTCOME}
"""The figure of each arm's payment. `rewards` is what `conversations_needed` reads."""
FIGURES = {
    "rewards": "paid for form",
    "cap": "paid under the cap",
    "outcome": "paid for the outcome",
    "post_test": "post-test",
    "scaffolded": "slips scaffolded",
}
"""The figures of a version, with their titles."""


class OutcomeBench(Bench):
    """The benchmark of form, cap and outcome."""

    arms = {FORM: [], CAP: ["generation.post_test.caps_pedagogical=true"], OUTCOME: []}
    configs = {OUTCOME: "quickstart_outcome"}

    def overrides(self, save_dir: Path, config: str = "quickstart") -> list[str]:
        return [*super().overrides(save_dir, config), "generation.post_test.enable=true"]

    @cached_property
    def payments(self) -> dict[str, tuple[ClassroomRules, dict[str, float]]]:
        """The rules of a conversation and the weights of its rewards, by arm."""
        payments = {}
        for arm, overrides in OutcomeBench.arms.items():
            arguments = [*self.overrides(self.folder, OutcomeBench.configs.get(arm, "quickstart")), *overrides]
            config = load(TrainRLConfig, "train_rl", arguments, check_train_rl)
            weights, length = reward_weights(config), config.teacher_model.vllm.max_length
            payments[arm] = (classroom_rules(config.generation, weights, length, config.reward_model.grades), weights)
        return payments

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        by_figure: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in FIGURES}
        for record in records:
            for name, values in self.measure_record(record).items():
                by_figure[name][record.problem_id] += values
        if step == self.measured_steps(arm)[-1]:
            lines = "".join(f"{record.model_dump_json()}\n" for record in records)
            (self.folder / arm / str(seed) / "held_out.jsonl").write_text(lines, encoding="utf-8")
        return {
            name: {problem: fmean(values) for problem, values in by_problem.items() if values}
            for name, by_problem in by_figure.items()
        }

    def measure_record(self, record: ConversationRecord) -> dict[str, list[float]]:
        """The figures of a conversation: what each arm would have paid for it, its post-test, and 1 or 0 for each of
        the student's slips, scaffolded or not."""
        measured = {}
        for figure, arm in PAID_BY.items():
            rules, weights = self.payments[arm]
            conversation = record.conversation(rules)
            measured[figure] = [weighted_sum({name: reward_of(name)(conversation) for name in weights}, weights)]
        exchanges = [exchange for exchange in read_exchanges(record) or [] if exchange.errors]
        return measured | {
            "post_test": [record.post_test.score(LEDGER)],
            "scaffolded": [float(exchange.scaffolded) for exchange in exchanges],
        }


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """By arm: the conversations that each seed needed until its held-out reward for form, their mean and the mean of
    the ratios to `form` of the same seed; then every figure of the last version, the mean of the seeds, and each."""
    by_arm = versions_by_arm(lines)
    arms = [arm for arm in OutcomeBench.arms if arm in by_arm]
    base = {seed: conversations_needed(versions) for seed, versions in by_arm[FORM].items()}
    out = [f"conversations until a held-out reward for form of {WANTED_REWARD:.2f}, by seed; mean; ratio to form"]
    for arm in arms:
        needed = {seed: conversations_needed(versions) for seed, versions in sorted(by_arm[arm].items())}
        if None in needed.values():
            out.append(f"  {arm:10}{list(needed.values())}  not reached by all")
            continue
        ratios = [count / base[seed] for seed, count in needed.items() if base.get(seed)]
        ratio = f"{fmean(ratios):.2f} {[round(value, 2) for value in ratios]}" if ratios else "–"
        out.append(f"  {arm:10}{[round(count) for count in needed.values()]}  {fmean(needed.values()):.0f}  {ratio}")
    out.append("\nheld-out lessons after the last step: mean of the seeds, and each")
    for figure, title in FIGURES.items():
        for arm in arms:
            # Without slips, nothing could be scaffolded.
            last = [
                fmean(versions[max(versions)][figure].values() or [nan]) for _, versions in sorted(by_arm[arm].items())
            ]
            out.append(f"  {title:22}{arm:10}{fmean(last):.3f}  {[round(value, 3) for value in last]}")
    return "\n".join(out)


def main() -> None:
    """Train and measure what is missing, then print the report."""
    run(OutcomeBench, report, __doc__, Path("runs/outcome_arms"), steps=24, port=8051)


if __name__ == "__main__":
    main()
