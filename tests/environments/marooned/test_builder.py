"""Scripted builders finish the ship, a traitor prevents it, waiting does not win."""

from random import Random

import pytest

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import PLAYERS, cast
from classroom_rl.environments.marooned.presets import SEED, TINY
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR, Rules
from tests.environments.marooned.support import play


@pytest.mark.parametrize(
    ("rules", "games", "traitor", "colonists", "escaped"),
    [
        (TINY, 100, None, "builder", range(95, 101)),
        (TINY, 100, "traitor", "builder", range(61)),
        (TINY, 20, "waiter", "builder", range(18, 21)),  # four builders are enough
        (SEED, 4, None, "builder", range(3, 5)),
        *((TINY, 10, None, colonists, range(1)) for colonists in ("waiter", "gatherer", "random")),
    ],
)
def test_in_how_many_games_the_ship_is_finished(
    rules: Rules, games: int, traitor: str | None, colonists: str, escaped: range
) -> None:
    outcomes = []
    for seed in range(games):
        game = Game(rules, seed, traitor=traitor is not None)
        outcomes.append(play(game, cast(game, colonists, traitor or "traitor"), Random(seed)).outcome)
    assert outcomes.count("escaped") in escaped


def test_honest_play_shows_progress_after_24_rounds():
    progressed = 0
    for seed in range(40):
        game = Game(TINY, seed, traitor=False)
        players, rng = cast(game), Random(seed)
        while not game.over and game.state.day <= 2:
            game.step(players[game.seat].act(observe(game, game.seat), TINY, rng))
        progressed += game.ship_progress > 0.2
    assert progressed >= 32


def test_builders_vote_on_evidence():
    game = Game(TINY, 0, roles=(COLONIST,) * 4 + (TRAITOR,))
    game.state.turn, game.state.suspicion = TINY.turns, {5: 60}
    rng = Random(0)
    for seat in game.rules.seats:
        game.step(PLAYERS["traitor" if seat == 5 else "builder"]().act(observe(game, seat), TINY, rng))
    assert game.state.sailors[5].removed
