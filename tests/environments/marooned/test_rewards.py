"""What each event pays, in positions made by hand."""

from random import Random

import pytest

from classroom_rl.environments.marooned.actions import WAIT
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.players import cast
from classroom_rl.environments.marooned.presets import PRESETS, TINY
from classroom_rl.environments.marooned.rules import DEAD
from tests.environments.marooned.support import DISCUSSION, WEALTH, do, end_day, end_round, made, play


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("traitor", [True, False])
def test_waiting_never_wins(rules, traitor):
    game = Game(rules, seed=0, traitor=traitor)
    while not game.over:
        game.step(WAIT)
    assert game.outcome == DEAD and game.ship_progress == 0
    assert all(amount < 0 for amount in game.returns.values()), "nobody has won, the traitor starved too"


def test_progress_goes_to_all_who_built_and_to_nobody_else():
    game = made()
    game.state.store = dict(WEALTH)
    result = end_round(game, "BUILD HULL", "BUILD HULL", "BUILD HULL")
    assert game.ship_progress == 0.15
    for seat in (1, 2, 3):
        assert game.returns[seat] == pytest.approx(-0.01 + 0.5 + 15)
    assert game.returns[4] == pytest.approx(-0.01)
    assert result.rewards[1] == pytest.approx(15.5), "it is paid with the step that ends the round"


def test_winning_pays_once():
    game = made()
    game.state.store = dict(WEALTH)
    game.state.turns_built = dict.fromkeys(TINY.part, TINY.build_turns) | {"SUPPLIES": 1}
    game.state.most_built = dict(game.state.turns_built)
    game.state.milestones = 3
    end_round(game, "BUILD SUPPLIES", "BUILD SUPPLIES")
    assert game.outcome == "escaped" and game.seat is None
    assert game.returns[1] == pytest.approx(-0.01 + 0.5 + 5 + 100)
    assert game.returns[3] == pytest.approx(-0.01 + 100)
    assert game.returns[5] == pytest.approx(-0.01), "the traitor does not win"


def test_rebuilding_what_was_undone_earns_nothing():
    game = made()
    game.state.store = {"WOOD": 12}
    end_round(game, "BUILD HULL", "BUILD HULL")
    do(game, "SABOTAGE HULL", seat=5)
    before = game.returns[1]
    end_round(game, "BUILD HULL", "BUILD HULL")
    assert game.state.turns_built == {"HULL": 1} and game.returns[1] == pytest.approx(before - 0.01)


def test_death_costs_once():
    game = made()
    game.state.sailors[1].energy = 10
    end_day(game)
    assert not game.state.sailors[1].alive
    paid = game.returns[1]
    assert paid == pytest.approx(-50 - 12 * 0.01)
    end_day(game)
    assert game.returns[1] == paid


def test_what_is_brought_back_to_the_store_earns_nothing():
    game = made()
    game.state.sailors[1].pack = {"WOOD": 2}
    assert do(game, "DEPOSIT WOOD 2").rewards[1] == pytest.approx(0.4 - 0.01)
    do(game, "WITHDRAW WOOD 2")
    assert do(game, "DEPOSIT WOOD 2").rewards[1] == pytest.approx(-0.01)


def test_a_wrong_vote_costs():
    game = made()
    game.state.turn = DISCUSSION
    end_round(game, "VOTE 3", "VOTE 3", "", "", "VOTE 3")
    end_round(game)
    assert game.state.sailors[3].removed
    assert game.returns[1] == pytest.approx(-5 - 0.02)
    assert game.returns[5] == pytest.approx(-0.02), "the traitor earns nothing by it"


def test_a_milestone_is_paid_once_to_all_colonists():
    game = made()
    game.state.store = {"WOOD": 12}
    end_round(game, "BUILD HULL", "BUILD HULL")
    end_round(game, "BUILD HULL", "BUILD HULL")
    assert game.returns[3] == pytest.approx(5 - 0.02), "25 percent"
    do(game, "SABOTAGE HULL", seat=5)
    end_round(game, "BUILD HULL", "BUILD HULL")
    assert game.ship_progress == 0.3 and game.returns[3] == pytest.approx(5 - 0.03)


def test_returns_are_of_the_order_of_one_when_they_are_scaled():
    game = Game(TINY, 1, traitor=False)
    play(game, cast(game), Random(1))
    assert all(0.5 < value * TINY.reward_scale < 2 for value in game.returns.values())
    assert TINY.rewards.scaled(TINY.reward_scale)["escape"] == pytest.approx(0.5)
