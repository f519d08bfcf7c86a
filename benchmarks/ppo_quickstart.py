"""Measures PPO against GRPO on the quickstart: both train the same tutor with equal numbers of conversations, and every
third version is played on held-out lessons. Of PPO's versions it is measured, too, how much of the variance of those
lessons' rewards their critic explains, and, beside it, how much a regression explains that knows what the rubric found
wrong in the messages so far: about what a critic could reach.

    grpo     the quickstart
    grpo_2   the same with two passes over each batch, as PPO has
    ppo      config/train_rl/quickstart_ppo.yaml
    tokens   the same with tokens as steps in place of messages
    control  PPO with shuffled rewards: it must learn nothing, and its critic must explain nothing

    python -m benchmarks.ppo_quickstart [--folder runs/ppo_arms] [--seeds 1 2] [--batches 30] [--arms grpo ppo …]

It needs the models of `make quickstart-models`. Each training and each measured version is kept in the folder, so the
same command goes on where it was stopped; with `--report` it only prints what is there.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.supervision_arms import (
    CONVERSATIONS_PER_STEP,
    EVERY,
    Bench,
    conversations_needed,
    held_out_lessons,
    measure,
    reviews_of,
)
from classroom_rl.config.base import default_penalties
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.results.run_folder import read_lines
from classroom_rl.trainer.advantages import ProcessRewards, first_tokens, moments
from classroom_rl.trainer.critic import HEAD_FILE, ValueHead, kind_of, read_head
from classroom_rl.trainer.ppo import critic_path, explained_variance, steps_of

GRPO, GRPO_TWICE = "grpo", "grpo_2"
PPO_CONFIG = "quickstart_ppo"
MOST_PLACES = 8
"""Messages from this one on count as one place."""


class AlgorithmBench(Bench):
    """The benchmark of supervision with other arms, and with the critic's figures. A step is a batch."""

    arms = {
        GRPO: [],
        GRPO_TWICE: ["train.mu=2"],
        "ppo": [],
        "tokens": ["train.ppo.gae_over=tokens"],
        "control": ["train.shuffle_rewards=true"],
    }
    configs = {"ppo": PPO_CONFIG, "tokens": PPO_CONFIG, "control": PPO_CONFIG}

    def version(self, arm: str, step: int) -> int:
        return step * passes_of(self.configs.get(arm, "quickstart"), tuple(self.arms[arm]))

    def figures(self, arm: str, seed: int, step: int, records: Sequence[ConversationRecord]) -> dict[str, Any]:
        figures = super().figures(arm, seed, step, records)
        if arm not in self.configs:
            return figures
        figures["explained_by_faults"] = explained_by_faults(records)
        run, version = self.folder / arm / str(seed), self.version(arm, step)
        return figures | explained(records, policy_path(run, version), critic_of(run, version))


@cache
def passes_of(config: str, overrides: tuple[str, ...]) -> int:
    """The optimizer steps on a batch."""
    return load(TrainRLConfig, "train_rl", ["--config-name", config, *overrides]).train.mu


def critic_of(run: Path, version: int) -> Path:
    """The head of a policy version: kept with its batch, or, of the last version, in its checkpoint."""
    path = critic_path(run, version)
    return path if path.exists() else run / "checkpoints" / f"checkpoint-{version}" / HEAD_FILE


def explained(records: Sequence[ConversationRecord], policy: Path, head: Path) -> dict[str, float | None]:
    """How much of the variance of these conversations' rewards a critic explains, with every sampled token as a state,
    and with the first one of every message."""
    model = AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    critic = ValueHead(model.config.get_text_config().hidden_size, model.device, kind_of(head))
    read_head(critic, head)
    sums = {name: torch.zeros(2, 3, dtype=torch.float64) for name in ("tokens", "turns")}
    for record in records:
        if record.reward is None:
            continue
        values = values_of(model, critic, record)
        steps = steps_of(record, ProcessRewards([None] * 1000, []), None, 0.0)
        messages = torch.tensor([steps.messages[: len(values)]])
        returns = torch.full_like(values, record.reward).unsqueeze(0)
        for name, mask in (("tokens", messages >= 0), ("turns", first_tokens(messages))):
            sums[name] += torch.stack([moments(returns - values, mask), moments(returns, mask)])
    return {f"explained_{name}": explained_variance(*totals) for name, totals in sums.items()}


def explained_by_faults(records: Sequence[ConversationRecord]) -> float | None:
    """The share of the variance of rewards that a regression explains before each message, from the number of the
    message and from what the rubric found in the messages before it."""
    return explained_by_regression(records, _faults_so_far)


def _faults_so_far(record: ConversationRecord) -> list[torch.Tensor]:
    categories = ["", *default_penalties()]
    faults, states = [categories.index(review.category) for review in reviews_of(record)], []
    for number in range(len(faults)):
        counts = torch.bincount(torch.tensor(faults[:number], dtype=torch.long), minlength=len(categories))
        position = torch.nn.functional.one_hot(torch.tensor(min(number, MOST_PLACES - 1)), MOST_PLACES)
        states.append(torch.cat([position, counts]))
    return states


