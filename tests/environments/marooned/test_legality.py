"""Which actions are possible, and what one that is not costs."""

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.marooned.actions import ACTIONS, SAMPLE_TEXT, WORDS, Action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_of, possible_actions
from classroom_rl.environments.marooned.players import any_action
from classroom_rl.environments.marooned.presets import SEED, TINY
from classroom_rl.environments.marooned.rules import Place
from tests.environments.marooned.support import DISCUSSION, clone, do, made, played

GAMES = st.tuples(st.sampled_from([TINY, SEED]), st.integers(0, 10**6))


def every_action(game: Game) -> list[Action]:
    """All actions with numbers up to the size of a pack."""
    words = {**WORDS, "sailor": (1, 2, 3, 4, 5, 6), "number": range(1, game.rules.pack + 1), "text": (SAMPLE_TEXT,)}
    return [
        Action(form.name, args) for form in ACTIONS.values() for args in product(*(words[kind] for kind in form.types))
    ]


@settings(max_examples=6)
@given(GAMES)
def test_the_possible_actions_are_those_without_fault_and_the_game_agrees(drawn):
    for step, (game, _) in enumerate(played(*drawn, steps=120)):
        if step % 30 == 0 and game.seat is not None:
            seat = game.seat
            possible = possible_actions(game, seat)
            assert len(possible) == len(set(possible))
            assert set(possible) == {action for action in every_action(game) if fault_of(game, seat, action) is None}
            assert all(clone(game).step(action).fault is None for action in possible)


@settings(max_examples=10)
@given(GAMES)
def test_an_action_with_a_fault_becomes_wait_and_costs_a_little(drawn):
    rng = Random(drawn[1])
    for game, _ in played(*drawn, steps=60):
        action, seat = any_action(rng), game.seat
        if seat is None or fault_of(game, seat, action) is None:
            continue
        failing, waiting = clone(game), clone(game)
        result = failing.step(action)
        expected = waiting.step(Action("WAIT"))
        assert result.fault is not None and any(event.kind == "failed" for event in result.events)
        assert result.rewards[seat] == pytest.approx(expected.rewards[seat] + game.rules.rewards.failed)
        failing.state.sailors[seat].fault, failing.state.log = waiting.state.sailors[seat].fault, waiting.state.log
        assert failing.state == waiting.state


def test_too_little_energy_is_a_fault_and_the_last_energy_does_not_kill():
    game = made()
    game.state.sailors[1].energy = 1
    game.state.store = {"WOOD": 6}
    result = do(game, "BUILD HULL")
    assert result.fault.category == "energy" and game.state.sailors[1].energy == 1
    assert do(game, "MOVE NORTH").fault is None
    sailor = game.state.sailors[1]
    assert sailor.place == Place(0, 4, 3) and sailor.energy == 0 and sailor.alive


def test_votes_are_for_the_discussion_alone():
    game = made()
    assert do(game, "VOTE 2").fault.text == "VOTE is not possible in the phase morning"
    game.state.turn = DISCUSSION
    assert do(game, "MOVE NORTH").fault.category == "impossible"
