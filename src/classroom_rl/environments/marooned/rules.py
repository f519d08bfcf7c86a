"""The rules: every number of the game, and a check that the island has enough material for its ship."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import NamedTuple

from classroom_rl.errors import ConfigError

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
    """The number of steps between two places on the same level; None if they are on different levels."""
    return abs(one[1] - other[1]) + abs(one[2] - other[2]) if one[0] == other[0] else None


def in_sight(one: Place, other: Place, sight: int) -> bool:
    """Whether one place can be seen from the other, with a view of `sight` cells in every direction."""
    return one[0] == other[0] and abs(one[1] - other[1]) <= sight and abs(one[2] - other[2]) <= sight


def add(pile: dict[str, int], kind: str, number: int) -> None:
    """Add pieces to a pile, or take some away if `number` is negative. A kind without pieces is removed from the pile.

    Raises:
        ValueError: if more pieces are taken than there are.
    """
    remaining = pile.get(kind, 0) + number
    if remaining < 0:
        raise ValueError(f"{-number} {kind} were taken from a pile of {remaining - number}")
    if remaining:
        pile[kind] = remaining
    else:
        pile.pop(kind, None)


class RulesError(ConfigError, ValueError):
    """Rules that cannot be played."""


@dataclass(frozen=True)
class Level:
    """One level of the island, with its size in cells. `sight` is how many cells far a sailor sees without fog."""

    name: str
    width: int
    height: int
    sight: int


@dataclass(frozen=True)
class Stairs:
    """Stairs between two levels: UP leads from `lower` to `upper`, DOWN back."""

    upper: Place
    lower: Place


@dataclass(frozen=True)
class Vein:
    """The piles of one kind on a level: `piles` piles of `pieces` pieces each."""

    kind: str
    level: int
    piles: int
    pieces: int


@dataclass(frozen=True)
class Phase:
    """A part of the day, up to and including turn `last`. The actions in `closed` are not possible in it."""

    name: str
    last: int
    closed: frozenset[str]


@dataclass(frozen=True)
class Part:
    """A part of the ship: its share in percent, its material, and the part that must be finished before it."""

    name: str
    share: int
    material: Mapping[str, int]
    after: str | None = None


@dataclass(frozen=True)
class Energy:
    """The energy of sailors. `costs` is by action; other actions cost nothing. `food` is the energy gained by eating.
    At the end of a day, a sailor who ate on that day gains `fed`, and one who did not loses `unfed`."""

    full: float = 100
    fed: float = 10
    unfed: float = 20
    costs: Mapping[str, float] = field(
        default_factory=lambda: {"MOVE": 1, "UP": 3, "DOWN": 1, "GATHER": 5, "BUILD": 3, "SEARCH": 1, "SABOTAGE": 3}
    )
    food: Mapping[str, float] = field(default_factory=lambda: {"APPLE": 15, "BERRY": 10, "MUSHROOM": 8})


@dataclass(frozen=True)
class Poison:
    """Nights from a poisoned meal to each stage, and the last night after which an antidote still helps."""

    symptoms: int = 1
    severe: int = 2
    death: int = 3
    antidote_until: int = 2


@dataclass(frozen=True)
class Traitor:
    """The traitor's abilities: a factor on its energy costs, how many pieces it can hide, how many false traces it can
    leave, and the building turns that one sabotage undoes."""

    cost_factor: float = 0.8
    hidden_items: int = 2
    frames: int = 1
    sabotage_turns: int = 2


@dataclass(frozen=True)
class Suspicion:
    """How much each kind of evidence adds to a sailor's suspicion, which is at most `most`. A sabotage that nobody saw
    leaves a trace with probability `trace_chance`; FRAME leaves a false trace that looks the same."""

    witness: int = 60
    trace: int = 25
    trace_chance: float = 0.5
    tablet: int = 60
    meal: int = 30
    most: int = 100


@dataclass(frozen=True)
class RewardTable:
    """The rewards. `gather` and `deposit` are per piece, `progress` is per percent of the ship, and `milestones` are
    pairs of a percentage of the ship and its reward. The last four are the traitor's."""

    turn: float = -0.01
    failed: float = -0.1
    gather: float = 0.1
    deposit: float = 0.2
    build: float = 0.5
    progress: float = 1.0
    milestones: tuple[tuple[int, float], ...] = ((25, 5.0), (50, 10.0), (75, 15.0))
    escape: float = 100.0
    death: float = -50.0
    right_vote: float = 5.0
    wrong_vote: float = -5.0
    sabotage: float = 2.0
    poisoning: float = 10.0
    removed: float = -100.0
    prevented: float = 100.0

    def scaled(self, scale: float) -> dict[str, float | tuple[tuple[int, float], ...]]:
        """The rewards multiplied by `scale`, by name, as they are used in training."""
        scaled = {name: value * scale for name, value in vars(self).items() if name != "milestones"}
        return {**scaled, "milestones": tuple((percent, value * scale) for percent, value in self.milestones)}


