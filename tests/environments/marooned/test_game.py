"""What holds in every game, over random and scripted play: 10,000 steps in all."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.marooned.actions import Action
from classroom_rl.environments.marooned.game import Game, GameOver
from classroom_rl.environments.marooned.players import cast
from classroom_rl.environments.marooned.presets import PRESETS, SEED, TINY
from classroom_rl.environments.marooned.rules import TABLET
from tests.environments.marooned.support import play, played

GAMES = st.tuples(st.sampled_from([TINY, SEED]), st.integers(0, 10**6))


def held(game: Game) -> Counter[str]:
    """Everything there is, by kind, wherever it is."""
    state, total = game.state, Counter()
    for pile in (
        *state.piles.values(),
        *(sailor.pack for sailor in state.sailors.values()),
        state.store,
        state.used_up,
    ):
        total.update(pile)
    for part in state.turns_built:
        total.update(game.rules.part[part].material)
    for offer in state.offers:
        total.update([offer.food, TABLET] if offer.poisoned else [offer.food])
    return total


@settings(max_examples=25)
@given(GAMES)
def test_nothing_is_lost_energy_is_accounted_for_and_the_dead_do_not_act(drawn):
    rules, seed = drawn
    energy = dict.fromkeys(rules.seats, rules.energy.full)
    gone = set()
    for game, result in played(rules, seed, steps=600):
        assert result.seat not in gone
        gone |= {event.seat for event in result.events if event.kind in ("died", "removed")}
        assert held(game) == rules.lying_about
        for event in result.events:
            if event.kind == "energy":
                energy[event.seat] += event.amount
        for seat, sailor in game.state.sailors.items():
            assert 0 <= sailor.energy <= rules.energy.full and sailor.energy == pytest.approx(energy[seat])
            assert game.state.load(seat) <= rules.pack
            assert all(sailor.pack.get(kind, 0) >= number > 0 for kind, number in sailor.hidden.items())
            assert sailor.alive or not sailor.pack
        assert 0 <= game.ship_progress <= 1
        assert game.seat is None or game.state.sailors[game.seat].active


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_the_same_seed_and_actions_give_the_same_game(rules):
    steps = list(played(rules, 11, steps=400))
    first, replayed = steps[-1][0], Game(rules, 11)
    for _, result in steps:
        replayed.step(result.action)
    assert replayed.state == first.state and replayed.returns == first.returns
    assert Game(rules, 12).state.piles != Game(rules, 11).state.piles


def test_a_game_that_is_over_takes_no_step():
    game = Game(TINY, 0, traitor=False)
    play(game, cast(game), Random(0))
    assert game.over and game.seat is None
    with pytest.raises(GameOver, match="escaped"):
        game.step(Action("WAIT"))
