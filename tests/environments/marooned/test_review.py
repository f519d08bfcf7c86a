"""The supervisor of rules: categories, corrections, penalties."""

from random import Random

import pytest

from classroom_rl.environments.marooned.actions import format_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_of
from classroom_rl.environments.marooned.messages import format_message
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import PLAYERS, any_action, cast
from classroom_rl.environments.marooned.presets import TINY
from classroom_rl.environments.marooned.review import DEFAULT_PENALTIES, mistake_in, review_action
from classroom_rl.environments.marooned.rules import COLONIST, Place
from tests.environments.marooned.support import clone, made, put


@pytest.mark.parametrize(
    ("text", "category", "corrected"),
    [
        ("REASONING: go\nACTION: MOVE NORTH", "none", "MOVE NORTH"),
        ("REASONING: go\nACTION: I will go north.", "minor", "MOVE NORTH"),
        ("ACTION: MOVE NORTH", "minor", "MOVE NORTH"),
        ("MOVE NORTH", "format", "MOVE NORTH"),
        ("REASONING: go\nACTION: MOVE NORTH\nACTION: WAIT", "format", None),
        ("REASONING: go\nACTION: MOVE UPWARDS", "format", None),
        ("REASONING: go\nACTION: UP", "impossible", None),
        ("REASONING: go\nACTION: GATHER WOOD 3", "impossible", None),
        ("REASONING: go\nACTION: DEPOSIT TABLET 1", "impossible", None),
        ("REASONING: go\nACTION: WITHDRAW TABLET 1", "impossible", None),
        ("Once upon a time there was a fox.", "gibberish", None),
        ("", "gibberish", None),
    ],
)
def test_each_fault_has_its_category_and_a_correction_that_is_possible(text, category, corrected):
    game = made()
    review = review_action(game, 1, text)
    assert (review.category, review.valid) == (category, category == "none")
    assert bool(review.critique) == (category != "none")
    assert fault_of(game, 1, review.corrected) is None
    assert corrected is None or format_action(review.corrected) == corrected


def test_too_little_energy_has_a_category_of_its_own():
    game = made()
    game.state.turn, game.state.sailors[1].energy = 4, 3
    game.state.piles = {TINY.base: {"WOOD": 3}}
    assert review_action(game, 1, "REASONING: wood\nACTION: GATHER WOOD 3").category == "energy"


def reviewed(game: Game, action: str, seat: int = 1) -> tuple[str, str]:
    """The category, and what should be done."""
    review = review_action(game, seat, f"REASONING: on\nACTION: {action}")
    return review.category, format_action(review.corrected)


def test_waiting_is_a_mistake_where_something_useful_is_certain():
    game = made()
    assert reviewed(game, "WAIT") == ("none", "WAIT")
    game.state.sailors[1].pack = {"WOOD": 3}
    assert reviewed(game, "WAIT") == ("strategy", "DEPOSIT WOOD 3")
    game.state.sailors[1].pack, game.state.store = {}, {"WOOD": 6}
    assert reviewed(game, "WAIT") == ("strategy", "BUILD HULL")
    for seat in (2, 3, 4, 5):
        put(game, seat, 0, 0)
    assert reviewed(game, "WAIT") == ("none", "WAIT"), "nobody is there to build with"
    game.state.sailors[1].pack, game.state.sailors[1].energy = {"APPLE": 1}, 10
    assert reviewed(game, "WAIT") == ("strategy", "EAT APPLE")


def test_walking_away_with_a_full_pack_is_a_mistake():
    game = made()
    put(game, 1, 4, 3)
    game.state.sailors[1].pack = {"WOOD": TINY.pack}
    assert reviewed(game, "MOVE NORTH") == ("strategy", "MOVE SOUTH")
    assert reviewed(game, "MOVE SOUTH")[0] == "none"
    game.state.sailors[1].pack = {"WOOD": TINY.pack - 1}
    assert reviewed(game, "MOVE NORTH")[0] == "none"


def test_whoever_is_needed_at_the_base_comes_and_builds():
    """Sailors 2 to 5 stand at the base, and the store has the wood of the hull."""
    game = made()
    game.state.store = {"WOOD": 6}
    for action in ("WAIT", "MOVE NORTH", "SPEAK Hello."):
        assert reviewed(game, action) == ("strategy", "BUILD HULL")
    put(game, 1, 4, 1)
    assert reviewed(game, "MOVE NORTH") == reviewed(game, "WAIT") == ("strategy", "MOVE SOUTH")
    assert reviewed(game, "MOVE SOUTH")[0] == "none", "on the way"
    game.state.store = {"WOOD": 5}
    assert reviewed(game, "MOVE NORTH")[0] == "none", "nothing can be built"
    game.state.store = {"WOOD": 6}
    for seat in (2, 3, 4, 5):
        put(game, seat, 0, 0)
    assert reviewed(game, "MOVE NORTH")[0] == "none", "nobody waits"


