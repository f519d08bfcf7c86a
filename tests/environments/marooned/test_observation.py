"""What a sailor sees, and what nobody but its owner may know."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.presets import PRESETS, SEED, TINY
from classroom_rl.environments.marooned.prompts import observation_text
from classroom_rl.environments.marooned.rules import COLONIST, TABLET, TRAITOR, Place, in_sight
from classroom_rl.environments.marooned.state import Said
from tests.environments.marooned.support import clone, do, made, played, put

GAMES = st.tuples(st.sampled_from([TINY, SEED]), st.integers(0, 10**6))


def test_a_whisper_is_heard_by_two():
    game = made()
    do(game, "WHISPER TO 3 Meet me at the ship.", seat=2)
    heard = {seat: "Meet me" in observation_text(game.rules, observe(game, seat)) for seat in game.rules.seats}
    assert heard == {1: False, 2: True, 3: True, 4: False, 5: False}


def test_fog_hides():
    game = made()
    put(game, 2, 1, 4)
    game.state.piles = {Place(0, 4, 1): {"WOOD": 3}, Place(0, 4, 3): {"METAL": 3}}
    clear = observe(game, 1)
    assert clear.others[2].place is not None and len(clear.piles) == 2
    game.state.foggy = True
    foggy = observe(game, 1)
    assert foggy.others[2].place is None and list(foggy.piles) == [Place(0, 4, 3)]
    assert observe(game, 5).others[2].place is not None, "the traitor knows where all are"


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_no_honest_sailor_ever_sees_a_tablet_on_the_island(rules):
    game = Game(rules, seed=5, roles=(COLONIST,) * 4 + (TRAITOR,))
    places = [place for place, pile in game.state.piles.items() if TABLET in pile]
    assert len(places) == rules.lying_about[TABLET]
    for place in places:
        game.state.day, game.state.turn = 1, rules.phases[0].last + 1
        for seat in (1, 5):
            game.state.sailors[seat].place = place
            view = observe(game, seat)
            assert (TABLET in observation_text(rules, view)) == (seat == 5)
            assert (place in view.piles) == (seat == 5)
        assert do(clone(game), f"GATHER {TABLET} 1").fault.text == f"no {TABLET} lies here"


def hide_differently(game: Game, seat: int, rng: Random) -> Game:
    """A clone in which everything differs that a colonist must not know."""
    changed = clone(game)
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
    others = [other_seat for other_seat in state.sailors if other_seat != seat][:2]
    for other_seat in others:
        state.inbox[other_seat] = (
            *state.inbox.get(other_seat, ()),
            Said(state.day, state.turn, others[0], others[1], "secret"),
        )
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


def test_the_traitor_pays_less_energy_and_the_others_do_not_see_it():
    game = made()
    put(game, 1, 4, 4)
    do(game, "MOVE NORTH", seat=1)
    do(game, "MOVE NORTH", seat=5)
    assert game.state.sailors[1].energy == 99 and game.state.sailors[5].energy == 99.2
    others = observe(game, 2).others
    assert others[1].energy == others[5].energy == 100
