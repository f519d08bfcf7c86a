"""Which actions are possible now, and why an action is not.

Faults are determined from the sailor's own observation, so their reasons reveal nothing that the sailor must not know.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from classroom_rl.environments.marooned.actions import ACTIONS, SAMPLE_TEXT, WAIT, Action, action_of
from classroom_rl.environments.marooned.observation import ACTIVE, Observation, observe
from classroom_rl.environments.marooned.rules import (
    ANTIDOTE,
    DIRECTIONS,
    STORABLE,
    TABLET,
    Rules,
    in_sight,
    steps_between,
)
from classroom_rl.environments.marooned.state import Played

IMPOSSIBLE = "impossible"
ENERGY = "energy"


@dataclass(frozen=True)
class Fault:
    """Why an action is not possible now. `category` is `impossible` or `energy`."""

    category: str
    text: str


Check = Callable[[Observation, Rules, tuple], str | None]
"""Returns why an action with these arguments is not possible, or None if it is."""


def fault_of(game: Played, seat: int, action: Action) -> Fault | None:
    """Why a sailor cannot do an action now; None if it is possible. Whose turn it is does not matter."""
    return fault_in(observe(game, seat), game.rules, action)


def possible_actions(game: Played, seat: int) -> list[Action]:
    """All actions that are possible for a sailor now, those with free text with one sample text. Empty for a sailor who
    acts no more."""
    return possible_in(observe(game, seat), game.rules)


def fault_in(view: Observation, rules: Rules, action: Action) -> Fault | None:
    """The same as `fault_of`, from the sailor's observation."""
    if not view.active:
        return Fault(IMPOSSIBLE, "you act no more")
    if action.name in rules.phase(view.turn).closed:
        return Fault(IMPOSSIBLE, f"{action.name} is not possible in the phase {view.phase}")
    role = ACTIONS[action.name].role
    if role is not None and view.role != role:
        return Fault(IMPOSSIBLE, f"a {view.role} cannot {action.name}")
    check = _CHECKS.get(action.name)
    reason = check(view, rules, action.args) if check else None
    if reason is not None:
        return Fault(IMPOSSIBLE, reason)
    cost = rules.cost(view.role, action.name)
    if cost > view.energy:
        return Fault(ENERGY, f"{action.name} takes {cost:g} energy, and you have {view.energy:g}")
    return None


def possible_in(view: Observation, rules: Rules) -> list[Action]:
    """The same as `possible_actions`, from the sailor's observation."""
    return [action for action in _candidates(view, rules) if fault_in(view, rules, action) is None]


def _candidates(view: Observation, rules: Rules) -> Iterator[Action]:
    """Yields a superset of the possible actions, with all arguments that may be possible."""
    yield WAIT
    yield from (action_of("MOVE", direction) for direction in DIRECTIONS)
    yield from (action_of("UP"), action_of("DOWN"))
    free = rules.pack - view.load
    for name, pieces, limit in (
        ("GATHER", view.here, min(free, rules.gather_limit)),
        ("DEPOSIT", view.pack, rules.pack),
        ("WITHDRAW", view.store, free),
    ):
        for kind, available in pieces.items():
            if name == "GATHER" or kind in STORABLE:
                yield from (action_of(name, kind, number) for number in range(1, min(available, limit, 99) + 1))
    yield from (action_of(name, part) for name in ("BUILD", "SABOTAGE") for part in rules.part)
    foods = [kind for kind in view.pack if kind in rules.energy.food]
    yield from (action_of("EAT", food) for food in foods)
    yield from (action_of("HIDE", kind) for kind in view.pack)
    yield action_of("ANTIDOTE", view.seat)
    yield action_of("SPEAK", SAMPLE_TEXT)
    for seat in view.others:
        yield from (action_of(name, food, seat) for name in ("OFFER", "POISON") for food in foods)
        yield from (action_of(name, seat) for name in ("TAKE", "REFUSE", "ANTIDOTE", "SHOW", "SEARCH", "FRAME", "VOTE"))
        yield action_of("WHISPER", seat, SAMPLE_TEXT)


def _move(view: Observation, rules: Rules, args: tuple) -> str | None:
    return None if rules.neighbour(view.place, args[0]) else f"the island ends to the {args[0]}"


def _stairs(name: str) -> Check:
    def climb(view: Observation, rules: Rules, args: tuple) -> str | None:
        return None if rules.way(view.place, name) else f"no stairs lead {name} from here"

    return climb


def _gather(view: Observation, rules: Rules, args: tuple) -> str | None:
    kind, number = args
    available = view.here.get(kind, 0)
    if number > available:
        return f"{available} {kind} lie here" if available else f"no {kind} lies here"
    if number > rules.gather_limit:
        return f"at most {rules.gather_limit} pieces can be gathered at a time"
    return _pack_is_full(view, rules, number)


def _pack_is_full(view: Observation, rules: Rules, number: int) -> str | None:
    free = rules.pack - view.load
    return f"the pack has room for {free} more" if number > free else None


