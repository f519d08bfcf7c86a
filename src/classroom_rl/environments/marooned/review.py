"""The rule-based supervisor: is a message valid and its action possible, and if not, why, and what would be right?

Every category of faults has a penalty; the defaults are here, and the configuration can change them. The corrected
action is always possible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from classroom_rl.environments.marooned.actions import ACTIONS, Action, ActionError, format_action, parse_action
from classroom_rl.environments.marooned.builder import Builder, in_sight_for_ship, lacking, way_to
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_in, why_not_build
from classroom_rl.environments.marooned.messages import KNOWN_WORDS, REPAIRABLE, Message, parse_message, repair
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.players import Player, Saboteur, witnesses
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR, Place, Rules, steps_between

NONE, MINOR, FORMAT, IMPOSSIBLE, ENERGY = "none", "minor", "format", "impossible", "energy"
STRATEGY, GIBBERISH = "strategy", "gibberish"
DEFAULT_PENALTIES: dict[str, float] = {
    **{NONE: 0.0, MINOR: -0.4, FORMAT: -0.75, IMPOSSIBLE: -1.5, ENERGY: -1.75, STRATEGY: -2.5, GIBBERISH: -4.0},
}
"""The penalty of a message of each category."""
TIRED = 0.2
"""At or below this share of full energy, waiting with food in the pack is a mistake."""


@dataclass(frozen=True)
class ActionReview:
    """A review of one message.

    Attributes:
        valid: whether the message is accepted as it is.
        category: a key of `DEFAULT_PENALTIES`.
        critique: one sentence about what is wrong; empty if nothing is.
        corrected: the action to do instead: the intended one if it is possible, otherwise a better one.
    """

    valid: bool
    category: str
    critique: str
    corrected: Action


def review_action(game: Game, seat: int, text: str, player: Player | None = None) -> ActionReview:
    """Review a message of the sailor whose turn it is.

    Args:
        player: chooses the corrected action from what the sailor saw; if None, a new scripted player of the sailor's
            role, which remembers nothing.

    Raises:
        ValueError: if the sailor of the seat acts no more.
    """
    view = observe(game, seat)
    if not view.active:
        raise ValueError(f"sailor {seat} acts no more; there is nothing to review")
    message = parse_message(text)
    if message.action is None:
        category, critique = _why_unreadable(text, message)
        intended = _intended_action(text, message)
        if intended is None or fault_in(view, game.rules, intended) is not None:
            intended = _better_action(view, game.rules, player)
        return ActionReview(False, category, critique, intended)
    fault = fault_in(view, game.rules, message.action)
    if fault is not None:
        critique = f"{format_action(message.action)} is not possible: {fault.text}."
        return ActionReview(False, fault.category, critique, _better_action(view, game.rules, player))
    mistake = mistake_in(view, game.rules, message.action)
    if mistake is not None:
        return ActionReview(False, STRATEGY, f"{mistake[0]}.", mistake[1])
    if message.grade == REPAIRABLE:
        critique = f"The action is written {format_action(message.action)}, after REASONING: and ACTION: on two lines."
        return ActionReview(False, MINOR, critique, message.action)
    return ActionReview(True, NONE, "", message.action)


def _better_action(view: Observation, rules: Rules, player: Player | None) -> Action:
    player = player or (Saboteur() if view.role == TRAITOR else Builder())
    return player.act(view, rules, Random(0))


def _why_unreadable(text: str, message: Message) -> tuple[str, str]:
    words = {word.strip(".,:;!?*`\"'()").upper() for word in text.split()}
    if not words & KNOWN_WORDS:
        return GIBBERISH, "The message holds no action."
    name = message.action_text.partition(" ")[0]
    if name in ACTIONS:
        return FORMAT, f"{name} is written like {ACTIONS[name].example}."
    return FORMAT, "The message must be REASONING: and one sentence, then ACTION: and one action of the list."


def _intended_action(text: str, message: Message) -> Action | None:
    """The action in a message without a readable form; None if there is none or more than one."""
    actions = {repair(message.action_text)} if message.action_text else set()
    for line in text.splitlines():
        try:
            actions.add(parse_action(line.strip()))
        except ActionError:
            continue
    actions.discard(None)
    return actions.pop() if len(actions) == 1 else None


Mistake = tuple[str, Action]
_IDLE = {"WAIT", "MOVE", "UP", "DOWN", "SPEAK", "WHISPER", "SHOW", "SEARCH", "HIDE"}
"""Actions that a colonist should put off when there is work to do."""


def mistake_in(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    """Why a possible action is a mistake by the rules alone, and a better action; None if the rules find none. They
    know only a few mistakes."""
    checks = _COLONIST_CHECKS if view.role == COLONIST else _TRAITOR_CHECKS
    mistakes = (check(view, rules, action) for check in checks)
    return next((mistake for mistake in mistakes if mistake and fault_in(view, rules, mistake[1]) is None), None)


def _waits_hungry(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    foods = [kind for kind in view.pack if kind in rules.energy.food]
    if action.name != "WAIT" or not foods or view.fed or view.energy > TIRED * rules.energy.full:
        return None
    return f"You wait with {view.energy:g} energy and have food", Action("EAT", (foods[0],))


def _keeps_material(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    if action.name not in _IDLE or view.place != rules.base:
        return None
    useful = [kind for kind in lacking(view, rules) if view.pack.get(kind) and kind not in rules.energy.food]
    if not useful:
        return None
    deposit = Action("DEPOSIT", (useful[0], view.pack[useful[0]]))
    return f"You are at the base with {useful[0]} that the ship needs, and do not store it", deposit


def _does_not_build(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    if action.name not in _IDLE or view.place != rules.base or not _crew_is_there(view, rules):
        return None
    part = _buildable(view, rules)
    return part and (f"You are at the base, and the {part} can be built", Action("BUILD", (part,)))


def _lets_builders_wait(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    """Leaves the base or stays away from it while a part can be built and only this sailor is missing."""
    part, way = _buildable(view, rules), way_to(rules, view.place, rules.base)
    if action.name not in _IDLE or not part or way is None or not _crew_is_there(view, rules):
        return None
    target = rules.neighbour(view.place, str(action.args[0])) if action.name == "MOVE" else None
    if steps_between(view.place, rules.base) is None or (target and _is_nearer(target, view.place, rules.base)):
        return None
    return f"The {part} can be built, and others wait at the base for you", way[1]


def _passes_by(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    """Does not pick up what the ship lacks, with room in the pack."""
    free = min(rules.gather_limit, rules.pack - view.load)
    missing = lacking(view, rules)
    useful = [kind for kind in view.here if missing.get(kind, 0) > view.pack.get(kind, 0)]
    if action.name not in _IDLE or not useful or free < 1:
        return None
    gather = Action("GATHER", (useful[0], min(view.here[useful[0]], free)))
    return f"Here lies {useful[0]} that the ship needs, and your pack has room", gather


def _gets_nowhere(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    """Waits, or walks without getting nearer to the base or to a pile in sight that the ship lacks, while there is
    something to fetch or to bring home."""
    if action.name not in ("WAIT", "MOVE") or "MOVE" in rules.phase(view.turn).closed:
        return None
    goals = _goals(view, rules)
    ways = {place: way for place in goals if (way := way_to(rules, view.place, place)) is not None}
    target = rules.neighbour(view.place, str(action.args[0])) if action.name == "MOVE" else None
    if not ways or (target is not None and any(_is_nearer(target, view.place, goal) for goal in (*ways, rules.base))):
        return None
    goal = min(ways, key=lambda place: (ways[place][0], place))
    return f"{goals[goal]}, and you do not go there", ways[goal][1]


def _goals(view: Observation, rules: Rules) -> dict[Place, str]:
    """The places where a colonist has something to do for the ship, each with the reason."""
    goals: dict[Place, str] = {}
    turns_left = rules.last_turn("GATHER") - view.turn
    carries = any(view.pack.get(kind) for kind in lacking(view, rules) if kind not in rules.energy.food)
    if carries and (turns_left < 0 or view.load >= rules.pack):
        goals[rules.base] = "You carry what the ship needs at the base"
    if view.load < rules.pack and "GATHER" not in rules.phase(view.turn).closed:
        for place, kind in in_sight_for_ship(view, rules):
            if (steps_between(place, view.place) or turns_left + 1) <= turns_left:
                goals[place] = f"In sight is {kind} that the ship needs"
    return goals


def _is_nearer(new: Place, old: Place, goal: Place) -> bool:
    before, after = steps_between(old, goal), steps_between(new, goal)
    return before is not None and after is not None and after < before


def _buildable(view: Observation, rules: Rules) -> str | None:
    return next((name for name in rules.part if why_not_build(view, rules, name) is None), None)


def _crew_is_there(view: Observation, rules: Rules) -> bool:
    """Whether enough other sailors are at the base to build together with this one."""
    return sum(other.place == rules.base for other in view.others.values()) + 1 >= rules.builders


def _carries_off(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    """Walks away from the base, or past it, with a full pack of what the ship needs."""
    missing = lacking(view, rules)
    useful = [kind for kind in missing if view.pack.get(kind)]
    steps = steps_between(view.place, rules.base)
    if action.name != "MOVE" or view.load < rules.pack or not useful or steps is None or steps > 1:
        return None
    target = rules.neighbour(view.place, str(action.args[0]))
    if target is None or (steps_between(target, rules.base) or 0) <= steps:
        return None
    if steps == 0:
        return "You walk away from the base with a full pack", Action("DEPOSIT", (useful[0], view.pack[useful[0]]))
    return "You walk away with a full pack, one step from the base", _step_home(view, rules)


def _step_home(view: Observation, rules: Rules) -> Action:
    ways = (Action("MOVE", (direction,)) for direction in ("NORTH", "SOUTH", "EAST", "WEST"))
    return next(way for way in ways if rules.neighbour(view.place, str(way.args[0])) == rules.base)


def _misses_a_chance(view: Observation, rules: Rules, action: Action) -> Mistake | None:
    """A traitor waits alone at the base while something can be sabotaged."""
    if action.name != "WAIT" or view.place != rules.base or not view.turns_built or witnesses(view, rules, rules.base):
        return None
    part = next(iter(view.turns_built))
    return f"You wait while nobody sees you at the {part}", Action("SABOTAGE", (part,))


_COLONIST_CHECKS: tuple[Callable[[Observation, Rules, Action], Mistake | None], ...] = (
    *(_waits_hungry, _keeps_material, _does_not_build, _carries_off, _lets_builders_wait, _passes_by, _gets_nowhere),
)
_TRAITOR_CHECKS: tuple[Callable[[Observation, Rules, Action], Mistake | None], ...] = (_waits_hungry, _misses_a_chance)
