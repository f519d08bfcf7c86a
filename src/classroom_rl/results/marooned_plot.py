"""The panels of `plots/marooned.png`: the ship, how actions were written, and the reward of each role."""

from typing import TYPE_CHECKING

from classroom_rl.results.panels import BLUE, GREEN, GREY, ORANGE, RED, Panel, name_axes, trend
from classroom_rl.results.run_folder import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[str, str, str]
"""A metric's name after `marooned/`, its label, and its colour."""

_SHIP: tuple[Line, ...] = (
    ("ship_progress", "ship finished", GREEN),
    ("escaped_share", "games that got away", BLUE),
    ("dead_share", "games in which all died", RED),
)
_ACTIONS: tuple[Line, ...] = (
    ("valid_share", "in the exact grammar", BLUE),
    ("possible_share", "possible", GREEN),
    ("repairable_share", "mended by rules", GREY),
    ("invalid_share", "unreadable", RED),
)
_ROLES: tuple[Line, ...] = (
    ("reward_of_colonist", "colonists", BLUE),
    ("reward_of_traitor", "traitors", ORANGE),
)


def _draw(axes: "Axes", data: RunData, lines: tuple[Line, ...]) -> bool:
    found = [(label, colour, points) for name, label, colour in lines if (points := data.series(f"marooned/{name}"))]
    for label, colour, points in found:
        trend(axes, points, colour, label)
    return bool(found)


def _ship(axes: "Axes", data: RunData) -> bool:
    return _draw(axes, data, _SHIP) and name_axes(axes, "The ship at the end of a game", "share")


def _actions(axes: "Axes", data: RunData) -> bool:
    return _draw(axes, data, _ACTIONS) and name_axes(axes, "Actions of the model", "share of decisions")


def _roles(axes: "Axes", data: RunData) -> bool:
    return _draw(axes, data, _ROLES) and name_axes(axes, "Reward by role", "reward")


MAROONED_PANELS: tuple[Panel, ...] = (_ship, _actions, _roles)
