"""`train_rl.py` with ways of earlier trainers switched on; `benchmarks.earlier_launch` starts it and lists the ways."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import requests
from accelerate import Accelerator

from benchmarks.earlier_launch import SLEEPS, TEXT, take_ways
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import program
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.runner import weighted_sum
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.group_variance import PlayedBatch
from classroom_rl.trainer.sample_batch import BatchPlayer

if TYPE_CHECKING:
    from classroom_rl.trainer.session import TrainingSession

BEFORE_BATCH_S, OTHER_PROCESSES_S = 5 * 1.0, 2 * 60.0
"""The sleeps of PedagogicalRL's trainer (`_generate_and_score_completions` in its src/grpo/trainer.py): five of one
second on every process before each batch; then the first process of each machine has the batch played, while the others
sleep for two minutes and only afterwards ask whether it is there."""


class EarlierPlayer(BatchPlayer):
    """Has batches played with ways of earlier trainers.

    Args:
        ways: those that are switched on.
    """

    def __init__(self, session: "TrainingSession", ways: frozenset[str]):
        super().__init__(session)
        self._ways = ways
        self._tokenizer = load_tokenizer("teacher_model", session.config.teacher_model.model_name_or_path)

    def play(self, policy: PolicyVersion, step: int, max_steps: int, accelerator: Accelerator) -> PlayedBatch:
        if SLEEPS in self._ways:
            time.sleep(BEFORE_BATCH_S)
        started = time.monotonic()
        batch = super().play(policy, step, max_steps, accelerator)
        if SLEEPS in self._ways and not accelerator.is_local_main_process:
            time.sleep(max(0.0, OTHER_PROCESSES_S - (time.monotonic() - started)))
        if TEXT in self._ways:
            rewards = self._rewards_by_text(batch.records)
            pairs = list(zip(batch.records, rewards, strict=True))
            batch.figures["by_text/wrong_rewards"] = sum(record.reward != reward for record, reward in pairs)
            batch.records = [record.model_copy(update={"reward": reward}) for record, reward in pairs]
        return batch

    def _rewards_by_text(self, records: Sequence[Trajectory]) -> list[float | None]:
        """The rewards of a batch, asked for one after the other, each with the text of all conversations."""
        texts = self._tokenizer.batch_decode([[*record.prompt_ids, *record.completion_ids] for record in records])
        rewards: list[dict[str, float | None]] = [{} for _ in texts]
        for name in self._reward_weights:
            url = f"{self._client.url}/by_text/get_{name}_reward"
            answer = requests.post(url, json={"conversations": texts}, timeout=600)
            answer.raise_for_status()
            for by_name, value in zip(rewards, answer.json()["rewards"], strict=True):
                by_name[name] = value
        return [weighted_sum(by_name, self._reward_weights) for by_name in rewards]


WAYS: frozenset[str] = frozenset()


@program(TrainRLConfig, "train_rl", check=check_train_rl)
def train(config: TrainRLConfig) -> None:
    """Train as `train_rl.py` does."""
    import classroom_rl.trainer.loop
    from classroom_rl.trainer.run import train as train_with_player

    classroom_rl.trainer.loop.BatchPlayer = partial(EarlierPlayer, ways=WAYS)
    train_with_player(config)


if __name__ == "__main__":
    WAYS = take_ways()
    train()
