"""Tests of the Parquet files of a training."""

import json
from pathlib import Path

from datasets import load_dataset

from classroom_rl.results.rollout_files import drop_rollouts_from, read_rewards, write_rollouts
from classroom_rl.trainer.checkpoints import step_of
from tests.support.synthetic_run import FAILED, record_of, scored


def test_files_of_processes_that_a_resumed_run_has_no_more_do_not_count(tmp_path: Path) -> None:
    for step in range(4):
        for rank in range(2):
            write_rollouts(tmp_path, step, rank, [record_of("a", [], [scored(1, 1, 1)], reward=0.1)])
    (tmp_path / "rollouts" / "step_000002-0.parquet.unfinished").touch()
    assert len(read_rewards(tmp_path)) == 8, "a file that a kill left unfinished is not read"
    drop_rollouts_from(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "rollouts").glob("*.parquet")) == [
        f"step_{step:06d}-{rank}.parquet" for step in range(2) for rank in range(2)
    ]
    assert not list((tmp_path / "rollouts").glob("*.unfinished"))
    drop_rollouts_from(tmp_path / "nothing here", 0)
    assert step_of(None) == 0 and step_of("checkpoints/checkpoint-12") == 12


def test_rollouts_of_all_steps_are_one_table(tmp_path: Path) -> None:
    """Read with `datasets`, as users do: all ranks and steps, also conversations without a verdict or without turns."""
    for step in range(3):
        for rank in range(2):
            records = [
                record_of(f"p{i}", [], [FAILED if i else scored(1, 0.5, 5)], index=i, reward=None if i else step / 2)
                for i in range(2)
            ]
            records = [record.model_copy(update={"step": step}) for record in records]
            write_rollouts(tmp_path, step, rank, records)
    cache = str(tmp_path / "cache")
    table = load_dataset("parquet", data_dir=str(tmp_path / "rollouts"), split="train", cache_dir=cache)
    assert len(table) == 3 * 2 * 2 and sorted(table.unique("step")) == [0, 1, 2]
    assert sorted(reward for reward in table["reward"] if reward is not None) == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert table["reward"].count(None) == 6 and table[0]["completion_ids"] == [3]
    assert json.loads(table[0]["verdicts"])[0]["scores"]["forward_progression_score"] == 0.5