@dataclass(frozen=True)
class Rules:
    """All rules of one game.

    Attributes:
        phases: the phases of a day; the last one ends with the day.
        energy_shown: others see a sailor's energy rounded to multiples of this.
        reach: how many steps away a sailor can be to be given something or searched.
        builders: how many sailors must build in the same turn.
        build_turns: the building turns of each part.
        least_votes: the fewest votes that remove a sailor.
        messages_kept, evidence_kept: how many of the last ones a sailor sees.
        reward_scale: a factor that brings an episode's return to the order of 1.
        room: how many times the ship's material the island must hold.
    """

    name: str
    levels: tuple[Level, ...]
    base: Place
    veins: tuple[Vein, ...]
    phases: tuple[Phase, ...]
    days: int
    parts: tuple[Part, ...]
    stairs: tuple[Stairs, ...] = ()
    sailors: int = 5
    fog_sight: int = 2
    fog_chance: float = 0.2
    energy_shown: int = 10
    reach: int = 1
    pack: int = 20
    gather_limit: int = 5
    builders: int = 2
    build_turns: int = 5
    least_votes: int = 2
    messages_kept: int = 8
    evidence_kept: int = 6
    energy: Energy = Energy()
    poison: Poison = Poison()
    traitor: Traitor = Traitor()
    suspicion: Suspicion = Suspicion()
    rewards: RewardTable = RewardTable()
    reward_scale: float = 0.005
    room: float = 1.5

    @property
    def turns(self) -> int:
        """Turns of a day."""
        return self.phases[-1].last

    @property
    def seats(self) -> range:
        """The sailors' numbers, from 1."""
        return range(1, self.sailors + 1)

    @cached_property
    def part(self) -> dict[str, Part]:
        """The parts by name, in building order."""
        return {part.name: part for part in self.parts}

    @cached_property
    def needed(self) -> dict[str, int]:
        """The material of the whole ship, by kind."""
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update(part.material)
        return dict(total)

    @cached_property
    def lying_about(self) -> dict[str, int]:
        """The pieces on the island at the start of a game, by kind."""
        total: Counter[str] = Counter()
        for vein in self.veins:
            total[vein.kind] += vein.piles * vein.pieces
        return dict(total)

    @cached_property
    def _phase_of_turn(self) -> tuple[Phase, ...]:
        return tuple(next(phase for phase in self.phases if turn <= phase.last) for turn in range(1, self.turns + 1))

    def phase(self, turn: int) -> Phase:
        """The phase of a turn, counted from 1."""
        return self._phase_of_turn[turn - 1]

    @cached_property
    def _last_turns(self) -> dict[str, int]:
        closed = {name for phase in self.phases for name in phase.closed}
        return {
            name: max((phase.last for phase in self.phases if name not in phase.closed), default=0) for name in closed
        }

    def last_turn(self, name: str) -> int:
        """The last turn of a day in which an action is possible; 0 if it never is."""
        return self._last_turns.get(name, self.turns)

    @cached_property
    def costs(self) -> dict[str, dict[str, float]]:
        """Energy costs by role and action, for the actions that cost energy."""
        factors = {COLONIST: 1.0, TRAITOR: self.traitor.cost_factor}
        costs = self.energy.costs.items()
        return {role: {name: round(cost * factor, 1) for name, cost in costs} for role, factor in factors.items()}

    def cost(self, role: str, name: str) -> float:
        """The energy that an action takes from a sailor of a role."""
        return self.costs[role].get(name, 0.0)

    def shown_energy(self, energy: float) -> int:
        """A sailor's energy as the others see it: rounded, so that it does not reveal the traitor's lower costs."""
        return round(energy / self.energy_shown) * self.energy_shown

    def sight(self, level: int, foggy: bool) -> int:
        """How many cells far a sailor sees on a level."""
        clear = self.levels[level].sight
        return min(clear, self.fog_sight) if foggy else clear

    def neighbour(self, place: Place, direction: str) -> Place | None:
        """The next cell in a direction; None beyond the edge of the level."""
        east, south = DIRECTIONS[direction]
        level, x, y = place[0], place[1] + east, place[2] + south
        size = self.levels[level]
        return Place(level, x, y) if 0 <= x < size.width and 0 <= y < size.height else None

    @cached_property
    def _ways(self) -> dict[tuple[str, Place], Place]:
        ups = {("UP", stairs.lower): stairs.upper for stairs in self.stairs}
        return ups | {("DOWN", stairs.upper): stairs.lower for stairs in self.stairs}

    def way(self, place: Place, name: str) -> Place | None:
        """Where UP or DOWN leads from a place; None if there are no such stairs."""
        return self._ways.get((name, place))

    def check(self) -> None:
        """Check that the rules can be played.

        Raises:
            RulesError: if the island has too little material for the ship, or if the rules contradict each other. The
                message gives the numbers.
        """
        self._check_island()
        self._check_ship()
        last_turns = [phase.last for phase in self.phases]
        if last_turns != sorted(set(last_turns)) or last_turns[0] < 1:
            raise RulesError(f"{self.name}: the phases must end at growing turns: {last_turns}")
        if self.reach > min(self.fog_sight, *(level.sight for level in self.levels)):
            raise RulesError(f"{self.name}: a sailor in reach ({self.reach}) must be in sight, in fog too")

    def _check_island(self) -> None:
        cells = [level.width * level.height - 1 for level in self.levels]
        stairs_ends = [end for stairs in self.stairs for end in (stairs.upper, stairs.lower)]
        for place in (self.base, *stairs_ends):
            level = self.levels[place.level] if 0 <= place.level < len(self.levels) else None
            if level is None or not (0 <= place.x < level.width and 0 <= place.y < level.height):
                raise RulesError(f"{self.name}: {tuple(place)} is not on the island")
            cells[place.level] -= 1
        for vein in self.veins:
            if vein.kind not in THINGS:
                raise RulesError(f"{self.name}: nothing is called {vein.kind}; there are {', '.join(THINGS)}")
            cells[vein.level] -= vein.piles
        if min(cells) < 0:
            raise RulesError(f"{self.name}: a level has more piles than cells; spread fewer piles, or enlarge it")
        reachable = {self.base.level} | {end.level for end in stairs_ends}
        unreachable = {vein.level for vein in self.veins} - reachable
        if unreachable:
            names = ", ".join(self.levels[level].name for level in unreachable)
            raise RulesError(f"{self.name}: no stairs lead to {names}")

    def _check_ship(self) -> None:
        for kind, number in self.needed.items():
            available = self.lying_about.get(kind, 0)
            if available < self.room * number:
                raise RulesError(
                    f"{self.name}: the ship needs {number} {kind}, and the island holds {available}. It must hold "
                    f"{self.room:g} times what the ship needs: add piles, or ask for less"
                )
        shares = sum(part.share for part in self.parts)
        if shares != 100:
            raise RulesError(f"{self.name}: the shares of the parts add up to {shares}, not 100")
        earlier_parts: set[str] = set()
        for part in self.parts:
            if (
                part.name not in PARTS
                or part.name in earlier_parts
                or (part.after is not None and part.after not in earlier_parts)
            ):
                raise RulesError(f"{self.name}: {part.name} must be one of {PARTS}, once, and after {part.after}")
            earlier_parts.add(part.name)
        unknown_foods = {kind for kind in self.energy.food if kind not in FOODS}
        if unknown_foods or not 1 <= self.builders < self.sailors:
            raise RulesError(
                f"{self.name}: {self.builders} builders of {self.sailors} sailors; unknown foods: {unknown_foods}"
            )


def make_piles(rules: Rules, seed: int) -> dict[Place, dict[str, int]]:
    """The piles of an island, by place and kind. No two piles share a cell; base and stairs are free."""
    rng = Random(f"{seed}:island")
    occupied = {rules.base, *(end for stairs in rules.stairs for end in (stairs.upper, stairs.lower))}
    piles: dict[Place, dict[str, int]] = {}
    for level, size in enumerate(rules.levels):
        cells = [Place(level, x, y) for y in range(size.height) for x in range(size.width)]
        cells = [cell for cell in cells if cell not in occupied]
        rng.shuffle(cells)
        for vein in rules.veins:
            if vein.level == level:
                piles |= {cells.pop(): {vein.kind: vein.pieces} for _ in range(vein.piles)}
    return piles


def is_foggy(rules: Rules, seed: int, day: int) -> bool:
    """Whether a day of this seed is foggy."""
    return Random(f"{seed}:fog:{day}").random() < rules.fog_chance
