"""Building, votes, evidence, secrets, poison and nights, in positions made by hand."""

import pytest

from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.presets import SEED, TINY
from classroom_rl.environments.marooned.rules import TABLET, Place
from tests.environments.marooned.support import DISCUSSION, WEALTH, do, end_day, end_round, made, put


def told(game, seat: int) -> list[str]:
    return [message.text for message in observe(game, seat).messages]


def test_one_builder_is_not_enough_and_is_told_so():
    game = made()
    game.state.store = {"WOOD": 6}
    end_round(game, "BUILD HULL")
    assert game.state.turns_built == {} and game.state.store == {"WOOD": 6}
    assert told(game, 1) == ["You worked alone on the HULL"] and told(game, 2) == []
    assert game.state.sailors[1].energy == 97


def test_a_part_takes_its_material_when_it_is_begun():
    game = made(SEED)
    game.state.store = {"WOOD": 55}
    for turn in range(1, 6):
        end_round(game, "BUILD HULL", "BUILD HULL")
        assert game.state.store == {"WOOD": 5} and game.state.turns_built == {"HULL": turn}
    assert game.ship_progress == pytest.approx(0.3)
    assert do(game, "BUILD HULL").fault.text == "the HULL is finished"
    assert do(game, "BUILD MAST").fault.text == "the store lacks 25 WOOD, 20 METAL"


def test_two_parts_cannot_be_begun_with_the_material_of_one():
    game = made()
    game.state.turns_built, game.state.store = {"HULL": 2}, {"WOOD": 3, "METAL": 2}
    end_round(game, "BUILD MAST", "BUILD MAST", "BUILD RUDDER", "BUILD RUDDER")
    assert game.state.turns_built == {"HULL": 2, "MAST": 1}
    assert told(game, 3) == ["You worked in vain on the RUDDER"]


def test_a_plurality_removes_a_sailor_and_pays_those_who_were_right():
    game = made()
    game.state.turn = DISCUSSION
    game.state.sailors[5].pack = {"WOOD": 2}
    end_round(game, "VOTE 5", "VOTE 5", "VOTE 2", "", "VOTE 1")
    end_round(game)
    assert game.state.sailors[5].removed and not observe(game, 5).active
    assert game.state.piles[TINY.base] == {"WOOD": 2}, "what the sailor carried stays"
    assert game.returns[1] == pytest.approx(5 - 0.02) and game.returns[3] == pytest.approx(-0.02)
    assert game.returns[5] == pytest.approx(-100 - 0.02)


@pytest.mark.parametrize("votes", [("VOTE 2",), ("VOTE 2", "VOTE 1"), ("VOTE 3", "VOTE 3", "VOTE 2", "VOTE 2")])
def test_one_vote_or_a_tie_removes_nobody(votes):
    game = made()
    game.state.turn = DISCUSSION
    end_round(game, *votes)
    end_day(game)
    assert len(game.state.active) == 5 and game.state.votes == {}


def test_a_sabotage_that_is_seen_is_evidence():
    game = made()
    game.state.turns_built = {"HULL": 2}
    do(game, "SABOTAGE HULL", seat=5)
    view = observe(game, 3)
    assert view.suspicion == {5: 60} and view.evidence[0].text == "1 saw 5 damage the HULL"


def test_a_frame_looks_like_a_trace():
    games = {}
    for seed in range(20):
        game = made(seed=seed)
        game.state.turns_built = {"HULL": 2}
        for seat in (1, 2, 3, 4):
            put(game, seat, 0, 0)
        game.rules.check()
        game.state.foggy = True
        do(game, "SABOTAGE HULL", seat=5)
        games.setdefault(len(game.state.evidence), game)
    assert set(games) == {0, 1}, "some leave a trace"
    trace = games[1].state.evidence[0]
    do(games[1], "FRAME 2", seat=5)
    frame = games[1].state.evidence[1]
    assert frame.text == trace.text.replace("5", "2") and frame.score == trace.score
    assert do(games[1], "FRAME 3", seat=5).fault.text == "you have framed somebody already"


def test_a_search_finds_what_is_not_hidden():
    game = made()
    game.state.sailors[5].pack = {TABLET: 2, "WOOD": 1}
    do(game, "HIDE TABLET", seat=5)
    do(game, "SEARCH 5")
    assert told(game, 1) == ["In the pack of 5 you find: 1 TABLET, 1 WOOD"]
    assert told(game, 5) == ["1 searches your pack"] and told(game, 2) == []
    assert game.state.suspicion == {5: 60}
    do(game, "HIDE TABLET", seat=5)
    assert do(game, "HIDE WOOD", seat=5).fault.text == "you hide 2 pieces already"
    do(game, "SHOW TO 2", seat=5)
    assert told(game, 2) == ["5 shows you the pack: 1 WOOD"]