def _not_at_base(view: Observation, rules: Rules) -> str | None:
    return None if view.place == rules.base else "you are not at the base"


def _deposit(view: Observation, rules: Rules, args: tuple) -> str | None:
    kind, number = args
    return _not_at_base(view, rules) or (
        _not_in_pack(view, kind, number) if kind in STORABLE else f"the store takes no {kind}"
    )


def _not_in_pack(view: Observation, kind: str, number: int = 1) -> str | None:
    available = view.pack.get(kind, 0)
    return f"your pack holds {available} {kind}" if available < number else None


def _withdraw(view: Observation, rules: Rules, args: tuple) -> str | None:
    kind, number = args
    stored = view.store.get(kind, 0)
    if number > stored and view.place == rules.base:
        return f"the store holds {stored} {kind}"
    return _not_at_base(view, rules) or _pack_is_full(view, rules, number)


def _build(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _not_at_base(view, rules) or why_not_build(view, rules, args[0])


def why_not_build(view: Observation, rules: Rules, name: str) -> str | None:
    """Why nobody can build a part now; None if its predecessor is finished and its material is in the store."""
    part = rules.part.get(name)
    if part is None:
        return f"the ship has no {name}"
    turns = view.turns_built.get(name, 0)
    if turns >= rules.build_turns:
        return f"the {name} is finished"
    if part.after is not None and view.turns_built.get(part.after, 0) < rules.build_turns:
        return f"the {part.after} comes before the {name}"
    lacking = {kind: number - view.store.get(kind, 0) for kind, number in part.material.items()}
    lacking = {kind: number for kind, number in lacking.items() if number > 0}
    if lacking and not turns:  # a part takes all its material with its first building turn
        return "the store lacks " + ", ".join(f"{number} {kind}" for kind, number in lacking.items())
    return None


def _eat(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _not_in_pack(view, args[0])


def _offer(view: Observation, rules: Rules, args: tuple) -> str | None:
    food, seat = args
    if seat in view.offered_to:
        return f"your last offer to {seat} is still open"
    return _not_in_pack(view, food) or _out_of_reach(view, rules, seat)


def _poison(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _not_in_pack(view, TABLET) or _offer(view, rules, args)


def _unknown(view: Observation, seat: int) -> str | None:
    if seat == view.seat:
        return "that is you"
    other = view.others.get(seat)
    if other is None:
        return f"there is no sailor {seat}"
    return None if other.status == ACTIVE else f"{seat} is {other.status}"


def _out_of_reach(view: Observation, rules: Rules, seat: int) -> str | None:
    reason = _unknown(view, seat)
    if reason is not None:
        return reason
    place = view.others[seat].place
    steps = None if place is None else steps_between(view.place, place)
    return None if steps is not None and steps <= rules.reach else f"{seat} is not near you"


def _refuse(view: Observation, rules: Rules, args: tuple) -> str | None:
    return None if any(giver == args[0] for giver, _ in view.offers) else f"{args[0]} offers you nothing"


def _take(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _refuse(view, rules, args) or _out_of_reach(view, rules, args[0])


def _antidote(view: Observation, rules: Rules, args: tuple) -> str | None:
    missing = _not_in_pack(view, ANTIDOTE)
    return missing if missing or args[0] == view.seat else _out_of_reach(view, rules, args[0])


def _show(view: Observation, rules: Rules, args: tuple) -> str | None:
    reason = _unknown(view, args[0])
    if reason is not None:
        return reason
    place = view.others[args[0]].place
    return None if place and in_sight(view.place, place, view.sight) else f"{args[0]} is not in sight"


def _search(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _out_of_reach(view, rules, args[0])


def _sabotage(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _not_at_base(view, rules) or (None if view.turns_built.get(args[0]) else f"no {args[0]} has been built yet")


def _hide(view: Observation, rules: Rules, args: tuple) -> str | None:
    if sum(view.hidden.values()) >= rules.traitor.hidden_items:
        return f"you hide {rules.traitor.hidden_items} pieces already"
    return _not_in_pack(view, args[0], view.hidden.get(args[0], 0) + 1)


def _frame(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _unknown(view, args[0]) if view.frames_left else "you have framed somebody already"


def _other_sailor(view: Observation, rules: Rules, args: tuple) -> str | None:
    return _unknown(view, args[0])


_CHECKS: dict[str, Check] = {
    **{"MOVE": _move, "UP": _stairs("UP"), "DOWN": _stairs("DOWN"), "GATHER": _gather, "DEPOSIT": _deposit},
    **{"WITHDRAW": _withdraw, "BUILD": _build, "EAT": _eat, "OFFER": _offer, "TAKE": _take, "REFUSE": _refuse},
    **{"POISON": _poison, "ANTIDOTE": _antidote, "SHOW": _show, "SEARCH": _search, "SABOTAGE": _sabotage},
    **{"HIDE": _hide, "FRAME": _frame, "WHISPER": _other_sailor, "VOTE": _other_sailor},
}
