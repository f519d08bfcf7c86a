"""The sentence of reasoning that fits an action, as scripted sailors and the supervisor of rules write it."""

from classroom_rl.environments.marooned.actions import ACTIONS, Action
from classroom_rl.environments.marooned.builder import in_sight_for_ship
from classroom_rl.environments.marooned.chart import way_to
from classroom_rl.environments.marooned.observation import Observation
from classroom_rl.environments.marooned.prompts import nearest_text, pieces_text, possible_text, way_text
from classroom_rl.environments.marooned.rules import Rules
from classroom_rl.environments.marooned.things import Place


def reasoning(view: Observation, rules: Rules, action: Action) -> str:
    """What a sailor has, sees and can do, and why it does an action: a small model acts on what it has just said."""
    known = f"I hold {pieces_text(view.pack)}; near is {nearest_text(view, rules)}"
    return f"{known}; possible is {possible_text(view, rules)}; {_why(view, rules, action)}"


def _why(view: Observation, rules: Rules, action: Action) -> str:
    if action.name != "MOVE":
        meaning = ACTIONS[action.name].meaning
        return meaning[0].lower() + meaning[1:]
    gathers = view.load < rules.pack and view.turn < rules.last_turn("GATHER")
    for number, (place, kind) in enumerate(in_sight_for_ship(view, rules) if gathers else ()):
        if _leads(view, rules, place, action):
            return f"I go for {kind} {way_text(rules, view.place, place)}." if number else "I go there."
    if _leads(view, rules, rules.base, action):
        return f"I go to the base {way_text(rules, view.place, rules.base)}."
    return f"I look around {action.args[0]}."


def _leads(view: Observation, rules: Rules, place: Place, step: Action) -> bool:
    """Whether the way to a place begins with a step."""
    way = way_to(rules, view.place, place)
    return way is not None and way[1] == step