def test_those_who_fed_the_poisoned_are_suspected():
    game = made()
    game.state.sailors[5].pack, game.state.sailors[3].pack = {"APPLE": 1, TABLET: 1}, {"BERRY": 1}
    do(game, "POISON APPLE TO 1", seat=5)
    do(game, "OFFER BERRY TO 1", seat=3)
    assert observe(game, 1).offers == ((5, "APPLE"), (3, "BERRY"))
    do(game, "TAKE FROM 5")
    do(game, "TAKE FROM 3")
    assert observe(game, 1).health == "" and game.state.suspicion == {}
    end_day(game)
    assert observe(game, 1).health == "symptoms" and game.state.suspicion == {3: 30, 5: 30}


def test_an_offer_that_nobody_takes_goes_back_with_its_tablet():
    game = made()
    pack = {"APPLE": 1, TABLET: 1}
    game.state.sailors[5].pack = dict(pack)
    do(game, "POISON APPLE TO 1", seat=5)
    assert game.state.sailors[5].pack == {} and observe(game, 5).load == 2
    do(game, "REFUSE FROM 5")
    assert game.state.sailors[5].pack == pack
    do(game, "POISON APPLE TO 2", seat=5)
    end_day(game)
    assert game.state.sailors[5].pack == pack and game.state.offers == ()


def test_stairs_join_the_levels():
    game = made(SEED)
    stairs = SEED.stairs[0]
    assert do(game, "UP").fault.text == "no stairs lead UP from here"
    game.state.sailors[1].place = stairs.lower
    game.state.turn = 20
    do(game, "UP")
    assert game.state.sailors[1].place == stairs.upper and game.state.sailors[1].energy == 97
    do(game, "DOWN")
    assert game.state.sailors[1].place == stairs.lower and game.state.sailors[1].energy == 96


def test_a_game_ends_without_colonists_or_without_days():
    game = made()
    for seat in (1, 2, 3, 4):
        game.state.sailors[seat].energy = 20
    end_day(game)
    assert game.outcome == "dead" and game.returns[5] == pytest.approx(100 - 0.12)
    game = made()
    game.state.day = TINY.days
    end_day(game)
    assert game.outcome == "stranded" and game.returns[5] == pytest.approx(100 - 0.12)
    assert game.returns[1] == pytest.approx(-0.12)


def test_a_pack_that_falls_can_be_picked_up():
    game = made()
    put(game, 1, 2, 2)
    game.state.sailors[1].energy, game.state.sailors[1].pack = 5, {"WOOD": 2, TABLET: 1}
    end_day(game)
    assert not game.state.sailors[1].alive
    assert observe(game, 2).piles == {Place(0, 2, 2): {"WOOD": 2}}


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


def test_a_sabotage_undoes_building_and_pays_only_then():
    game = made()
    game.state.turns_built = {"HULL": 2, "MAST": 1}
    result = do(game, "SABOTAGE HULL", seat=5)
    assert game.state.turns_built == {"HULL": 1, "MAST": 1} and game.ship_progress == 0.25
    assert result.rewards[5] == pytest.approx(2 - 0.01)
    do(game, "SABOTAGE HULL", seat=5)
    assert game.state.turns_built == {"MAST": 1}, "a part that is undone is lost"
    assert do(game, "SABOTAGE HULL", seat=5).rewards[5] == pytest.approx(-0.11), "nothing to undo"


def test_poisoning_pays_when_it_is_swallowed_and_kills_on_the_third_night():
    game = made()
    game.state.sailors[5].pack = {"APPLE": 1, TABLET: 1}
    assert do(game, "POISON APPLE TO 1", seat=5).rewards[5] == pytest.approx(-0.01)
    assert do(game, "TAKE FROM 5").rewards[5] == pytest.approx(10)
    health = []
    for _ in range(3):
        end_day(game)
        health.append(observe(game, 2).others[1].health)
    assert health == ["symptoms", "severe symptoms", ""] and not game.state.sailors[1].alive


def test_an_antidote_helps_until_the_second_day():
    game = made()
    game.state.sailors[1].poison_nights = 0
    game.state.sailors[2].pack = {"ANTIDOTE": 1}
    end_day(game)
    end_day(game)
    do(game, "ANTIDOTE TO 1", seat=2)
    end_day(game)
    assert game.state.sailors[1].alive and game.state.sailors[1].poison_nights is None


def test_build_builds_the_part_that_it_names():
    game = made()
    game.state.store = dict(WEALTH)
    end_round(game, "BUILD SUPPLIES", "BUILD SUPPLIES", "BUILD HULL", "BUILD HULL")
    assert game.state.turns_built == {"SUPPLIES": 1, "HULL": 1}
    assert do(game, "BUILD SAIL").fault.text == "the MAST comes before the SAIL"
