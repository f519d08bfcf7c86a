"""A good scripted colonist: gathers what the ship lacks, stores it, builds with others, eats, and votes on evidence."""

from collections.abc import Callable
from random import Random

from classroom_rl.environments.marooned.actions import WAIT, Action, action_of
from classroom_rl.environments.marooned.legality import fault_in, why_not_build
from classroom_rl.environments.marooned.observation import ACTIVE, Observation
from classroom_rl.environments.marooned.rules import ANTIDOTE, MATERIALS, TABLET, Place, Rules, in_sight, steps_between


def way_to(rules: Rules, place: Place, target: Place) -> tuple[float, Action] | None:
    """The energy that the way to a target costs a colonist, and the first action on it. None if there is no way, or if
    the colonist is already there."""
    first_action, cost = None, 0.0
    while place != target:
        if place.level == target.level:
            return cost + _move_cost(rules, place, target), first_action or _step(place, target)
        up = target.level < place.level
        stairs = next(
            (stairs for stairs in rules.stairs if (stairs.lower if up else stairs.upper).level == place.level), None
        )
        if stairs is None:
            return None
        near_end, far_end, name = (stairs.lower, stairs.upper, "UP") if up else (stairs.upper, stairs.lower, "DOWN")
        first_action = first_action or (action_of(name) if place == near_end else _step(place, near_end))
        cost += _move_cost(rules, place, near_end) + rules.energy.costs.get(name, 0)
        place = far_end
    return (cost, first_action) if first_action else None


def _move_cost(rules: Rules, place: Place, target: Place) -> float:
    return (abs(place.x - target.x) + abs(place.y - target.y)) * rules.energy.costs.get("MOVE", 0)


def _step(place: Place, target: Place) -> Action:
    """The first step to a target on the same level, along the longer leg."""
    east, south = target.x - place.x, target.y - place.y
    if abs(east) >= abs(south):
        return action_of("MOVE", "EAST" if east > 0 else "WEST")
    return action_of("MOVE", "SOUTH" if south > 0 else "NORTH")


