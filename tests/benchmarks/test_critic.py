"""The benchmark of the critic: its table, and what it says could be explained."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.critic import BENCHES, centred, report, share_between_problems
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.problem import Problem
from tests.support.offline_trainer import conversation


def played(count: int, own: float) -> list[list[ConversationRecord]]:
    """Ten batches of conversations on eight lessons, with rewards of which a part is the lesson's own."""
    draw = random.Random(1)
    batches = []
    for _ in range(10):
        worth = {number: draw.gauss(0.5, 1) for number in range(8)}
        batches.append(
            [
                conversation(number, Problem.of(f"lesson {number}", ""), seed=1).model_copy(
                    update={"reward": own * worth[number] + (1 - own) * draw.gauss(0.5, 1)}
                )
                for number in range(8)
                for _ in range(count)
            ]
        )
    return batches


@pytest.mark.parametrize(("own", "share"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_the_share_between_lessons_is_found_however_few_conversations_each_has(own: float, share: float) -> None:
    assert share_between_problems(played(4, own)) == pytest.approx(share, abs=0.1)


def test_centred_rewards_have_mean_0_in_each_batch_and_leave_out_what_has_none() -> None:
    batch = played(4, 0.5)[0]
    records = centred([[batch[0].model_copy(update={"reward": None}), *batch[1:]]])
    assert len(records) == len(batch) - 1 and sum(record.reward for record in records) == pytest.approx(0, abs=1e-9)


def test_the_table_has_finished_trainings_without_their_first_third(tmp_path: Path) -> None:
    for seed, is_finished in (("1", True), ("2", False)):
        run = tmp_path / "mlp" / seed
        run.mkdir(parents=True)
        lines = [{"ppo/explained_variance": value, "reward": 0.8} for value in (9.0, 0.25, 0.35)] + [{"loss": 1.0}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if is_finished:
            (run / "learning.json").touch()
    kind, steps = BENCHES["quickstart"]
    printed = report(kind(tmp_path, tmp_path, steps, 1))
    assert "mlp          seed 1: +0.300 [+0.25, +0.35]; reward 0.800" in printed and "seed 2" not in printed
