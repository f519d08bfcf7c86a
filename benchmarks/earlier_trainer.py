"""`train_rl.py` with ways of earlier trainers switched on; `benchmarks.earlier_launch` starts it and lists the ways."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import requests

from benchmarks.earlier_launch import SLEEPS, TEXT, take_ways
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import program
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.rollout.runner import weighted_sum
from classroom_rl.trainer.context import TrainerContext
from classroom_rl.trainer.sample_batch import ClassroomRollout

BEFORE_BATCH_S, OTHER_PROCESSES_S = 5 * 1.0, 2 * 60.0
"""The sleeps of PedagogicalRL's trainer (`_generate_and_score_completions` in its src/grpo/trainer.py): five of one
second on every process before each batch; then the first process of each machine has the batch played, while the others
sleep for two minutes and only afterwards ask whether it is there."""


class EarlierRollout(ClassroomRollout):
    """The rollout with ways of earlier trainers.

    Args:
        ways: those that are switched on; the other arguments are those of `ClassroomRollout`.
    """

    def __init__(self, *arguments: Any, ways: frozenset[str], **named: Any):
        super().__init__(*arguments, **named)
        self._ways = ways

    def __call__(self, prompts: Sequence[str], trainer: TrainerContext) -> dict[str, list[Any]]:
        if SLEEPS in self._ways:
            time.sleep(BEFORE_BATCH_S)
        started = time.monotonic()
        columns = super().__call__(prompts, trainer)
        if SLEEPS in self._ways and not trainer.accelerator.is_local_main_process:
            time.sleep(max(0.0, OTHER_PROCESSES_S - (time.monotonic() - started)))
        if TEXT in self._ways:
            found = self._rewards_by_text(columns, trainer)
            wrong = sum(now != before for now, before in zip(found, columns["reward"], strict=True))
            trainer.record_metric("by_text/wrong_rewards", wrong)
            columns["reward"] = found
        return columns

    def _rewards_by_text(self, columns: dict[str, list[Any]], trainer: TrainerContext) -> list[float | None]:
        """The rewards of a batch, asked for one after the other, each with the text of all conversations."""
        ids = zip(columns["prompt_ids"], columns["completion_ids"], strict=True)
        texts = trainer.processing_class.batch_decode([[*prompt, *completion] for prompt, completion in ids])
        rewards: list[dict[str, float | None]] = [{} for _ in texts]
        for name in self._reward_weights:
            url = f"{self._client.url}/by_text/get_{name}_reward"
            answer = requests.post(url, json={"conversations": texts}, timeout=600)
            answer.raise_for_status()
            for own, value in zip(rewards, answer.json()["rewards"], strict=True):
                own[name] = value
        return [weighted_sum(own, self._reward_weights) for own in rewards]


WAYS: frozenset[str] = frozenset()


@program(TrainRLConfig, "train_rl", check=check_train_rl)
def train(config: TrainRLConfig) -> None:
    """Train as `train_rl.py` does."""
    import classroom_rl.trainer.grpo.trainer
    from classroom_rl.trainer.grpo.run import train as train_with_grpo

    classroom_rl.trainer.grpo.trainer.ClassroomRollout = partial(EarlierRollout, ways=WAYS)
    train_with_grpo(config)


if __name__ == "__main__":
    WAYS = take_ways()
    train()
