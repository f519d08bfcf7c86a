"""The words of the game: what lies about, what is built, and where something is."""

from typing import NamedTuple

MATERIALS = ("WOOD", "METAL", "FIBRE")
FOODS = ("APPLE", "BERRY", "MUSHROOM")
ANTIDOTE = "ANTIDOTE"
TABLET = "TABLET"
THINGS = (*MATERIALS, *FOODS, ANTIDOTE, TABLET)
STORABLE = (*MATERIALS, *FOODS, ANTIDOTE)
PARTS = ("HULL", "MAST", "SAIL", "RUDDER", "SUPPLIES")
DIRECTIONS = {"NORTH": (0, -1), "SOUTH": (0, 1), "EAST": (1, 0), "WEST": (-1, 0)}
"""Steps (x, y). x grows to the east and y to the south."""

COLONIST = "colonist"
TRAITOR = "traitor"

ESCAPED = "escaped"
STRANDED = "stranded"
DEAD = "dead"


class Place(NamedTuple):
    """A cell of the island. Level 0 is the highest."""

    level: int
    x: int
    y: int


def steps_between(one: Place, other: Place) -> int | None:
    """The steps between two places of one level; None for places of different levels."""
    return abs(one[1] - other[1]) + abs(one[2] - other[2]) if one[0] == other[0] else None


def in_sight(one: Place, other: Place, sight: int) -> bool:
    """Whether somebody who sees `sight` cells far in all directions sees one place from the other."""
    return one[0] == other[0] and abs(one[1] - other[1]) <= sight and abs(one[2] - other[2]) <= sight


def add(pile: dict[str, int], kind: str, number: int) -> None:
    """Add pieces to a pile, or take some away. A kind of which nothing is left is not kept.

    Raises:
        ValueError: if fewer pieces are there than are taken.
    """
    left = pile.get(kind, 0) + number
    if left < 0:
        raise ValueError(f"{-number} {kind} were taken from a pile of {left - number}")
    if left:
        pile[kind] = left
    else:
        pile.pop(kind, None)
