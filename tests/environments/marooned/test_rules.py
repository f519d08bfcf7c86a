"""Rules that contradict each other are refused, with the numbers."""

from dataclasses import replace

import pytest

from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.presets import SEED, TINY
from classroom_rl.environments.marooned.rules import (
    COLONIST,
    TRAITOR,
    Level,
    Part,
    Place,
    RulesError,
    Vein,
)
from classroom_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parts": TINY.parts[:4]}, "add up to 90, not 100"),
        ({"parts": (TINY.parts[1], TINY.parts[0], *TINY.parts[2:])}, "MAST must be .* after HULL"),
        ({"parts": (*TINY.parts[:4], Part("ANCHOR", 10, {"WOOD": 1}))}, "ANCHOR must be one of"),
        ({"base": Place(0, 8, 0)}, r"\(0, 8, 0\) is not on the island"),
        ({"veins": (*TINY.veins, Vein("WOOD", 0, 60, 1))}, "more piles than cells"),
        ({"veins": (*TINY.veins, Vein("GOLD", 0, 1, 1))}, "nothing is called GOLD"),
        (
            {"levels": (*TINY.levels, Level("cave", 5, 5, 3)), "veins": (*TINY.veins, Vein("WOOD", 1, 1, 1))},
            "no stairs",
        ),
        ({"phases": TINY.phases[::-1]}, "must end at growing turns"),
        ({"builders": 5}, "5 builders of 5 sailors"),
        ({"fog_sight": 0}, "must be in sight"),
    ],
)
def test_rules_that_cannot_be_played_by_are_refused(changes, says):
    with pytest.raises(RulesError, match=says) as refused:
        Game(replace(TINY, **changes), seed=0)
    assert isinstance(refused.value, ConfigError) and isinstance(refused.value, ValueError)


@pytest.mark.parametrize("roles", [(COLONIST,) * 4, (TRAITOR,) * 5, (COLONIST,) * 4 + ("pirate",)])
def test_roles_must_fit_the_sailors(roles):
    with pytest.raises(RulesError, match="5 sailors need as many roles"):
        Game(TINY, seed=0, roles=roles)


def test_the_seed_draws_the_traitor():
    seats = {next(seat for seat, role in Game(TINY, seed).roles.items() if role == TRAITOR) for seed in range(40)}
    assert seats == set(TINY.seats)
    assert TRAITOR not in Game(TINY, 0, traitor=False).roles.values()


@pytest.mark.parametrize(("kind", "held"), [("WOOD", 65), ("FIBRE", 35)])
def test_an_island_that_cannot_hold_its_ship_is_refused(kind, held):
    veins = (*(vein for vein in SEED.veins if vein.kind != kind), Vein(kind, 1, held // 5, 5))
    with pytest.raises(RulesError, match=f"{kind}, and the island holds {held}"):
        Game(replace(SEED, veins=veins), seed=0)
