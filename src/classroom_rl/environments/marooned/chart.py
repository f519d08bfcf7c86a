"""What a scripted player remembers of the island, and how it finds its way."""

from classroom_rl.environments.marooned.actions import Action, action_of
from classroom_rl.environments.marooned.observation import Observation
from classroom_rl.environments.marooned.rules import Rules
from classroom_rl.environments.marooned.things import Place, in_sight


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
