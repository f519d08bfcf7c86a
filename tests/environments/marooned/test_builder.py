"""Scripted builders finish the ship, a traitor prevents it, waiting does not win."""

from collections import Counter
from random import Random

import pytest

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import PLAYERS, cast, play
from classroom_rl.environments.marooned.presets import SEED, TINY
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR, Rules

GAMES = 100


def outcomes(
    rules: Rules, games: int, traitor: bool, colonists: str = "builder", villain: str = "traitor"
) -> Counter[str]:
    ended = Counter()
    for seed in range(games):
        game = Game(rules, seed, traitor=traitor)
        ended[play(game, cast(game, colonists, villain), Random(seed)).outcome] += 1
    return ended


def test_builders_finish_the_ship_without_a_traitor():
    assert outcomes(TINY, GAMES, traitor=False)["escaped"] >= 95


def test_a_traitor_prevents_it_often():
    assert outcomes(TINY, GAMES, traitor=True)["escaped"] <= 60


def test_four_builders_are_enough():
    assert outcomes(TINY, 20, traitor=True, villain="waiter")["escaped"] >= 18


def test_builders_finish_the_large_ship_too():
    assert outcomes(SEED, 4, traitor=False)["escaped"] >= 3


@pytest.mark.parametrize("colonists", ["waiter", "gatherer", "random"])
def test_nobody_wins_without_building(colonists):
    assert outcomes(TINY, 10, traitor=False, colonists=colonists)["escaped"] == 0


def test_honest_play_shows_progress_after_24_rounds():
    shown = 0
    for seed in range(40):
        game = Game(TINY, seed, traitor=False)
        players, rng = cast(game), Random(seed)
        while not game.over and game.state.day <= 2:
            game.step(players[game.seat].act(observe(game, game.seat), TINY, rng))
        shown += game.ship_progress > 0.2
    assert shown >= 32


def test_builders_vote_on_evidence():
    game = Game(TINY, 0, roles=(COLONIST,) * 4 + (TRAITOR,))
    game.state.turn, game.state.suspicion = TINY.turns, {5: 60}
    rng = Random(0)
    for seat in game.rules.seats:
        game.step(PLAYERS["traitor" if seat == 5 else "builder"]().act(observe(game, seat), TINY, rng))
    assert game.state.sailors[5].removed
