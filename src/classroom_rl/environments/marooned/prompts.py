"""The prompts, and the game as text for people. Prompts are generated from the rules and an observation, so that they
cannot contradict the game.
"""

from collections.abc import Mapping

from classroom_rl.environments.marooned.actions import ACTIONS, Form, action_of, format_action
from classroom_rl.environments.marooned.builder import in_sight_for_ship
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_in, possible_in
from classroom_rl.environments.marooned.observation import ACTIVE, Observation, observe
from classroom_rl.environments.marooned.rules import (
    ANTIDOTE,
    COLONIST,
    DIRECTIONS,
    TABLET,
    TRAITOR,
    Place,
    Rules,
    in_sight,
    steps_between,
)

GLYPHS = {"WOOD": "W", "METAL": "M", "FIBRE": "F", "APPLE": "a", "BERRY": "b", "MUSHROOM": "m"}
GLYPHS |= {ANTIDOTE: "+", TABLET: "x"}
LEGEND = "W wood  M metal  F fibre  a apple  b berry  m mushroom  + antidote  x poison  # base  < > stairs  1-9 sailors"
SHOWN_EVENTS = 10


def render(game: Game, seat: int | None = None) -> str:
    """The whole game as text, or, with `seat`, only what the sailor of that seat sees. Unseen cells are blank on the
    map."""
    view = None if seat is None else observe(game, seat)
    state = game.state
    lines = [f"Day {state.day}, turn {state.turn}, {state.outcome or 'playing'}{', fog' if state.foggy else ''}"]
    for level, size in enumerate(game.rules.levels):
        if view is None or view.place.level == level:
            lines += [f"{size.name}:", *_map_lines(game, level, view)]
    lines.append(LEGEND)
    if view is not None:
        return "\n".join([*lines, observation_text(game.rules, view)])
    return "\n".join([*lines, *_ship_lines(game), *_sailor_lines(game), *_event_lines(game)])


def _map_lines(game: Game, level: int, view: Observation | None) -> list[str]:
    piles = game.state.piles if view is None else view.piles
    if view is None:
        sailors = {sailor.place: str(sailor.seat) for sailor in game.state.active}
    else:
        sailors = {other.place: str(other.seat) for other in view.others.values() if other.place is not None}
        sailors[view.place] = str(view.seat)
    marks = {game.rules.base: "#"}
    marks |= {stairs.upper: ">" for stairs in game.rules.stairs} | {stairs.lower: "<" for stairs in game.rules.stairs}
    marks |= {place: GLYPHS[next(iter(pile))] for place, pile in piles.items()} | sailors
    size = game.rules.levels[level]
    lines = []
    for y in range(size.height):
        places = [Place(level, x, y) for x in range(size.width)]
        visible = [view is None or in_sight(view.place, place, view.sight) for place in places]
        cells = (
            marks.get(place, ".") if is_visible else " " for place, is_visible in zip(places, visible, strict=True)
        )
        lines.append(" ".join(cells).rstrip())
    return lines


def _ship_lines(game: Game) -> list[str]:
    state, needed = game.state, game.rules.build_turns
    parts = (f"{name} {state.turns_built.get(name, 0)}/{needed}" for name in game.rules.part)
    store = ", ".join(f"{number} {kind}" for kind, number in sorted(state.store.items()))
    return [f"Ship {state.ship_percent():g}%: {', '.join(parts)}", f"Store: {store or 'nothing'}"]


def _sailor_lines(game: Game) -> list[str]:
    lines = []
    for sailor in game.state.sailors.values():
        pack = ", ".join(f"{number} {kind}" for kind, number in sorted(sailor.pack.items())) or "nothing"
        status = "dead" if not sailor.alive else "removed" if sailor.removed else f"energy {sailor.energy:g}"
        poison = "" if sailor.poison_nights is None else ", poisoned"
        lines.append(
            f"{sailor.seat} {sailor.role}: {status}{poison}, return {game.returns[sailor.seat]:g}, pack: {pack}"
        )
    return lines