def test_what_the_ship_needs_is_not_left_lying():
    game = made()
    game.state.turn = 4
    put(game, 1, 2, 2)
    game.state.piles = {Place(0, 2, 2): {"WOOD": 3}}
    assert reviewed(game, "MOVE NORTH") == reviewed(game, "WAIT") == ("strategy", "GATHER WOOD 3")
    assert reviewed(game, "GATHER WOOD 1")[0] == "none"
    game.state.sailors[1].pack = {"BERRY": TINY.pack}
    assert reviewed(game, "MOVE NORTH")[0] == "none", "no room"
    game.state.sailors[1].pack, game.state.turn = {}, 1
    assert reviewed(game, "MOVE NORTH")[0] == "none", "no gathering in the morning"


def test_who_sees_what_the_ship_needs_goes_there():
    game = made()
    game.state.turn = 4
    put(game, 1, 0, 0)
    game.state.piles = {Place(0, 3, 0): {"WOOD": 3}, Place(0, 0, 2): {"MUSHROOM": 3}}
    assert reviewed(game, "WAIT") == ("strategy", "MOVE EAST")
    assert reviewed(game, "MOVE EAST")[0] == "none"
    assert reviewed(game, "SPEAK I saw 2 at the hull.")[0] == "none", "rules cannot know what it is good for"
    assert reviewed(game, "MOVE SOUTH")[0] == "none", "nearer to the base"
    put(game, 1, 4, 0)
    assert reviewed(game, "MOVE EAST") == ("strategy", "MOVE WEST"), "nearer to nothing"
    game.state.piles = {Place(0, 4, 2): {"MUSHROOM": 3}}
    assert reviewed(game, "MOVE EAST")[0] == "none", "nothing that the ship needs"
    game.state.sailors[1].pack = {"WOOD": TINY.pack}
    assert reviewed(game, "MOVE EAST") == reviewed(game, "WAIT") == ("strategy", "MOVE SOUTH"), "bring it home"


def test_good_players_are_seldom_found_wrong_and_idle_ones_often():
    """The share of strategic mistakes among the actions of scripted colonists."""
    shares = {}
    for kind in ("builder", "waiter"):
        mistakes = total = 0
        for seed in range(12):
            game = Game(TINY, seed)
            players = cast(game) | ({1: PLAYERS[kind](), 2: PLAYERS[kind]()})
            while not game.over:
                view = observe(game, game.seat)
                action = players[game.seat].act(view, TINY, Random(game.steps))
                if game.roles[game.seat] == COLONIST and game.seat in (1, 2):
                    total += 1
                    mistakes += mistake_in(view, TINY, action) is not None
                game.step(action)
        shares[kind] = mistakes / total
    assert shares["builder"] < 0.08 and shares["waiter"] > 0.5, shares


def test_the_traitor_is_judged_as_a_traitor():
    game = made()
    game.state.turns_built = {"HULL": 2}
    game.state.sailors[5].pack = {"WOOD": 3}
    assert reviewed(game, "WAIT", 5) == ("none", "WAIT"), "the others are looking"
    game.state.foggy = True
    for seat in (1, 2, 3, 4):
        game.state.sailors[seat].place = Place(0, 0, 0)
    assert reviewed(game, "WAIT", 5) == ("strategy", "SABOTAGE HULL")


def test_every_correction_of_random_play_is_possible():
    game = Game(TINY, 4)
    players, rng, categories = cast(game), Random(4), set()
    while not game.over:
        action = any_action(rng)
        review = review_action(game, game.seat, format_message("so", action))
        categories.add(review.category)
        assert clone(game).step(review.corrected).fault is None
        assert not review.valid or review.corrected == action
        game.step(players[game.seat].act(observe(game, game.seat), TINY, rng))
    assert {"none", "impossible"} <= categories <= set(DEFAULT_PENALTIES)


def test_penalties_lie_in_their_ranges():
    ranges = {"none": (0, 0), "minor": (-0.5, -0.3), "format": (-1, -0.5), "impossible": (-2, -1)}
    ranges |= {"energy": (-2, -1.5), "strategy": (-3, -2), "gibberish": (-5, -3)}
    assert DEFAULT_PENALTIES.keys() == ranges.keys()
    assert all(low <= DEFAULT_PENALTIES[name] <= high for name, (low, high) in ranges.items())


def test_who_acts_no_more_is_not_reviewed():
    game = made()
    game.state.sailors[1].alive = False
    with pytest.raises(ValueError, match="acts no more"):
        review_action(game, 1, "REASONING: a\nACTION: WAIT")
