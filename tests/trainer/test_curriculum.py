"""The curriculum: which problems come first, and that a resumed training draws as an undisturbed one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.results.rollout_files import ConversationReward, write_rollouts
from classroom_rl.rollout.problem import Problem
from classroom_rl.trainer.curriculum import Curriculum, LastPlayed, last_played
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model

IDS = [str(number) for number in range(12)]
PROBLEMS = [Problem.of(f"lesson {number}", "") for number in range(6)]


def curriculum(folder: Path = Path(), last: dict[str, LastPlayed] | None = None, seed: int = 1) -> Curriculum:
    new_curriculum = Curriculum(IDS, 4, seed, folder)
    new_curriculum._last = last or {}
    return new_curriculum


def test_what_spread_most_comes_first_what_is_new_before_it_and_what_is_old_again() -> None:
    last = {
        "0": LastPlayed(9, 0.4),
        "1": LastPlayed(9, 0.2),
        "2": LastPlayed(9, 0.0),
        "3": LastPlayed(1, 0.0),
    }
    weights = curriculum(last=last).weights(10, 4)
    assert weights["0"] > weights["1"] > weights["2"] > 0
    assert weights["3"] == pytest.approx(weights["2"] + 8 * 4 / 12), "eight batches of four since it was played"
    slow = Curriculum(IDS, 4, 1, Path(), steps_of_batch=4)
    slow._last = {"3": LastPlayed(2, 0.0)}
    assert slow.weights(10, 4)["3"] == pytest.approx(0.05 + (8 / 4 - 1) * 4 / 12), "ages count batches"
    assert weights["4"] == 2 * max(weights[problem_id] for problem_id in "0123"), "never played"


def test_all_problems_are_soon_played_and_good_ones_more_often() -> None:
    mixed_curriculum = curriculum(
        last={problem_id: LastPlayed(0, 0.4 if problem_id in "012" else 0.0) for problem_id in IDS}
    )
    counts = dict.fromkeys(IDS, 0)
    for step in range(1, 400):
        for problem_id in mixed_curriculum.draw(step, 3):
            counts[problem_id] += 1
            mixed_curriculum._last[problem_id] = LastPlayed(step, 0.4 if problem_id in "012" else 0.0)
    assert min(counts.values()) > 30
    assert min(counts[problem_id] for problem_id in "012") > 1.4 * max(
        counts[problem_id] for problem_id in IDS if problem_id not in "012"
    )


@given(st.integers(0, 1000), st.integers(1, 40), st.integers(0, 5))
def test_a_draw_is_seeded_and_repeats_nothing_before_all_were_drawn(step: int, count: int, seed: int) -> None:
    drawn = curriculum(seed=seed).draw(step, count)
    assert drawn == curriculum(seed=seed).draw(step, count)
    assert len(drawn) == count
    assert len(set(drawn[:12])) == min(count, 12)


def test_the_spread_is_that_of_the_last_group_before_the_step() -> None:
    rewards = [
        ConversationReward(step, "a", value) for step, value in ((0, 0.0), (0, 1.0), (4, 0.5), (4, None), (8, 1.0))
    ]
    assert last_played(rewards, 4) == {"a": LastPlayed(0, 0.5)}
    assert last_played(rewards, 5) == {"a": LastPlayed(4, 0.0)}


def test_ranks_play_their_parts_of_one_draw() -> None:
    parts = []
    for rank in range(2):
        ranks = SimpleNamespace(num_processes=2, process_index=rank, is_main_process=rank == 0)
        parts += curriculum().choose(ranks, 6, 3)
    assert parts == [problem_id for problem_id in curriculum().draw(3, 3) for _ in range(4)], (
        "a group may be on two ranks"
    )


def test_a_resumed_training_goes_on_with_what_the_files_hold(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    original = Curriculum([problem.id for problem in PROBLEMS], 4, 1, tmp_path)
    original.choose(accelerator, 8, 0)
    for step in range(3):
        records = [
            conversation(index, PROBLEMS[(step + index // 4) % 6], seed=step + 1, step=step) for index in range(8)
        ]
        write_rollouts(tmp_path, step, 0, records)
        assert original.record(step, records)["curriculum/seen_share"] == (step + 2) / 6
    resumed = Curriculum([problem.id for problem in PROBLEMS], 4, 1, tmp_path)
    assert resumed.choose(accelerator, 8, 3) == original.choose(accelerator, 8, 3)
    assert resumed._last == original._last
    earlier = Curriculum([problem.id for problem in PROBLEMS], 4, 1, tmp_path)
    earlier.choose(accelerator, 8, 2)
    assert len(earlier._last) == 3, "steps from the checkpoint on are played again"


def test_a_training_plays_the_problems_that_were_drawn(world: Path, tmp_path: Path) -> None:
    played = []

    def play(index: int, problem: Problem):
        played.append(problem.id)
        return conversation(index, problem, seed=1)

    model = save_tiny_model(tmp_path / "model", world / "blank")
    trainer = offline_trainer(tmp_path / "run", model, ["dataset.curriculum=true"], play, PROBLEMS)
    trainer.batch()
    drawn = Curriculum([problem.id for problem in PROBLEMS], 4, trainer.run_config.seed, tmp_path).draw(0, 2)
    assert played == [problem_id for problem_id in drawn for _ in range(4)]
    assert trainer._figures["curriculum/seen_share"] == [pytest.approx(2 / 6)]