def _event_lines(game: Game) -> list[str]:
    lines = []
    for day, turn, event in game.state.log[-SHOWN_EVENTS:]:
        others = f" {', '.join(map(str, event.others))}" if event.others else ""
        amount = f" {event.amount:g}" if event.amount else ""
        lines.append(f"  day {day}, turn {turn}: {event.seat} {event.kind} {event.what}{amount}{others}".rstrip())
    return lines


_GOALS = {
    COLONIST: "You are a colonist: build the ship with the others and get away within {days} days of {turns} turns.",
    TRAITOR: "You are the traitor: keep the ship unfinished for {days} days of {turns} turns, undiscovered.",
}
BRINGS_ON = ("GATHER", "DEPOSIT", "BUILD", "EAT", "TAKE")
"""Actions that feed the sailor or advance the ship. An observation lists those that are possible."""


def system_prompt(rules: Rules, role: str) -> str:
    """What a player of a role must know about the rules, and the format of the answer.

    Raises:
        KeyError: if there is no such role.
    """
    energy = rules.energy
    costs = [(name, cost) for name, cost in rules.costs[role].items() if rules.stairs or name not in ("UP", "DOWN")]
    costs = [f"{name} {cost:g}" for name, cost in costs if ACTIONS[name].role in (None, role)]
    goal = _GOALS[role].format(days=rules.days, turns=rules.turns)
    ship = f"{rules.builders} in the same turn, {rules.build_turns} turns each part, from the store"
    near = f"{rules.reach} step{'' if rules.reach == 1 else 's'}"
    lines = [
        f"{rules.sailors} sailors are stranded; one may be a traitor. {goal}",
        *_island_lines(rules),
        "Of each day: " + "; ".join(_phase_texts(rules)) + ".",
        f"Ship, built at the base by {ship}: {'; '.join(_part_text(rules, name) for name in rules.part)}.",
        f"Energy {energy.full:g}; each night +{energy.fed:g} if you ate, else -{energy.unfed:g}; at 0 you die. "
        f"Eating: {', '.join(f'{kind} +{gain:g}' for kind, gain in energy.food.items())}. Costs: {', '.join(costs)}.",
        f"Pack {rules.pack}; GATHER at most {rules.gather_limit}; poison kills in {rules.poison.death} nights.",
        f"You see {_sight_text(rules)} cells far, in fog {rules.fog_sight}; near is {near} away. "
        f"The sailor with most VOTEs, {rules.least_votes} or more, is removed at night.",
        "Actions: " + "; ".join(_action_text(form) for form in forms_of(rules, role)) + ".",
        "Answer in two lines:",
        "REASONING: one short sentence",
        "ACTION: one action",
    ]
    return "\n".join(lines)


def forms_of(rules: Rules, role: str) -> list[Form]:
    """The actions that a role can ever do under these rules."""
    return [
        form
        for form in ACTIONS.values()
        if form.role in (None, role) and (rules.stairs or form.name not in ("UP", "DOWN"))
    ]


def _island_lines(rules: Rules) -> list[str]:
    if len(rules.levels) == 1:
        level = rules.levels[0]
        size = f"x 0-{level.width - 1} to the EAST, y 0-{level.height - 1} to the SOUTH"
        return [f"Places: {size}; base ({rules.base.x},{rules.base.y})."]
    sizes = ", ".join(f"{level.name} {level.width}x{level.height}" for level in rules.levels)
    stairs = ", ".join(
        f"{_place_text(rules, flight.lower)} UP to {_place_text(rules, flight.upper)}" for flight in rules.stairs
    )
    kinds = []
    for level, size in enumerate(rules.levels):
        level_kinds = dict.fromkeys(vein.kind for vein in rules.veins if vein.level == level and vein.kind != "TABLET")
        kinds.append(f"{size.name}: {', '.join(level_kinds)}")
    return [
        f"Island: {sizes}; x grows to the EAST, y to the SOUTH; base {_place_text(rules, rules.base)}.",
        f"Stairs: {stairs}.",
        f"Found in {'; '.join(kinds)}.",
    ]


def _sight_text(rules: Rules) -> str:
    """How far a sailor sees without fog: one number, or one for each level."""
    if len({level.sight for level in rules.levels}) == 1:
        return str(rules.levels[0].sight)
    return ", ".join(f"{level.name} {level.sight}" for level in rules.levels)


