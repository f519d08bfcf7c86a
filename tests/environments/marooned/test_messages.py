"""The sentence before an action, and what a sailor reads of the way."""

from random import Random

import pytest

from classroom_rl.environments.marooned.actions import parse_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.messages import reasoning
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import observation_text, way_text
from classroom_rl.environments.marooned.rules import Place
from classroom_rl.environments.marooned.world import decisions

TINY = PRESETS["tiny"]


def morning_at(x: int, y: int, piles: dict[Place, dict[str, int]]) -> Game:
    game = Game(TINY, 3)
    game.state.turn = 4
    game.state.sailors[1].place = Place(0, x, y)
    game.state.piles = piles
    return game


def test_what_is_near_is_said_as_it_is_read_and_the_step_leads_there() -> None:
    led = 0
    for view, action in decisions("tiny", first=0, games=20, per_game=20, seed=1):
        near = observation_text(TINY, view).rpartition("Nearest wanted: ")[2].partition(".")[0]
        text = reasoning(view, TINY, action)
        assert f"; near is {near}; " in text
        assert f"; possible is {observation_text(TINY, view).rpartition('Possible here: ')[2].rstrip('.')}; " in text
        if text.endswith("I go there."):
            assert near.split()[2] == action.args[0]
            led += 1
    assert led > 20


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("MOVE EAST", "I go there."),
        ("MOVE SOUTH", "I go to the base 4 SOUTH 3 EAST."),
        ("MOVE NORTH", "I look around NORTH."),
        ("WAIT", "do nothing."),
    ],
)
def test_a_step_says_where_it_leads(step: str, why: str) -> None:
    game = morning_at(1, 0, {Place(0, 4, 0): {"WOOD": 3}, Place(0, 1, 3): {"MUSHROOM": 2}})
    text = reasoning(observe(game, 1), TINY, parse_action(step))
    assert text == f"I hold nothing; near is WOOD 3 EAST; possible is nothing; {why}"


def test_a_second_aim_is_named_and_a_full_pack_has_none() -> None:
    game = morning_at(1, 0, {Place(0, 2, 0): {"WOOD": 3}, Place(0, 1, 2): {"METAL": 2}})
    south = parse_action("MOVE SOUTH")
    assert reasoning(observe(game, 1), TINY, south).endswith("I go for METAL 2 SOUTH.")
    game.state.sailors[1].pack = {"BERRY": TINY.pack}
    assert reasoning(observe(game, 1), TINY, south).endswith("I go to the base 4 SOUTH 3 EAST.")


def test_a_way_leads_to_its_place() -> None:
    steps = {"NORTH": (0, -1), "SOUTH": (0, 1), "EAST": (1, 0), "WEST": (-1, 0)}
    rng = Random(5)
    for _ in range(200):
        start, target = (Place(0, rng.randrange(8), rng.randrange(8)) for _ in range(2))
        x, y, lengths = start.x, start.y, []
        words = way_text(TINY, start, target).split()
        for number, direction in zip(words[::2], words[1::2], strict=False):
            x, y = x + int(number) * steps[direction][0], y + int(number) * steps[direction][1]
            lengths.append(int(number))
        assert (x, y) == (target.x, target.y) and lengths == sorted(lengths, reverse=True)
        assert (words == ["here"]) == (start == target)
