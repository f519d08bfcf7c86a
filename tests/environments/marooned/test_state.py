"""A copy of a game."""

from copy import deepcopy
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.marooned.legality import possible_actions
from classroom_rl.environments.marooned.presets import SEED, TINY
from tests.environments.marooned.support import played

GAMES = st.tuples(st.sampled_from([TINY, SEED]), st.integers(0, 10**6))


@settings(max_examples=10)
@given(GAMES)
def test_a_clone_goes_its_own_way(drawn):
    rng = Random(drawn[1])
    game = [game for game, _ in played(*drawn, steps=50)][-1]
    before, clone = deepcopy((game.state, game.returns, game.steps)), game.clone()
    while clone.seat is not None and clone.steps < game.steps + 100:
        clone.step(rng.choice(possible_actions(clone, clone.seat)))
    assert (game.state, game.returns, game.steps) == before
    assert clone.steps > game.steps