def _place_text(rules: Rules, place: Place, level: int | None = None) -> str:
    """A place with the name of its level, unless it is on `level` or the island has only one."""
    is_obvious = place.level == level or len(rules.levels) == 1
    return f"{'' if is_obvious else rules.levels[place.level].name + ' '}({place.x},{place.y})"


def _phase_texts(rules: Rules) -> list[str]:
    """The turns of the phases in which some actions are not possible, with these actions."""
    texts, first_turn = [], 1
    for phase in rules.phases:
        closed = [name for name in ACTIONS if name in phase.closed and (rules.stairs or name not in ("UP", "DOWN"))]
        if closed:
            turns = f"turns {first_turn}-{phase.last}" if first_turn < phase.last else f"turn {first_turn}"
            texts.append(f"{turns} no {', '.join(closed)}")
        first_turn = phase.last + 1
    return texts


def _part_text(rules: Rules, name: str) -> str:
    part = rules.part[name]
    after = f" after {part.after}" if part.after else ""
    return f"{name}{after}, {part.share}%: {', '.join(f'{number} {kind}' for kind, number in part.material.items())}"


def _action_text(form: Form) -> str:
    return f"{form.example} ({form.note})" if form.note else form.example


def decision_prompt(rules: Rules, view: Observation, show_rules: bool = True) -> list[dict[str, str]]:
    """The chat messages that ask a sailor for a decision: the rules, if `show_rules`, and what the sailor knows now."""
    observation = {"role": "user", "content": observation_text(rules, view)}
    if not show_rules:
        return [observation]
    return [{"role": "system", "content": system_prompt(rules, view.role)}, observation]


def observation_text(rules: Rules, view: Observation) -> str:
    """What a sailor knows now, as text."""
    lines = [f"You are sailor {view.seat}, {view.role}.", *_common_lines(rules, view), *_message_lines(view)]
    return "\n".join([*lines, *_own_lines(rules, view)])


def _own_lines(rules: Rules, view: Observation) -> list[str]:
    """What the next action depends on most. It comes last, right before the answer."""
    base = "base" if view.place == rules.base else f"base {way_text(rules, view.place, rules.base)}"
    location = f"{_place_text(rules, view.place)}, {base}"
    fed = "fed" if view.fed else "not fed"
    hidden = f" (hidden: {pieces_text(view.hidden)})" if view.hidden else ""
    lines = [f"In sight: {_sights(view, rules)}."]
    if view.last_fault:
        lines.append(f"Your last action failed: {view.last_fault}.")
    lines.append(
        f"Day {view.day}/{rules.days}, turn {view.turn}/{rules.turns}, "
        f"{view.phase}{', fog' if view.foggy else ''}. "
        f"Energy {view.energy:g}, {fed}{', ' + view.health if view.health else ''}."
    )
    stairs = [name for name in ("UP", "DOWN") if rules.way(view.place, name)]
    lines.append(
        f"You are at {location}{', stairs ' if stairs else ''}{', '.join(stairs)}. "
        f"Pack {view.load}/{rules.pack}: {pieces_text(view.pack)}{hidden}. Here: {pieces_text(view.here)}."
    )
    lines.append(f"Nearest wanted: {nearest_text(view, rules)}. Ways: {ways_text(view, rules)}.")
    lines.append(f"Possible here: {possible_text(view, rules)}.")
    return lines


def ways_text(view: Observation, rules: Rules) -> str:
    """The directions in which a step is possible now, or `none`."""
    steps = (direction for direction in DIRECTIONS if fault_in(view, rules, action_of("MOVE", direction)) is None)
    return ", ".join(steps) or "none"


