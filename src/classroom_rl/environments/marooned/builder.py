"""The good colonist: gathers what the ship lacks, stores it, meets others to build, eats, votes on evidence."""

from collections.abc import Callable
from random import Random

from classroom_rl.environments.marooned.actions import WAIT, Action, action_of
from classroom_rl.environments.marooned.legality import fault_in, why_not_build
from classroom_rl.environments.marooned.observation import ACTIVE, Observation
from classroom_rl.environments.marooned.rules import ANTIDOTE, MATERIALS, TABLET, Place, Rules, in_sight, steps_between


def way_to(rules: Rules, place: Place, target: Place) -> tuple[float, Action] | None:
    """The energy of the way to a target for a colonist, and the first action on it; None if no way leads there, or if
    this is the target."""
    first, cost = None, 0.0
    while place != target:
        if place.level == target.level:
            return cost + _steps(rules, place, target), first or _step(place, target)
        up = target.level < place.level
        stairs = next((s for s in rules.stairs if (s.lower if up else s.upper).level == place.level), None)
        if stairs is None:
            return None
        foot, head, name = (stairs.lower, stairs.upper, "UP") if up else (stairs.upper, stairs.lower, "DOWN")
        first = first or (action_of(name) if place == foot else _step(place, foot))
        cost += _steps(rules, place, foot) + rules.energy.costs.get(name, 0)
        place = head
    return (cost, first) if first else None


def _steps(rules: Rules, place: Place, target: Place) -> float:
    return (abs(place.x - target.x) + abs(place.y - target.y)) * rules.energy.costs.get("MOVE", 0)


def _step(place: Place, target: Place) -> Action:
    """One step on the same level, along the longer side first."""
    east, south = target.x - place.x, target.y - place.y
    if abs(east) >= abs(south):
        return action_of("MOVE", "EAST" if east > 0 else "WEST")
    return action_of("MOVE", "SOUTH" if south > 0 else "NORTH")


