"""Scripted players. Like a model, they see observations and never the game itself."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from classroom_rl.environments.marooned.actions import ACTIONS, SAMPLE_TEXT, WAIT, WORDS, Action
from classroom_rl.environments.marooned.builder import SUSPECT_FROM, Builder, foods_in, way_to
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_in, possible_in
from classroom_rl.environments.marooned.observation import ACTIVE, Observation, observe
from classroom_rl.environments.marooned.rules import STORABLE, TABLET, TRAITOR, Place, Rules, in_sight

OPEN_FROM = 50.0
"""From this percentage of the ship on, the scripted traitor sabotages openly."""


def witnesses(view: Observation, rules: Rules, place: Place) -> list[int]:
    """The seats of the sailors who see a place, as far as the observer knows."""
    return [
        other.seat
        for other in view.others.values()
        if other.place is not None and in_sight(other.place, place, rules.sight(other.place.level, view.foggy))
    ]


class Saboteur(Builder):
    """The scripted traitor. It does harm where it is safe, otherwise gathers like a colonist, and never helps to build.
    Once the ship is `OPEN_FROM` percent built, on the last day, or when it is suspected, it no longer hides."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        shared_plans = [
            plan for plan in self.plans if plan not in (self.build, self.vote, self.answer, self.keep_stores)
        ]
        self.plans = [
            *(self.sabotage, self.poison, self.hide, self.take_tablet, self.frame, self.blame),
            *shared_plans,
        ]

    def sabotage(self, view: Observation, rules: Rules) -> Action | None:
        """Sabotage the part with the largest share that has been started: unseen, or in the open when it is late."""
        is_suspected = view.suspicion.get(view.seat, 0) >= SUSPECT_FROM
        self.is_open |= is_suspected or view.ship_percent >= OPEN_FROM or view.day >= rules.days
        if not view.turns_built or (witnesses(view, rules, rules.base) and not self.is_open):
            return None
        if view.place != rules.base:
            way = way_to(rules, view.place, rules.base)
            return way[1] if way and (self.is_open or way[0] <= 2) else None
        part = max(view.turns_built, key=lambda name: (rules.part[name].share, name))
        return Action("SABOTAGE", (part,))

    def poison(self, view: Observation, rules: Rules) -> Action | None:
        """Offer poisoned food to a sailor in reach who shows no symptoms."""
        foods = foods_in(view, rules)
        if not foods or not view.pack.get(TABLET):
            return None
        offers = (Action("POISON", (foods[0], seat)) for seat, other in view.others.items() if not other.health)
        return next((offer for offer in offers if fault_in(view, rules, offer) is None), None)

    def hide(self, view: Observation, rules: Rules) -> Action | None:
        """Hide a tablet that is visible in the pack."""
        return Action("HIDE", (TABLET,)) if view.pack.get(TABLET, 0) > view.hidden.get(TABLET, 0) else None

    def take_tablet(self, view: Observation, rules: Rules) -> Action | None:
        """Pick up a tablet here, or go to the nearest known one, if a tablet can still be hidden."""
        if view.pack.get(TABLET, 0) >= rules.traitor.hidden_items:
            return None
        if view.here.get(TABLET):
            return Action("GATHER", (TABLET, 1))
        ways = [way_to(rules, view.place, place) for place, pile in self.chart.piles.items() if TABLET in pile]
        affordable = [way for way in ways if way is not None and way[0] + 2 * rules.energy.unfed <= view.energy]
        return min(affordable, key=lambda way: way[0])[1] if affordable else None

    def frame(self, view: Observation, rules: Rules) -> Action | None:
        """Leave a false trace to the most suspected colonist, once there is any evidence."""
        if not view.frames_left or not view.evidence:
            return None
        return Action("FRAME", (self._scapegoat(view),)) if self._scapegoat(view) else None

    def blame(self, view: Observation, rules: Rules) -> Action | None:
        """Vote against the most suspected colonist."""
        seat = self._scapegoat(view)
        if seat is None or view.votes.get(view.seat) == seat or not view.suspicion:
            return None
        return Action("VOTE", (seat,))

    def _scapegoat(self, view: Observation) -> int | None:
        seats = [seat for seat, other in view.others.items() if other.status == ACTIVE]
        return max(seats, key=lambda seat: (view.suspicion.get(seat, 0), -seat), default=None)


class Player(Protocol):
    """Plays one seat of one game. It may remember what it saw."""

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        """What to do now. An action that is not possible becomes WAIT."""
        ...


class Gatherer(Builder):
    """Gathers, stores and eats, and never builds or votes."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = [plan for plan in self.plans if plan not in (self.build, self.vote)]


class Waiter:
    """Waits."""

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        return WAIT


class RandomPlayer:
    """Draws any possible action; one action in ten is drawn from all actions, possible or not."""

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        return any_action(rng) if rng.random() < 0.1 else rng.choice(possible_in(view, rules))


def any_action(rng: Random) -> Action:
    """A random action of the grammar, possible or not, except that tablets are never stored or withdrawn."""
    form = rng.choice(list(ACTIONS.values()))
    words = {**WORDS, "thing": STORABLE} if form.name in ("DEPOSIT", "WITHDRAW") else WORDS
    generators: Mapping[str, Callable[[], str | int]] = {
        "number": lambda: rng.randint(1, 9),
        "sailor": lambda: rng.randint(1, 9),
        "text": lambda: SAMPLE_TEXT,
    }
    return Action(
        form.name, tuple(generators[kind]() if kind in generators else rng.choice(words[kind]) for kind in form.types)
    )


PLAYERS: dict[str, Callable[[], Player]] = {
    "builder": Builder,
    "gatherer": Gatherer,
    "waiter": Waiter,
    "traitor": Saboteur,
    "random": RandomPlayer,
}
"""The scripted players by name. Each call makes a new player, for one seat of one game."""


def cast(game: Game, colonists: str = "builder", traitor: str = "traitor") -> dict[int, Player]:
    """A new player for each seat: one kind for the colonists, another for the traitor."""
    return {seat: PLAYERS[traitor if role == TRAITOR else colonists]() for seat, role in game.roles.items()}


def play_others(game: Game, players: Mapping[int, Player], *seats: int) -> None:
    """Let the others play until a sailor of these seats has to decide, none of them acts any more, or the game is over.

    Equal games go on equally: a player's random draws depend only on the seed and the step.
    """
    while game.seat not in (None, *seats) and any(game.state.sailors[seat].active for seat in seats):
        rng = Random(f"{game.seed}|{game.steps}|others")
        game.step(players[game.seat].act(observe(game, game.seat), game.rules, rng))
