"""What holds in every game, over random and scripted play: 10,000 steps in all."""

from collections import Counter
from copy import deepcopy
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.marooned.actions import ACTIONS, SAMPLE_TEXT, WORDS, Action
from classroom_rl.environments.marooned.game import Game, GameOver
from classroom_rl.environments.marooned.legality import fault_of, possible_actions
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import any_action, cast, play
from classroom_rl.environments.marooned.presets import PRESETS, SEED, TINY
from classroom_rl.environments.marooned.rules import COLONIST, TABLET, Place, in_sight
from classroom_rl.environments.marooned.state import Said
from tests.environments.marooned.support import played

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


def hide_differently(game: Game, seat: int, rng: Random) -> Game:
    """A clone in which everything differs that a colonist must not know."""
    changed = game.clone()
    state, me = changed.state, changed.state.sailors[seat]
    sight = changed.rules.sight(me.place.level, state.foggy)
    state.seed += 1
    for other in state.sailors.values():
        if other is not me and other.active:
            other.pack, other.hidden = {TABLET: 2, "WOOD": 1}, {TABLET: 1}
            other.fed, other.frames_left, other.fault = not other.fed, 5, "secret"
            other.role, other.unpaid = rng.choice(["colonist", "traitor"]), {"WOOD": 1}
            if not other.poison_nights:
                other.poison_nights = None if other.poison_nights == 0 else 0
            if not in_sight(me.place, other.place, sight):
                far = [level for level in range(len(changed.rules.levels)) if level != me.place.level]
                other.place = Place(far[0], 0, 0) if far else other.place
    state.offers = tuple(offer._replace(poisoned=not offer.poisoned) for offer in state.offers if offer.giver != seat)
    for place in list(state.piles):
        if not in_sight(me.place, place, sight):
            state.piles[place] = {"WOOD": 9}
        else:
            state.piles[place].pop(TABLET, None)
    state.piles.setdefault(me.place, {})[TABLET] = 3
    others = [each for each in state.sailors if each != seat][:2]
    for each in others:
        state.inbox[each] = (*state.inbox.get(each, ()), Said(state.day, state.turn, others[0], others[1], "secret"))
    state.meals, state.building, state.used_up, state.log = ((9, 9),), {"HULL": (others[0],)}, {"WOOD": 1}, []
    return changed


@settings(max_examples=25)
@given(GAMES)
def test_an_observation_holds_nothing_that_its_owner_must_not_know(drawn):
    rng = Random(drawn[1])
    compared = 0
    for step, (game, _) in enumerate(played(*drawn, steps=200)):
        seat = rng.choice(list(game.roles))
        if step % 5 == 0 and game.roles[seat] == COLONIST and game.state.sailors[seat].active and not game.over:
            offered = [offer for offer in game.state.offers if offer.giver == seat]
            if not offered:
                assert observe(hide_differently(game, seat, rng), seat) == observe(game, seat)
                compared += 1
    assert compared > 5


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
            assert set(possible) == {each for each in every_action(game) if fault_of(game, seat, each) is None}
            assert all(game.clone().step(each).fault is None for each in possible)


@settings(max_examples=10)
@given(GAMES)
def test_an_action_with_a_fault_becomes_wait_and_costs_a_little(drawn):
    rng = Random(drawn[1])
    for game, _ in played(*drawn, steps=60):
        action, seat = any_action(rng), game.seat
        if seat is None or fault_of(game, seat, action) is None:
            continue
        failing, waiting = game.clone(), game.clone()
        result = failing.step(action)
        expected = waiting.step(Action("WAIT"))
        assert result.fault is not None and any(event.kind == "failed" for event in result.events)
        assert result.rewards[seat] == pytest.approx(expected.rewards[seat] + game.rules.rewards.failed)
        failing.state.sailors[seat].fault, failing.state.log = waiting.state.sailors[seat].fault, waiting.state.log
        assert failing.state == waiting.state


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_the_same_seed_and_actions_give_the_same_game(rules):
    steps = list(played(rules, 11, steps=400))
    first, again = steps[-1][0], Game(rules, 11)
    for _, result in steps:
        again.step(result.action)
    assert again.state == first.state and again.returns == first.returns
    assert Game(rules, 12).state.piles != Game(rules, 11).state.piles


@settings(max_examples=10)
@given(GAMES)
def test_a_clone_goes_its_own_way(drawn):
    rng = Random(drawn[1])
    game = [each for each, _ in played(*drawn, steps=50)][-1]
    before, clone = deepcopy((game.state, game.returns, game.steps)), game.clone()
    while clone.seat is not None and clone.steps < game.steps + 100:
        clone.step(rng.choice(possible_actions(clone, clone.seat)))
    assert (game.state, game.returns, game.steps) == before
    assert clone.steps > game.steps


def test_a_game_that_is_over_takes_no_step():
    game = Game(TINY, 0, traitor=False)
    play(game, cast(game), Random(0))
    assert game.over and game.seat is None
    with pytest.raises(GameOver, match="escaped"):
        game.step(Action("WAIT"))