class Chart:
    """A player's map: the piles as they were last seen, and the viewpoints that were not visited yet."""

    def __init__(self) -> None:
        self.piles: dict[Place, dict[str, int]] = {}
        self.unseen: set[Place] | None = None

    def look(self, view: Observation, rules: Rules) -> None:
        """Update the map with what is in sight now."""
        if self.unseen is None:  # a grid of viewpoints from which the whole island can be seen
            self.unseen = {
                Place(level, x, y)
                for level, size in enumerate(rules.levels)
                for x in range(size.sight // 2, size.width, size.sight)
                for y in range(size.sight // 2, size.height, size.sight)
            }
        self.unseen = {place for place in self.unseen if not in_sight(view.place, place, view.sight // 2)}
        gone = [place for place in self.piles if place not in view.piles and in_sight(view.place, place, view.sight)]
        for place in gone:
            del self.piles[place]
        self.piles |= view.piles


Plan = Callable[[Observation, Rules], Action | None]
SUSPECT_FROM = 50
"""From this suspicion on, a sailor is voted against."""
TRUST_BELOW = 25
"""Food is accepted only from sailors below this suspicion."""


def needed(view: Observation, rules: Rules) -> dict[str, int]:
    """The material of the parts that are not started yet, by kind."""
    need: dict[str, int] = {}
    for part in rules.parts:
        if part.name not in view.turns_built:
            for kind, number in part.material.items():
                need[kind] = need.get(kind, 0) + number
    return need


def lacking(view: Observation, rules: Rules) -> dict[str, int]:
    """The material of the parts that are not started yet and that is not in the store, by kind."""
    store, need = view.store, needed(view, rules)
    return {kind: number - store.get(kind, 0) for kind, number in need.items() if number > store.get(kind, 0)}


def in_sight_for_ship(view: Observation, rules: Rules) -> list[tuple[Place, str]]:
    """The piles in sight, except at the sailor's own place, with something that the ship lacks beyond the pack. Each is
    paired with that kind; the nearest comes first."""
    missing = {kind for kind, number in lacking(view, rules).items() if number > view.pack.get(kind, 0)}
    piles = []
    for place, pile in view.piles.items():
        kinds = sorted(missing & set(pile))
        steps = steps_between(view.place, place)
        if kinds and steps:
            piles.append((steps, place, kinds[0]))
    return [(place, kind) for _, place, kind in sorted(piles)]


def spare_food(view: Observation, rules: Rules) -> dict[str, int]:
    """Food in the store that the ship does not need, by kind."""
    need = needed(view, rules)
    spare = {kind: view.store.get(kind, 0) - need.get(kind, 0) for kind in rules.energy.food}
    return {kind: number for kind, number in spare.items() if number > 0}


def unhurried(rules: Rules) -> bool:
    """Whether days are long enough that spending a turn on a meal costs little."""
    return rules.turns > max(level.width + level.height for level in rules.levels)


def foods_in(view: Observation, rules: Rules) -> list[str]:
    """The kinds of food in the pack; those that the ship needs least come first."""
    need = rules.needed
    return sorted((kind for kind in view.pack if kind in rules.energy.food), key=lambda kind: (need.get(kind, 0), kind))


class Builder:
    """Tries its plans in order and does the first action that is possible.

    Attributes:
        chart: what it remembers of the island.
        day_out: the last day on which it chose to spend the night away from the base.
        plans: functions from an observation to an action, or to None if the plan does not apply.
    """

    def __init__(self) -> None:
        self.chart = Chart()
        self.day_out = 0
        self.plans: list[Plan] = [
            *(self.heal, self.answer, self.eat, self.vote, self.keep_stores, self.provide, self.build),
            *(self.forage, self.go_home, self.gather, self.set_out, self.explore),
        ]

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        """The action to do now; it is always possible."""
        self.chart.look(view, rules)
        for plan in self.plans:
            action = plan(view, rules)
            if action is not None and fault_in(view, rules, action) is None:
                return action
        return WAIT

    def heal(self, view: Observation, rules: Rules) -> Action | None:
        """Use an antidote on itself or on a sailor in reach; take one from the store first, if at the base."""
        sick = [view.seat] if view.health else []
        sick += [other.seat for other in view.others.values() if other.health]
        if sick and not view.pack.get(ANTIDOTE):
            return Action("WITHDRAW", (ANTIDOTE, 1)) if view.place == rules.base and view.store.get(ANTIDOTE) else None
        cures = (Action("ANTIDOTE", (seat,)) for seat in sick)
        return next((cure for cure in cures if fault_in(view, rules, cure) is None), None)

    def answer(self, view: Observation, rules: Rules) -> Action | None:
        """Accept food from trusted sailors if it has not eaten today; refuse it from suspects."""
        for giver, _ in view.offers:
            if view.suspicion.get(giver, 0) >= SUSPECT_FROM:
                return Action("REFUSE", (giver,))
            if view.suspicion.get(giver, 0) < TRUST_BELOW and not view.fed:
                return Action("TAKE", (giver,))
        return None

    def eat(self, view: Observation, rules: Rules) -> Action | None:
        """Eat once a day, at the latest in the last phase, and more often when tired."""
        foods = foods_in(view, rules)
        if not foods:
            return None
        working = "GATHER" not in rules.phase(view.turn).closed
        tired = view.energy <= (0.3 if working and not unhurried(rules) else 0.6) * rules.energy.full
        home = view.place == rules.base and view.turn > rules.last_turn("GATHER")
        due = not view.fed and (home or view.turn > rules.last_turn("MOVE"))
        return Action("EAT", (foods[0],)) if tired or due else None

    def vote(self, view: Observation, rules: Rules) -> Action | None:
        """Vote against the most suspected sailor, once."""
        suspects = [
            (score, -seat)
            for seat, score in view.suspicion.items()
            if score >= SUSPECT_FROM and seat in view.others and view.others[seat].status == ACTIVE
        ]
        # Seats are negated, so that among equal scores the lowest seat is the maximum.
        if not suspects or view.votes.get(view.seat) == -max(suspects)[1]:
            return None
        return Action("VOTE", (-max(suspects)[1],))

    def rations(self, rules: Rules) -> int:
        """How many pieces of food to keep in the pack."""
        return 2 + rules.pack // 10

    def keep_stores(self, view: Observation, rules: Rules) -> Action | None:
        """At the base, store all material, and the food that the ship needs, except for one piece."""
        if view.place != rules.base:
            return None
        for kind in MATERIALS:
            if view.pack.get(kind):
                return Action("DEPOSIT", (kind, view.pack[kind]))
        foods, need = foods_in(view, rules), lacking(view, rules)
        spare = sum(view.pack[kind] for kind in foods) - 1
        for kind in foods:
            number = min(spare, view.pack[kind], need.get(kind, 0))
            if number > 0:
                return Action("DEPOSIT", (kind, number))
        return None

    def forage(self, view: Observation, rules: Rules) -> Action | None:
        """Gather the nearest food when there is none in the pack and some is needed."""
        is_provided = view.fed or (view.day == 1 and not unhurried(rules))
        if foods_in(view, rules) or (is_provided and view.energy > 0.6 * rules.energy.full):
            return None
        if any(kind in rules.energy.food for kind in view.here):
            return self._gather_here(view, rules, dict.fromkeys(rules.energy.food, rules.gather_limit))
        return self._nearest(view, rules, dict.fromkeys(rules.energy.food, 0.0))

    def provide(self, view: Observation, rules: Rules) -> Action | None:
        """At the base, take a meal from the store when there is no food in the pack."""
        if view.place != rules.base or foods_in(view, rules) or (view.fed and view.energy > 0.6 * rules.energy.full):
            return None
        spare = spare_food(view, rules)
        if view.energy <= rules.energy.unfed:
            # Close to death, it also takes food that the ship needs.
            spare = spare or {kind: number for kind, number in view.store.items() if kind in rules.energy.food}
        kind = max(spare, key=lambda kind: (spare[kind], kind), default=None)
        return Action("WITHDRAW", (kind, 1)) if kind else None

    def build(self, view: Observation, rules: Rules) -> Action | None:
        """Build together with the sailors at the base. If they are enough, they work on several parts at once."""
        parts = [part for part in rules.part if why_not_build(view, rules, part) is None]
        present = [(rules.shown_energy(view.energy), -view.seat)]
        for other in view.others.values():
            if other.place == rules.base and view.suspicion.get(other.seat, 0) < SUSPECT_FROM:
                present.append((other.energy, -other.seat))
        if view.place != rules.base or not parts or len(present) < rules.builders:
            return None
        # The crew and the ranks follow from what all of them see, so that they agree without talking.
        groups = min(len(parts), max(1, len(present) // rules.builders))
        crew = sorted(-seat for _, seat in sorted(present, reverse=True)[: groups * (rules.builders + 1)])
        if view.seat not in crew:
            return None
        rank = (crew.index(view.seat) + view.turn) % len(crew)
        return Action("BUILD", (parts[rank * groups // len(crew)],))

    def wanted(self, view: Observation, rules: Rules) -> dict[str, int]:
        """What to gather now in addition to the pack, by kind."""
        want = {kind: number - view.pack.get(kind, 0) for kind, number in lacking(view, rules).items()}
        missing_food = self.rations(rules) - sum(view.pack.get(kind, 0) for kind in rules.energy.food)
        for kind in rules.energy.food:
            want[kind] = max(want.get(kind, 0), missing_food)
        if view.health or any(other.health for other in view.others.values()):
            want[ANTIDOTE] = 1 - view.pack.get(ANTIDOTE, 0)
        return {kind: number for kind, number in want.items() if number > 0}

    def go_home(self, view: Observation, rules: Rules) -> Action | None:
        """Go to the base for the night, with a full pack, when tired, or when the ship lacks nothing more."""
        way = way_to(rules, view.place, rules.base)
        if way is None:
            return None
        cost, first_action = way
        turns_left = rules.last_turn("MOVE") - view.turn + 1
        late = (turns_left < cost + 2 and self.day_out != view.day) or view.turn > rules.last_turn("GATHER")
        full = view.load >= rules.pack
        tired = view.energy < cost + rules.energy.unfed and not foods_in(view, rules)
        carries = any(view.pack.get(kind) for kind in rules.needed)
        missing = lacking(view, rules)
        done = all(number <= view.pack.get(kind, 0) for kind, number in missing.items()) and (carries or not missing)
        return first_action if late or full or tired or done else None

    def gather(self, view: Observation, rules: Rules) -> Action | None:
        """Pick up what is wanted at the sailor's place."""
        return self._gather_here(view, rules, self.wanted(view, rules))

    def _gather_here(self, view: Observation, rules: Rules, want: dict[str, int]) -> Action | None:
        """Pick up as much as possible at once, more than wanted if there is more: it saves a second trip."""
        free = min(rules.gather_limit, rules.pack - view.load)
        kinds = [kind for kind in view.here if want.get(kind)]
        return Action("GATHER", (kinds[0], min(view.here[kinds[0]], free))) if kinds and free > 0 else None

    def set_out(self, view: Observation, rules: Rules) -> Action | None:
        """Go to a wanted pile nearby; the seat's own kind is preferred."""
        own_kind, sight = self._own_kind(view, rules), rules.levels[view.place.level].sight
        kinds = self.wanted(view, rules).keys()
        kinds = kinds if unhurried(rules) else kinds & lacking(view, rules).keys()
        return self._nearest(view, rules, {kind: sight * (kind != own_kind) for kind in kinds})

    def _nearest(self, view: Observation, rules: Rules, kinds: dict[str, float]) -> Action | None:
        """The first action on the way to the nearest known pile with one of the kinds; None without one.

        Args:
            kinds: by kind, a handicap in steps that is added to the distance.

        Piles from which nobody can return today come last. A pile to which another sailor is nearer counts as further
        away.
        """
        best: tuple[bool, float, Place, Action] | None = None
        for place, pile in self.chart.piles.items():
            handicap = min((kinds[kind] for kind in pile if kind in kinds), default=None)
            way = way_to(rules, view.place, place) if handicap is not None else None
            if handicap is None or way is None or way[0] > view.energy - rules.energy.costs.get("GATHER", 0):
                continue
            score = way[0] + handicap + (view.sight if self._is_claimed(view, place, way[0]) else 0)
            candidate = (not self._can_return(view, rules, place, way[0]), score, place, way[1])
            if best is None or candidate[:3] < best[:3]:
                best = candidate
        if best is None or (best[0] and not self._may_stay_out(view, rules)):
            return None
        if best[0]:
            self.day_out = view.day
        return best[3]

    def _is_claimed(self, view: Observation, place: Place, steps: float) -> bool:
        """Whether a sailor in sight is nearer to a place."""
        for other in view.others.values():
            if other.place is not None and other.place.level == place.level:
                their_steps = abs(other.place.x - place.x) + abs(other.place.y - place.y)
                if (their_steps, other.seat) < (steps, view.seat):
                    return True
        return False

    def _may_stay_out(self, view: Observation, rules: Rules) -> bool:
        """Whether to go so far that it cannot return today: early enough, and not tired."""
        return view.day > 1 and view.turn < rules.last_turn("GATHER") and view.energy > 2 * rules.energy.unfed

    def _own_kind(self, view: Observation, rules: Rules) -> str | None:
        """The kind that this seat looks for first. It depends on the seat, so that not all go for the same."""
        missing = lacking(view, rules)
        parts = [part for part in rules.parts if part.name not in view.turns_built]
        kinds = [kind for part in parts for kind in part.material if kind in missing]
        return kinds[(view.seat - 1) % len(kinds)] if kinds else None

    def _can_return(self, view: Observation, rules: Rules, target: Place, cost: float) -> bool:
        """Whether energy and turns suffice for the way to the target, for gathering, and for the way home."""
        way_home = way_to(rules, target, rules.base)
        round_trip = cost + (way_home[0] if way_home else 0)
        in_time = round_trip + 1 <= rules.last_turn("MOVE") - view.turn + 1 and self._opens_in_time(view, rules, cost)
        return in_time and round_trip + rules.energy.costs.get("GATHER", 0) <= view.energy

    def _opens_in_time(self, view: Observation, rules: Rules, steps: float) -> bool:
        """Whether gathering is still possible on arrival."""
        return view.turn + steps <= rules.last_turn("GATHER")

    def explore(self, view: Observation, rules: Rules) -> Action | None:
        """Go to a viewpoint that was not visited yet, on a level where something missing can be."""
        wanted_kinds = lacking(view, rules) or dict.fromkeys(rules.energy.food, 1)
        known_kinds = {kind for pile in self.chart.piles.values() for kind in pile}
        missing = set(wanted_kinds) - known_kinds or set(wanted_kinds)
        levels = {vein.level for vein in rules.veins if vein.kind in missing and vein.kind != TABLET}
        best: tuple[float, Place, Action] | None = None
        for index, place in enumerate(sorted(self.chart.unseen or ())):
            way = way_to(rules, view.place, place) if place.level in levels else None
            if way is not None and self._can_return(view, rules, place, way[0]):
                score = way[0] + (0 if index % rules.sailors == view.seat - 1 else view.sight)
                if best is None or (score, place) < best[:2]:
                    best = (score, place, way[1])
        return best[2] if best else None