def explained_by_regression(
    records: Sequence[ConversationRecord],
    states_of: Callable[[ConversationRecord], Sequence[torch.Tensor]],
    penalty: float = 1.0,
) -> float | None:
    """The share of the variance of rewards that a ridge regression explains from the states of a conversation. The one
    that predicts a lesson was fitted to the other half of the lessons.

    Args:
        states_of: the features of each state of a conversation, of shape (features,).
        penalty: of the squared weights.
    """
    lessons = sorted({record.problem_id for record in records})
    halves: list[tuple[list, list]] = [([], []), ([], [])]
    for record in (record for record in records if record.reward is not None):
        states, returns = halves[lessons.index(record.problem_id) % 2]
        features = [state.double() for state in states_of(record)]
        states += features
        returns += [record.reward] * len(features)
    (left, of_left), (right, of_right) = [
        (torch.stack(states), torch.tensor(returns, dtype=torch.float64)) for states, returns in halves
    ]
    sums = torch.zeros(2, 3, dtype=torch.float64)
    for fitted, targets, held_out, actual in ((left, of_left, right, of_right), (right, of_right, left, of_left)):
        ridge = fitted.T @ fitted + penalty * torch.eye(fitted.size(1), dtype=torch.float64)
        errors = actual - held_out @ torch.linalg.solve(ridge, fitted.T @ targets)
        mask = torch.ones_like(actual)
        sums += torch.stack([moments(errors, mask), moments(actual, mask)])
    return explained_variance(*sums)


def values_of(model: torch.nn.Module, critic: ValueHead, record: ConversationRecord) -> torch.Tensor:
    """The critic's values of the states before each completion token."""
    ids = torch.tensor([[*record.prompt_ids, *record.completion_ids]])
    with torch.no_grad():
        values = critic(model.base_model(input_ids=ids).last_hidden_state[0])
        return values[len(record.prompt_ids) - 1 : -1]


def report(lines: Sequence[Mapping]) -> str:
    """A table by batches: the mean held-out reward of each arm, and what its critic explains; then the conversations
    until a held-out reward of 0.90."""
    by_arm: dict[str, dict[int, dict[int, Mapping]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        by_arm[line["arm"]][line["seed"]][line["step"]] = line
    arms = [arm for arm in AlgorithmBench.arms if arm in by_arm]
    out = ["held-out reward, mean over seeds (explained variance over messages, over tokens; by known faults)"]
    out.append("batches  " + "".join(f"{arm:>30}" for arm in arms))
    for step in sorted({line["step"] for line in lines}):
        cells = [_cell([by_step[step] for by_step in by_arm[arm].values() if step in by_step]) for arm in arms]
        out.append(f"{step:7}  " + "".join(f"{cell:>30}" for cell in cells))
    out += ["", "conversations until a held-out reward of 0.90 (interpolated), by seed"]
    for arm in arms:
        needed = {seed: conversations_needed(by_step) for seed, by_step in sorted(by_arm[arm].items())}
        out.append(f"  {arm:10}{ ({seed: None if value is None else round(value) for seed, value in needed.items()}) }")
    out.append(f"({CONVERSATIONS_PER_STEP} conversations in a batch)")
    return "\n".join(out)


def _cell(lines: Sequence[Mapping]) -> str:
    if not lines:
        return "–"
    reward = f"{fmean(fmean(line['rewards'].values()) for line in lines):.3f}"
    explained = []
    for name in ("explained_turns", "explained_tokens"):
        values = [line[name] for line in lines if line.get(name) is not None]
        explained += [f"{fmean(values):+.2f}"] if values else []
    faults = [line["explained_by_faults"] for line in lines if line.get("explained_by_faults") is not None]
    explained += [f"{fmean(faults):+.2f}"] if faults else []
    return f"{reward} ({', '.join(explained)})" if explained else reward


def main() -> None:
    """Train and measure what is missing, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/ppo_arms"))
    parser.add_argument("--models", type=Path, default=Path("runs/quickstart"), help="the folder of quickstart-models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(AlgorithmBench.arms), default=[GRPO, "ppo"])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--port", type=int, default=8046)
    parser.add_argument("--report", action="store_true", help="only print what was measured")
    arguments = parser.parse_args()
    if not (arguments.models / "sft" / "model").is_dir():
        sys.exit(f"{arguments.models} has no fine-tuned model: run make quickstart-models, or give --models.")
    if arguments.batches % EVERY:
        sys.exit(f"--batches is {arguments.batches}; it must be a multiple of {EVERY}: the last one is measured.")
    bench = AlgorithmBench(arguments.folder.resolve(), arguments.models.resolve(), arguments.batches, arguments.port)
    bench.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        lessons = held_out_lessons(bench.models)
        measure(bench, [(arm, seed) for seed in arguments.seeds for arm in arguments.arms], lessons)
    print(report(read_lines(bench.results)))


if __name__ == "__main__":
    main()
