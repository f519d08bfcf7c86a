"""What the record of a finished episode says about itself."""

from typing import Any

import pytest

from classroom_rl.rollout.trajectory import PlayerOutcome, Trajectory


class SelfPlay(Trajectory):
    """An episode in which the policy played two players."""

    outcomes: list[float | None]

    @property
    def players(self) -> list[PlayerOutcome]:
        return [PlayerOutcome(f"player {n}", reward, (n,)) for n, reward in enumerate(self.outcomes)]


def record(kind: type[Trajectory] = Trajectory, **changes: Any) -> Trajectory:
    texts = {"id": "r-0000", "request_id": "r", "problem_id": "", "problem": "", "answer": ""}
    tokens = {"prompt_ids": [], "completion_ids": [], "mask": [], "logprobs": []}
    return kind(**texts | tokens | {"step": 0, "index": 0, "rewards": {}, "reward": None, "meta": {}} | changes)


@pytest.mark.parametrize(
    ("episode", "unrewarded"),
    [
        (record(), True),
        (record(reward=0.0), False),
        (record(SelfPlay, outcomes=[None, None]), True),
        (record(SelfPlay, outcomes=[None, 0.5]), False),
    ],
)
def test_an_episode_is_unrewarded_if_neither_it_nor_a_player_was_scored(episode: Trajectory, unrewarded: bool) -> None:
    assert episode.unrewarded == unrewarded


def test_an_episode_with_a_full_context_is_truncated() -> None:
    assert record(overflow="the teacher's context is full", reward=1.0).truncated and not record().truncated
