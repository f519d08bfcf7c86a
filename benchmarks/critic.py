"""Measures what PPO's critic explains on the quickstart or on Marooned, with several keys, and what could be explained.

    shipped    the quickstart with PPO, or Marooned with PPO over messages
    mlp        the same with train.ppo.head=mlp
    heavy      a critic of weight 5, its head with a rate of 1e-3, after a warm-up of 6 steps
    mlp_heavy  both

    python -m benchmarks.critic quickstart|marooned [--folder runs/critic] [--seeds 1 2] [--steps 50] [--arms shipped …]

It needs the models of `make quickstart-models` or `make marooned-models`. Each training is kept in the folder, so the
same command goes on where it was stopped; with `--report` it only prints what is there.

The explained variance is the metric `ppo/explained_variance`: of each batch, before anything is learned from it. Of the
quickstart's conversations is printed, too, which share of the rewards' variance in a batch lies between lessons (all
that a value per lesson could explain), what a regression explains that knows the rubric's verdicts on the messages so
far, and what one explains from the last hidden states of the model before the training, which is what a head on a fixed
trunk sees.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance

import torch
from transformers import AutoModelForCausalLM

from benchmarks.marooned_arms import MaroonedBench
from benchmarks.ppo_quickstart import PPO_CONFIG, explained_by_faults, explained_by_regression
from benchmarks.supervision_arms import Bench
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.rollout_files import read_records
from classroom_rl.results.run_folder import read_lines
from classroom_rl.trainer.advantages import ProcessRewards, first_tokens
from classroom_rl.trainer.ppo import steps_of

EXPLAINED = "ppo/explained_variance"
PENALTY = 100.0
"""Of the regression on hidden states, of which there are many more than of faults."""
HEAVY = ["train.ppo.value_weight=5", "train.ppo.value_learning_rate=1e-3", "train.ppo.value_warmup_steps=6"]
ARMS = {
    "shipped": [],
    "mlp": ["train.ppo.head=mlp"],
    "heavy": HEAVY,
    "mlp_heavy": ["train.ppo.head=mlp", *HEAVY],
}
MAROONED_PPO = [
    "train.algorithm=ppo",
    "train.scale_rewards=group",
    "train.ppo.gae_over=turns",
    "train.corrections.mode=none",
]


class CriticBench(Bench):
    """The quickstart with PPO. A step is an optimizer step."""

    arms = ARMS
    configs = dict.fromkeys(ARMS, PPO_CONFIG)

    def measured_steps(self, arm: str) -> Sequence[int]:
        return range(0, self.steps + 1, self.steps)


class MaroonedCriticBench(MaroonedBench):
    """Marooned with PPO in place of GRPO and corrections."""

    arms = {name: [*MAROONED_PPO, *overrides] for name, overrides in ARMS.items()}

    def measured_steps(self, arm: str) -> Sequence[int]:
        return range(0, self.steps + 1, self.steps)


BENCHES = {"quickstart": (CriticBench, 50), "marooned": (MaroonedCriticBench, 16)}
"""Each with its number of steps."""


def figures_of(run: Path) -> tuple[list[float], list[float]]:
    """The explained variance and the mean reward of every batch of a training but those of the first third."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if EXPLAINED in line]
    lines = lines[len(lines) // 3 :]
    return [line[EXPLAINED] for line in lines], [line["reward"] for line in lines]


def share_between_problems(batches: Sequence[Sequence[ConversationRecord]]) -> float:
    """The share of the variance of rewards inside batches that lies between problems: an unbiased estimate (analysis of
    variance with random effects), which can be below 0."""
    between, within = [], []
    for records in batches:
        rewards = defaultdict(list)
        for record in (record for record in records if record.reward is not None):
            rewards[record.problem_id].append(record.reward)
        groups = [group for group in rewards.values() if len(group) > 1]
        within_batch = fmean(variance(group) for group in groups)
        within.append(within_batch)
        between.append(variance(map(fmean, groups)) - within_batch * fmean(1 / len(group) for group in groups))
    return fmean(between) / (fmean(between) + fmean(within))


def centred(batches: Sequence[Sequence[ConversationRecord]]) -> list[ConversationRecord]:
    """The conversations with rewards of mean 0 in each batch: how the policy gets better is no merit of a critic."""
    shifted = []
    for records in batches:
        rewarded = [record for record in records if record.reward is not None]
        mean = fmean(record.reward for record in rewarded)
        shifted += [record.model_copy(update={"reward": record.reward - mean}) for record in rewarded]
    return shifted


def explained_by_trunk(records: Sequence[ConversationRecord], folder: Path) -> float | None:
    """What a linear function explains of the rewards that sees what a head on this model sees before each message."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()

    def states_of(record: ConversationRecord) -> list[torch.Tensor]:
        ids = torch.tensor([[*record.prompt_ids, *record.completion_ids]])
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids).last_hidden_state[0, len(record.prompt_ids) - 1 : -1]
        steps = steps_of(record, ProcessRewards([None] * 1000, []), None, 0.0)
        messages = torch.tensor([steps.messages[: len(hidden)]])
        return [torch.cat([state, torch.ones(1)]) for state in hidden[first_tokens(messages)[0]]]

    return explained_by_regression(records, states_of, PENALTY)


def finished(bench: Bench, arm: str) -> list[Path]:
    """The run folders of an arm's trainings, by seed."""
    return sorted(path.parent for path in (bench.folder / arm).glob("*/learning.json"))


def report(bench: Bench) -> str:
    """A line for each training: the explained variance (mean, least and most of a batch), and the mean reward."""
    out = ["batches of the last two thirds: explained variance, mean [least, most]; mean reward"]
    for arm in ARMS:
        for run in finished(bench, arm):
            explained, rewards = figures_of(run)
            spread = f"{fmean(explained):+.3f} [{min(explained):+.2f}, {max(explained):+.2f}]"
            out.append(f"  {arm:12} seed {run.name}: {spread}; reward {fmean(rewards):.3f}")
    return "\n".join(out)


def ceilings(bench: CriticBench) -> str:
    """What could be explained of the rewards of the first arm's conversations, early and late in the training."""
    out = ["what could be explained: between lessons; by the faults so far; by the trunk before the training"]
    for run in finished(bench, "shipped"):
        batches = [read_records(path) for path in sorted((run / "rollouts").glob("*.parquet"))]
        for name, half in (("first", batches[: len(batches) // 2]), ("second", batches[len(batches) // 2 :])):
            records = centred(half)
            trunk = explained_by_trunk(records, bench.models / "sft" / "model")
            shares = [share_between_problems(half), explained_by_faults(records), trunk]
            out.append(f"  seed {run.name}, {name} half: " + ", ".join(f"{share:+.3f}" for share in shares))
    return "\n".join(out)


def main() -> None:
    """Train what is missing, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(BENCHES))
    parser.add_argument("--folder", type=Path, default=Path("runs/critic"))
    parser.add_argument("--models", type=Path, help="the folder with the models; default: runs/ and the task's name")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--port", type=int, default=8047)
    parser.add_argument("--report", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    kind, steps = BENCHES[arguments.task]
    models = arguments.models or Path("runs") / arguments.task
    if not (models / "sft" / "model").is_dir():
        parser.error(f"{models} has no fine-tuned model: run make {arguments.task}-models, or give --models.")
    folder = (arguments.folder / arguments.task).resolve()
    bench = kind(folder, models.resolve(), arguments.steps or steps, arguments.port)
    for seed, arm in [] if arguments.report else [(seed, arm) for seed in arguments.seeds for arm in arguments.arms]:
        bench.train(arm, seed)
    print(report(bench))
    if isinstance(bench, CriticBench):
        print(ceilings(bench))


if __name__ == "__main__":
    main()
