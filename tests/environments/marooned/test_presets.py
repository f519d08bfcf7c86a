"""The island of each preset."""

import pytest

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.presets import PRESETS, SEED, TINY


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_the_island_holds_what_the_ship_needs_and_half_as_much_again(rules):
    rules.check()
    game = Game(rules, seed=3)
    for kind, number in rules.needed.items():
        assert sum(pile.get(kind, 0) for pile in game.state.piles.values()) >= 1.5 * number


def test_the_island_is_the_one_of_the_rules():
    for rules in (TINY, SEED):
        piles = Game(rules, 0).state.piles
        assert rules.base not in piles and not any(
            stairs.upper in piles or stairs.lower in piles for stairs in rules.stairs
        )
        assert len(piles) == sum(vein.piles for vein in rules.veins)