class Chart:
    """Piles as they were last seen, and the places from which nothing was looked at yet."""

    def __init__(self) -> None:
        self.piles: dict[Place, dict[str, int]] = {}
        self.unseen: set[Place] | None = None

    def look(self, view: Observation, rules: Rules) -> None:
        """Keep what is in sight now."""
        if self.unseen is None:
            self.unseen = {
                Place(level, x, y)
                for level, size in enumerate(rules.levels)
                for x in range(size.sight // 2, size.width, size.sight)
                for y in range(size.sight // 2, size.height, size.sight)
            }
        self.unseen = {place for place in self.unseen if not in_sight(view.place, place, view.sight // 2)}
        gone = [p for p in self.piles if p not in view.piles and in_sight(view.place, p, view.sight)]
        for place in gone:
            del self.piles[place]
        self.piles |= view.piles


Plan = Callable[[Observation, Rules], Action | None]
SUSPECT_FROM = 50
"""The suspicion from which a sailor is voted against."""
TRUST_BELOW = 25
"""The suspicion from which nothing is taken from a sailor."""


def needed(view: Observation, rules: Rules) -> dict[str, int]:
    """What the parts that are not begun need, by kind."""
    need: dict[str, int] = {}
    for part in rules.parts:
        if part.name not in view.turns_built:
            for kind, number in part.material.items():
                need[kind] = need.get(kind, 0) + number
    return need


def lacking(view: Observation, rules: Rules) -> dict[str, int]:
    """What the parts that are not begun still need beyond the store, by kind."""
    store = view.store
    return {kind: n - store.get(kind, 0) for kind, n in needed(view, rules).items() if n > store.get(kind, 0)}


def in_sight_for_ship(view: Observation, rules: Rules) -> list[tuple[Place, str]]:
    """The piles in sight elsewhere on the level that hold what the ship lacks beyond the own pack, each with that kind;
    the nearest first."""
    missing = {kind for kind, number in lacking(view, rules).items() if number > view.pack.get(kind, 0)}
    found = []
    for place, pile in view.piles.items():
        kinds = sorted(missing & set(pile))
        steps = steps_between(view.place, place)
        if kinds and steps:
            found.append((steps, place, kinds[0]))
    return [(place, kind) for _, place, kind in sorted(found)]


def spare_food(view: Observation, rules: Rules) -> dict[str, int]:
    """Food of the store that the ship does not need."""
    need = needed(view, rules)
    spare = {kind: view.store.get(kind, 0) - need.get(kind, 0) for kind in rules.energy.food}
    return {kind: number for kind, number in spare.items() if number > 0}


def unhurried(rules: Rules) -> bool:
    """Whether days are so long that a turn for a meal costs little."""
    return rules.turns > max(level.width + level.height for level in rules.levels)


def foods_in(view: Observation, rules: Rules) -> list[str]:
    """Kinds of food in the pack, those first that the ship needs least."""
    need = rules.needed
    return sorted((kind for kind in view.pack if kind in rules.energy.food), key=lambda kind: (need.get(kind, 0), kind))


class Builder:
    """Tries its plans in order and does the first that is possible. `chart` is what it remembers of the island,
    `day_out` the last day on which it chose to sleep away from the base."""

    def __init__(self) -> None:
        self.chart = Chart()
        self.day_out = 0
        self.plans: list[Plan] = [
            *(self.heal, self.answer, self.eat, self.vote, self.keep_stores, self.provide, self.build),
            *(self.forage, self.go_home, self.gather, self.set_out, self.explore),
        ]

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        """What to do now; always possible."""
        self.chart.look(view, rules)
        for plan in self.plans:
            action = plan(view, rules)
            if action is not None and fault_in(view, rules, action) is None:
                return action
        return WAIT

    def heal(self, view: Observation, rules: Rules) -> Action | None:
        """Use an antidote on oneself or somebody near; fetch one from the store for oneself."""
        sick = [view.seat] if view.health else []
        sick += [other.seat for other in view.others.values() if other.health]
        if sick and not view.pack.get(ANTIDOTE):
            return Action("WITHDRAW", (ANTIDOTE, 1)) if view.place == rules.base and view.store.get(ANTIDOTE) else None
        cures = (Action("ANTIDOTE", (seat,)) for seat in sick)
        return next((cure for cure in cures if fault_in(view, rules, cure) is None), None)

    def answer(self, view: Observation, rules: Rules) -> Action | None:
        """Take food from those whom nothing speaks against, if none was eaten today; refuse it from the suspected."""
        for giver, _ in view.offers:
            if view.suspicion.get(giver, 0) >= SUSPECT_FROM:
                return Action("REFUSE", (giver,))
            if view.suspicion.get(giver, 0) < TRUST_BELOW and not view.fed:
                return Action("TAKE", (giver,))
        return None

    def eat(self, view: Observation, rules: Rules) -> Action | None:
        """Eat once a day, and more when tired; at the latest in the last phase."""
        foods = foods_in(view, rules)
        if not foods:
            return None
        working = "GATHER" not in rules.phase(view.turn).closed
        tired = view.energy <= (0.3 if working and not unhurried(rules) else 0.6) * rules.energy.full
        home = view.place == rules.base and view.turn > rules.last_turn("GATHER")
        due = not view.fed and (home or view.turn > rules.last_turn("MOVE"))
        return Action("EAT", (foods[0],)) if tired or due else None

    def vote(self, view: Observation, rules: Rules) -> Action | None:
        """Vote against the most suspected, once."""
        suspects = [
            (score, -seat)
            for seat, score in view.suspicion.items()
            if score >= SUSPECT_FROM and seat in view.others and view.others[seat].status == ACTIVE
        ]
        if not suspects or view.votes.get(view.seat) == -max(suspects)[1]:
            return None
        return Action("VOTE", (-max(suspects)[1],))

    def rations(self, rules: Rules) -> int:
        """Pieces of food that stay in the pack."""
        return 2 + rules.pack // 10

    def keep_stores(self, view: Observation, rules: Rules) -> Action | None:
        """Bring all material to the store, and the food beyond the rations."""
        if view.place != rules.base:
            return None
        for kind in MATERIALS:
            if view.pack.get(kind):
                return Action("DEPOSIT", (kind, view.pack[kind]))
        foods, need = foods_in(view, rules), lacking(view, rules)
        spare = sum(view.pack[kind] for kind in foods) - 1
        for kind in foods:
            given = min(spare, view.pack[kind], need.get(kind, 0))
            if given > 0:
                return Action("DEPOSIT", (kind, given))
        return None

    def forage(self, view: Observation, rules: Rules) -> Action | None:
        """Go to the nearest food when there is none in the pack and some is needed."""
        provided = view.fed or (view.day == 1 and not unhurried(rules))
        if foods_in(view, rules) or (provided and view.energy > 0.6 * rules.energy.full):
            return None
        if any(kind in rules.energy.food for kind in view.here):
            return self._gather_here(view, rules, dict.fromkeys(rules.energy.food, rules.gather_limit))
        return self._nearest(view, rules, dict.fromkeys(rules.energy.food, 0.0))

    def provide(self, view: Observation, rules: Rules) -> Action | None:
        """Take a meal from the store when there is none in the pack."""
        if view.place != rules.base or foods_in(view, rules) or (view.fed and view.energy > 0.6 * rules.energy.full):
            return None
        spare = spare_food(view, rules)
        if view.energy <= rules.energy.unfed:
            spare = spare or {kind: n for kind, n in view.store.items() if kind in rules.energy.food}
        kind = max(spare, key=lambda each: (spare[each], each), default=None)
        return Action("WITHDRAW", (kind, 1)) if kind else None

    def build(self, view: Observation, rules: Rules) -> Action | None:
        """Build with those who are at the base. If enough are there, they share the work on two parts."""
        parts = [part for part in rules.part if why_not_build(view, rules, part) is None]
        present = [(rules.shown_energy(view.energy), -view.seat)]
        for other in view.others.values():
            if other.place == rules.base and view.suspicion.get(other.seat, 0) < SUSPECT_FROM:
                present.append((other.energy, -other.seat))
        if view.place != rules.base or not parts or len(present) < rules.builders:
            return None
        groups = min(len(parts), max(1, len(present) // rules.builders))
        crew = sorted(-seat for _, seat in sorted(present, reverse=True)[: groups * (rules.builders + 1)])
        if view.seat not in crew:
            return None
        rank = (crew.index(view.seat) + view.turn) % len(crew)
        return Action("BUILD", (parts[rank * groups // len(crew)],))

    def wanted(self, view: Observation, rules: Rules) -> dict[str, int]:
        """What to gather now, by kind, beyond what is in the pack."""
        want = {kind: number - view.pack.get(kind, 0) for kind, number in lacking(view, rules).items()}
        hungry = self.rations(rules) - sum(view.pack.get(kind, 0) for kind in rules.energy.food)
        for kind in rules.energy.food:
            want[kind] = max(want.get(kind, 0), hungry)
        if view.health or any(other.health for other in view.others.values()):
            want[ANTIDOTE] = 1 - view.pack.get(ANTIDOTE, 0)
        return {kind: number for kind, number in want.items() if number > 0}

    def go_home(self, view: Observation, rules: Rules) -> Action | None:
        """Go to the base for the night, with a full pack, when tired, or when nothing is lacking."""
        way = way_to(rules, view.place, rules.base)
        if way is None:
            return None
        cost, first = way
        left = rules.last_turn("MOVE") - view.turn + 1
        late = (left < cost + 2 and self.day_out != view.day) or view.turn > rules.last_turn("GATHER")
        full = view.load >= rules.pack
        tired = view.energy < cost + rules.energy.unfed and not foods_in(view, rules)
        carried = any(view.pack.get(kind) for kind in rules.needed)
        lacks = lacking(view, rules)
        done = all(number <= view.pack.get(kind, 0) for kind, number in lacks.items()) and (carried or not lacks)
        return first if late or full or tired or done else None

    def gather(self, view: Observation, rules: Rules) -> Action | None:
        """Pick up what is wanted here."""
        return self._gather_here(view, rules, self.wanted(view, rules))

    def _gather_here(self, view: Observation, rules: Rules, want: dict[str, int]) -> Action | None:
        """As much as can be picked up at a time: the rest of a pile is not worth a second way."""
        free = min(rules.gather_limit, rules.pack - view.load)
        kinds = [kind for kind in view.here if want.get(kind)]
        return Action("GATHER", (kinds[0], min(view.here[kinds[0]], free))) if kinds and free > 0 else None

    def set_out(self, view: Observation, rules: Rules) -> Action | None:
        """Go to a pile that is near and wanted, the seat's own kind before others."""
        own, sight = self._own_kind(view, rules), rules.levels[view.place.level].sight
        kinds = self.wanted(view, rules).keys()
        kinds = kinds if unhurried(rules) else kinds & lacking(view, rules).keys()
        return self._nearest(view, rules, {kind: sight * (kind != own) for kind in kinds})

    def _nearest(self, view: Observation, rules: Rules, kinds: dict[str, float]) -> Action | None:
        """The way to the nearest pile that holds one of the kinds, each with what it counts in steps besides. Piles
        that are too far for today come last, and those that another sailor is nearer to count as further away."""
        best: tuple[bool, float, Place, Action] | None = None
        for place, pile in self.chart.piles.items():
            extra = min((kinds[kind] for kind in pile if kind in kinds), default=None)
            way = way_to(rules, view.place, place) if extra is not None else None
            if extra is None or way is None or way[0] > view.energy - rules.energy.costs.get("GATHER", 0):
                continue
            score = way[0] + extra + (view.sight if self._is_claimed(view, place, way[0]) else 0)
            ranked = (not self._can_return(view, rules, place, way[0]), score, place, way[1])
            if best is None or ranked[:3] < best[:3]:
                best = ranked
        if best is None or (best[0] and not self._may_stay_out(view, rules)):
            return None
        if best[0]:
            self.day_out = view.day
        return best[3]

    def _is_claimed(self, view: Observation, place: Place, steps: float) -> bool:
        """Whether a sailor in sight is nearer to a place."""
        for other in view.others.values():
            if other.place is not None and other.place.level == place.level:
                theirs = abs(other.place.x - place.x) + abs(other.place.y - place.y)
                if (theirs, other.seat) < (steps, view.seat):
                    return True
        return False

    def _may_stay_out(self, view: Observation, rules: Rules) -> bool:
        """Whether to go where nobody can return from today: early enough, and not tired."""
        return view.day > 1 and view.turn < rules.last_turn("GATHER") and view.energy > 2 * rules.energy.unfed

    def _own_kind(self, view: Observation, rules: Rules) -> str | None:
        """What this seat looks for first, so that not all go for the same."""
        lacks = lacking(view, rules)
        parts = [part for part in rules.parts if part.name not in view.turns_built]
        kinds = [kind for part in parts for kind in part.material if kind in lacks]
        return kinds[(view.seat - 1) % len(kinds)] if kinds else None

    def _can_return(self, view: Observation, rules: Rules, target: Place, there: float) -> bool:
        """Whether energy and turns are left for the way there, for gathering, and for the way home."""
        home = way_to(rules, target, rules.base)
        way = there + (home[0] if home else 0)
        in_time = way + 1 <= rules.last_turn("MOVE") - view.turn + 1 and self._opens_in_time(view, rules, there)
        return in_time and way + rules.energy.costs.get("GATHER", 0) <= view.energy

    def _opens_in_time(self, view: Observation, rules: Rules, there: float) -> bool:
        """Whether gathering is still possible on arrival."""
        return view.turn + there <= rules.last_turn("GATHER")

    def explore(self, view: Observation, rules: Rules) -> Action | None:
        """Go where nothing was seen yet, on a level on which something lacking can lie."""
        want = lacking(view, rules) or dict.fromkeys(rules.energy.food, 1)
        known = {kind for pile in self.chart.piles.values() for kind in pile}
        missing = set(want) - known or set(want)
        levels = {vein.level for vein in rules.veins if vein.kind in missing and vein.kind != TABLET}
        best: tuple[float, Place, Action] | None = None
        for number, place in enumerate(sorted(self.chart.unseen or ())):
            way = way_to(rules, view.place, place) if place.level in levels else None
            if way is not None and self._can_return(view, rules, place, way[0]):
                score = way[0] + (0 if number % rules.sailors == view.seat - 1 else view.sight)
                if best is None or (score, place) < best[:2]:
                    best = (score, place, way[1])
        return best[2] if best else None
