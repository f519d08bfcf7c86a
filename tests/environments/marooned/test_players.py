"""Scripted players."""

from random import Random

import pytest

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import cast
from classroom_rl.environments.marooned.presets import PRESETS


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_scripted_players_do_only_what_is_possible(rules):
    for seed in range(2):
        game = Game(rules, seed)
        players, rng = cast(game), Random(seed)
        while not game.over and game.steps < 1500:
            assert game.step(players[game.seat].act(observe(game, game.seat), rules, rng)).fault is None
