"""Self-play's credits on numbers worked by hand: players of one role share a baseline, and roles do not."""

from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.rollout.trajectory import PlayerOutcome
from classroom_rl.trainer.turn_advantages import (
    Credits,
    ProcessRewards,
    by_player,
    group_credits,
    merged,
    outcome_advantages,
)

COLONIST, TRAITOR = "colonist", "traitor"


def game(colonists: list[float], traitor: float) -> list[PlayerOutcome]:
    """Each sailor has two messages: in the first round and in the second."""
    rewards = [*((COLONIST, reward) for reward in colonists), (TRAITOR, traitor)]
    count = len(rewards)
    return [PlayerOutcome(role, reward, (seat, seat + count)) for seat, (role, reward) in enumerate(rewards)]


def of(players: list[PlayerOutcome], values: list[float | None] | None = None):
    messages = values or [None] * sum(len(player.messages) for player in players)
    return by_player(ProcessRewards(messages, []), players)


def test_each_role_has_its_own_mean() -> None:
    """Two games: colonists earn 1, 2 and 3, 4 (mean 2.5), the traitors −8 and −4 (mean −6)."""
    episodes = [of(game([1.0, 2.0], -8.0)), of(game([3.0, 4.0], -4.0))]
    players = [player for each in episodes for player in each]
    groups = [(0, player.role) for player in players]
    assert outcome_advantages(players, groups, "none") == [-1.5, -0.5, -2.0, 0.5, 1.5, 2.0]
    scaled = outcome_advantages(players, groups, "group")
    assert scaled[0] == pytest.approx(-1.5 / (stdev([1, 2, 3, 4]) + 1e-4))
    assert scaled[2] == pytest.approx(-2.0 / (stdev([-8, -4]) + 1e-4))
    messages = [
        each.messages for each in merged(episodes, [Credits([0.0, 0.0], [])] * 6, [-1.5, -0.5, -2, 0.5, 1.5, 2])
    ]
    assert messages == [[-1.5, -0.5, -2.0] * 2, [0.5, 1.5, 2.0] * 2]


def test_groups_and_batches_are_apart() -> None:
    """With `batch` the mean is the group's and the deviation the role's over both groups."""
    players = [player for rewards in ([0.0], [2.0], [10.0], [14.0]) for player in of(game(rewards, 1.0))]
    groups = [(number // 4, player.role) for number, player in enumerate(players)]
    found = outcome_advantages(players, groups, "batch")
    spread = stdev([0.0, 2.0, 10.0, 14.0]) + 1e-4
    assert found[::2] == pytest.approx([-1 / spread, 1 / spread, -2 / spread, 2 / spread])
    assert found[1::2] == [0.0] * 4


def test_a_player_without_a_reward_has_no_advantage_and_no_share_in_the_mean() -> None:
    players = of([PlayerOutcome(COLONIST, None, (0,)), PlayerOutcome(COLONIST, 3.0, (1,)), *game([5.0], 0.0)[:1]])
    assert outcome_advantages(players, [0, 0, 0], "none") == [0.0, -1.0, 1.0]


def test_the_only_player_has_what_it_had() -> None:
    """No outcome of its own, and the same process rewards, drafts included."""
    process = ProcessRewards([0.0, -1.0], [(1, -2.0)], frozenset({1}))
    (only,) = by_player(process, [])
    assert only.process is process and only.outcome is None
    credits = group_credits([process, process], [0, 0], "immediate", 0.9, 1.0)
    assert merged([[only], [only]], credits, outcome_advantages([only, only], [0, 0], "group")) == credits


def test_process_rewards_are_compared_within_a_role() -> None:
    """A colonist's and the traitor's first messages cost −1 and −3; nobody of another role moves their means."""
    one, other = of(game([0.0], 0.0), [-1.0, -3.0, 0.0, 0.0]), of(game([0.0], 0.0), [0.0, -3.0, 0.0, -2.0])
    groups = [(0, player.role) for player in [*one, *other]]
    credits = group_credits([player.process for player in [*one, *other]], groups, "immediate", 0.9, 1.0)
    found = merged([one, other], credits, [0.0] * 4)
    assert [each.messages for each in found] == [[-0.5, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, -1.0]]


def test_drafts_keep_their_places_and_have_no_outcome() -> None:
    """Drafts at messages 2 (the traitor's first), 0 and 2 again; outcomes go to messages alone."""
    players = [PlayerOutcome(COLONIST, 1.0, (0, 1)), PlayerOutcome(TRAITOR, 2.0, (2,))]
    process = ProcessRewards([0.0, 0.0, 0.0], [(2, -1.0), (0, -2.0), (2, -3.0)], frozenset({2}))
    colonist, traitor = by_player(process, players)
    assert colonist.process.beside == [(0, -2.0)] and traitor.process.beside == [(0, -1.0), (0, -3.0)]
    assert traitor.process.replaced == {0} and not colonist.process.replaced
    credits = [Credits([10.0, 11.0], [12.0]), Credits([20.0], [21.0, 22.0])]
    (found,) = merged([[colonist, traitor]], credits, [100.0, 200.0])
    assert found == Credits([110.0, 111.0, 220.0], [21.0, 12.0, 22.0])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4), st.randoms())
def test_nothing_gets_lost_between_splitting_and_merging(games: list[list[int]], chance) -> None:
    """Each message's own number comes back to it, whoever wrote it."""
    episodes, credits = [], []
    for seats in games:
        players = [
            PlayerOutcome(str(seat), 0.0, tuple(place for place, each in enumerate(seats) if each == seat))
            for seat in sorted(set(seats))
        ]
        drafts = [(chance.randrange(len(seats)), float(place)) for place in range(chance.randrange(4))]
        process = ProcessRewards([float(place) for place in range(len(seats))], drafts)
        own = by_player(process, players)
        episodes.append(own)
        credits += [Credits(each.process.messages, [value for _, value in each.process.beside]) for each in own]
    found = merged(episodes, credits, [0.0] * len(credits))
    for each, seats, players in zip(found, games, episodes, strict=True):
        assert each.messages == list(range(len(seats)))
        assert each.beside == [float(place) for place in range(sum(len(p.beside) for p in players))]