def possible_text(view: Observation, rules: Rules) -> str:
    """The actions of `BRINGS_ON` that the rules allow now, each kind with the most pieces, or `nothing`. BUILD is
    listed even for a single sailor: it is not known yet whether others build in the same turn."""
    possible = [action for action in possible_in(view, rules) if action.name in BRINGS_ON]
    # Sorted by number, so that the action with the most pieces overwrites the others.
    by_kind = {(action.name, action.args[0]): action for action in sorted(possible, key=lambda action: action.args[1:])}
    keys = sorted(by_kind, key=lambda key: (BRINGS_ON.index(key[0]), key[1]))
    return ", ".join(format_action(by_kind[key]) for key in keys) or "nothing"


def nearest_text(view: Observation, rules: Rules) -> str:
    """The nearest thing in sight that the ship lacks, and the way there; `nothing` if there is none."""
    piles = in_sight_for_ship(view, rules)
    return f"{piles[0][1]} {way_text(rules, view.place, piles[0][0])}" if piles else "nothing"


def pieces_text(pieces: Mapping[str, int]) -> str:
    """Pieces by kind, as `1 APPLE, 3 WOOD`, or `nothing`."""
    return ", ".join(f"{number} {kind}" for kind, number in sorted(pieces.items())) or "nothing"


def _sights(view: Observation, rules: Rules) -> str:
    """The nearest visible pile of each kind, not counting the sailor's own place; the nearest first."""
    nearest: dict[str, Place] = {}
    places = view.piles.keys() - {view.place}
    for place in sorted(places, key=lambda place: (steps_between(view.place, place) or 0, place)):
        for kind in sorted(view.piles[place]):
            nearest.setdefault(kind, place)
    sights = (
        f"{view.piles[place][kind]} {kind} {way_text(rules, view.place, place)}" for kind, place in nearest.items()
    )
    return "; ".join(sights) or "nothing"


def way_text(rules: Rules, place: Place, target: Place) -> str:
    """The way to a place on the same level, the longer leg first, such as `3 EAST 1 NORTH`. On another level, the
    place."""
    if place.level != target.level:
        return _place_text(rules, target, place.level)
    east, south = target.x - place.x, target.y - place.y
    legs = [(abs(east), "EAST" if east > 0 else "WEST"), (abs(south), "SOUTH" if south > 0 else "NORTH")]
    legs.sort(key=lambda leg: -leg[0])
    return " ".join(f"{steps} {direction}" for steps, direction in legs if steps) or "here"


def _common_lines(rules: Rules, view: Observation) -> list[str]:
    turns = {name: view.turns_built.get(name, 0) for name in rules.part}
    built = [f"{name} {_turns_text(count, rules.build_turns)}" for name, count in turns.items() if count]
    others = []
    for other in view.others.values():
        if other.status != ACTIVE:
            others.append(f"{other.seat} {other.status}")
            continue
        where = f" {way_text(rules, view.place, other.place)}" if other.place else ""
        others.append(f"{other.seat} ({other.energy:g}){where}{', ' + other.health if other.health else ''}")
    return [
        f"Store: {pieces_text(view.store)}. Ship {view.ship_percent:g}%: {', '.join(built) or 'nothing'}.",
        f"Sailors (energy): {'; '.join(others)}.",
    ]


def _turns_text(turns: int, needed: int) -> str:
    return "finished" if turns >= needed else f"{turns}/{needed}"


def _message_lines(view: Observation) -> list[str]:
    lines = [f"Sailor {giver} offers you {food}." for giver, food in view.offers]
    for message in view.messages:
        sender = "" if message.sender == 0 else "you" if message.sender == view.seat else f"sailor {message.sender}"
        receiver = "you" if message.to == view.seat else f"sailor {message.to}"
        to = "" if 0 in (message.to, message.sender) else f" to {receiver}"
        lines.append(f"Day {message.day}, turn {message.turn}: {sender}{to}{': ' if sender else ''}{message.text}")
    if view.evidence:
        lines.append("Evidence: " + "; ".join(f"day {entry.day}, {entry.text}" for entry in view.evidence) + ".")
    if view.suspicion:
        lines.append(
            "Suspicion: " + ", ".join(f"{seat}: {score}" for seat, score in sorted(view.suspicion.items())) + "."
        )
    if view.votes:
        lines.append("Votes: " + ", ".join(f"{voter} for {seat}" for voter, seat in sorted(view.votes.items())) + ".")
    return lines
