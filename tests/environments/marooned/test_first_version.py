"""What the first version of this game got wrong, one test for each."""

from dataclasses import replace

import pytest

from classroom_rl.environments.marooned.actions import ACTIONS, WAIT, Action, format_action, parse_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.presets import PRESETS, SEED, TINY
from classroom_rl.environments.marooned.prompts import observation_text
from classroom_rl.environments.marooned.rules import COLONIST, DEAD, TABLET, TRAITOR, Place, RulesError, Vein
from tests.environments.marooned.support import do, end_day, end_round, made, put

WEALTH = {"WOOD": 50, "METAL": 20, "FIBRE": 20, "APPLE": 10, "BERRY": 10}


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_the_island_holds_what_the_ship_needs_and_half_as_much_again(rules):
    rules.check()
    game = Game(rules, seed=3)
    for kind, number in rules.needed.items():
        assert sum(pile.get(kind, 0) for pile in game.state.piles.values()) >= 1.5 * number


@pytest.mark.parametrize(("kind", "held"), [("WOOD", 65), ("FIBRE", 35)])
def test_an_island_that_cannot_hold_its_ship_is_refused(kind, held):
    veins = (*(vein for vein in SEED.veins if vein.kind != kind), Vein(kind, 1, held // 5, 5))
    with pytest.raises(RulesError, match=f"{kind}, and the island holds {held}"):
        Game(replace(SEED, veins=veins), seed=0)


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("traitor", [True, False])
def test_waiting_never_wins(rules, traitor):
    game = Game(rules, seed=0, traitor=traitor)
    while not game.over:
        game.step(WAIT)
    assert game.outcome == DEAD and game.ship_progress == 0
    assert all(amount < 0 for amount in game.returns.values()), "nobody has won, the traitor starved too"


def test_eaten_food_counts_at_the_days_end():
    game = made()
    for sailor in game.state.sailors.values():
        sailor.energy = 50
    game.state.sailors[1].pack = {"APPLE": 1}
    do(game, "EAT APPLE")
    end_day(game)
    assert game.state.sailors[1].energy == 50 + 15 + 10
    assert game.state.sailors[2].energy == 50 - 20
    end_day(game)
    assert game.state.sailors[1].energy == 75 - 20, "a meal counts for its own day"


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


def test_a_sabotage_undoes_building_and_pays_only_then():
    game = made()
    game.state.turns_built = {"HULL": 2, "MAST": 1}
    result = do(game, "SABOTAGE HULL", seat=5)
    assert game.state.turns_built == {"HULL": 1, "MAST": 1} and game.ship_progress == 0.25
    assert result.rewards[5] == pytest.approx(2 - 0.01)
    do(game, "SABOTAGE HULL", seat=5)
    assert game.state.turns_built == {"MAST": 1}, "a part that is undone is lost"
    assert do(game, "SABOTAGE HULL", seat=5).rewards[5] == pytest.approx(-0.11), "nothing to undo"


def test_rebuilding_what_was_undone_earns_nothing():
    game = made()
    game.state.store = {"WOOD": 12}
    end_round(game, "BUILD HULL", "BUILD HULL")
    do(game, "SABOTAGE HULL", seat=5)
    before = game.returns[1]
    end_round(game, "BUILD HULL", "BUILD HULL")
    assert game.state.turns_built == {"HULL": 1} and game.returns[1] == pytest.approx(before - 0.01)


def test_poisoning_pays_when_it_is_swallowed_and_kills_on_the_third_night():
    game = made()
    game.state.sailors[5].pack = {"APPLE": 1, TABLET: 1}
    assert do(game, "POISON APPLE TO 1", seat=5).rewards[5] == pytest.approx(-0.01)
    assert do(game, "TAKE FROM 5").rewards[5] == pytest.approx(10)
    seen = []
    for _ in range(3):
        end_day(game)
        seen.append(observe(game, 2).others[1].health)
    assert seen == ["symptoms", "severe symptoms", ""] and not game.state.sailors[1].alive


def test_an_antidote_helps_until_the_second_day():
    game = made()
    game.state.sailors[1].poison_nights = 0
    game.state.sailors[2].pack = {"ANTIDOTE": 1}
    end_day(game)
    end_day(game)
    do(game, "ANTIDOTE TO 1", seat=2)
    end_day(game)
    assert game.state.sailors[1].alive and game.state.sailors[1].poison_nights is None


def test_death_costs_once():
    game = made()
    game.state.sailors[1].energy = 10
    end_day(game)
    assert not game.state.sailors[1].alive
    paid = game.returns[1]
    assert paid == pytest.approx(-50 - 12 * 0.01)
    end_day(game)
    assert game.returns[1] == paid


def test_too_little_energy_is_a_fault_and_the_last_energy_does_not_kill():
    game = made()
    game.state.sailors[1].energy = 1
    game.state.store = {"WOOD": 6}
    result = do(game, "BUILD HULL")
    assert result.fault.category == "energy" and game.state.sailors[1].energy == 1
    assert do(game, "MOVE NORTH").fault is None
    sailor = game.state.sailors[1]
    assert sailor.place == Place(0, 4, 3) and sailor.energy == 0 and sailor.alive


def test_build_builds_the_part_that_it_names():
    game = made()
    game.state.store = dict(WEALTH)
    end_round(game, "BUILD SUPPLIES", "BUILD SUPPLIES", "BUILD HULL", "BUILD HULL")
    assert game.state.turns_built == {"SUPPLIES": 1, "HULL": 1}
    assert do(game, "BUILD SAIL").fault.text == "the MAST comes before the SAIL"


@pytest.mark.parametrize("form", ACTIONS.values(), ids=ACTIONS)
def test_every_action_of_the_table_can_be_parsed(form):
    assert format_action(parse_action(form.example)) == form.example


def test_there_are_24_actions_and_wait():
    assert sum(4 if name == "MOVE" else 1 for name in ACTIONS) == 24 + 1


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
        assert do(game.clone(), f"GATHER {TABLET} 1").fault.text == f"no {TABLET} lies here"


def test_a_thing_is_named_by_kind():
    with pytest.raises(ValueError, match="no action"):
        parse_action("GATHER WOOD001 1")
    assert Action("GATHER", ("WOOD", 1))
