"""The state of a game: sailors, island, store, ship, messages and evidence."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from classroom_rl.environments.marooned.rules import Place, Rules, in_sight, is_foggy, make_piles

ISLAND = 0
"""The sender of notices from the game itself."""


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        kind: the kind of event; rewards are paid by kind.
        seat: the sailor who did it or to whom it happened.
        what: the thing, part, direction or text that it is about.
        amount: pieces, turns, energy or percent, depending on the kind.
        others: the other sailors who took part.
    """

    kind: str
    seat: int
    what: str = ""
    amount: float = 0.0
    others: tuple[int, ...] = ()


class Said(NamedTuple):
    """A message to all (`to` is 0) or to one sailor. A `sender` of 0 (`ISLAND`) marks a notice from the game."""

    day: int
    turn: int
    sender: int
    to: int
    text: str


class Evidence(NamedTuple):
    """Evidence against a sailor (`suspect`). `score` is what it adds to the suspicion."""

    day: int
    turn: int
    suspect: int
    score: int
    text: str


class Offer(NamedTuple):
    """Food on offer. It is in nobody's pack until it is taken or refused."""

    giver: int
    taker: int
    food: str
    poisoned: bool


@dataclass(slots=True)
class Sailor:
    """One sailor.

    Attributes:
        pack: pieces by kind.
        hidden: the pieces of the pack that no search finds, by kind.
        unpaid: pieces taken from the store, by kind; bringing them back earns nothing.
        poison_nights: nights since the poisoned meal; None if not poisoned.
        frames_left: the false traces that the sailor can still leave.
        fault: why the sailor's last action failed; empty if it did not.
    """

    seat: int
    role: str
    place: Place
    energy: float
    pack: dict[str, int] = field(default_factory=dict)
    hidden: dict[str, int] = field(default_factory=dict)
    unpaid: dict[str, int] = field(default_factory=dict)
    poison_nights: int | None = None
    fed: bool = False
    alive: bool = True
    removed: bool = False
    frames_left: int = 0
    fault: str = ""

    @property
    def active(self) -> bool:
        """Whether the sailor still acts: alive, and not removed by a vote."""
        return self.alive and not self.removed


@dataclass(slots=True)
class State:
    """Everything that changes in a game.

    Attributes:
        seat: whose turn it is; None when the game is over.
        outcome: None until the game is over.
        turns_built: the building turns of each started part.
        most_built: the highest value of `turns_built` so far; only turns above it are rewarded.
        used_up: the pieces that were consumed or lost, by kind.
        building: the seats that build each part in this round.
        meals: pairs (giver, taker) of today's shared meals.
        votes: today's votes, from voter to suspect.
        inbox: the last messages to and from each seat.
        log: (day, turn, event) of all logged events.
    """

    rules: Rules
    seed: int
    sailors: dict[int, Sailor]
    piles: dict[Place, dict[str, int]]
    foggy: bool
    day: int = 1
    turn: int = 1
    seat: int | None = 1
    outcome: str | None = None
    store: dict[str, int] = field(default_factory=dict)
    turns_built: dict[str, int] = field(default_factory=dict)
    most_built: dict[str, int] = field(default_factory=dict)
    used_up: dict[str, int] = field(default_factory=dict)
    milestones: int = 0
    building: dict[str, tuple[int, ...]] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    meals: tuple[tuple[int, int], ...] = ()
    votes: dict[int, int] = field(default_factory=dict)
    inbox: dict[int, tuple[Said, ...]] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    suspicion: dict[int, int] = field(default_factory=dict)
    log: list[tuple[int, int, Event]] = field(default_factory=list)

    @property
    def active(self) -> list[Sailor]:
        """The sailors who still act."""
        return [sailor for sailor in self.sailors.values() if sailor.active]

    def finished(self, part: str) -> bool:
        """Whether a part of the ship is built."""
        return self.turns_built.get(part, 0) >= self.rules.build_turns

    def ship_percent(self) -> float:
        """How much of the ship is built, in percent."""
        part = self.rules.part
        return sum(part[name].share * turns for name, turns in self.turns_built.items()) / self.rules.build_turns

    def load(self, seat: int) -> int:
        """The number of pieces in a sailor's pack, including those on offer."""
        on_offer = sum(1 + offer.poisoned for offer in self.offers if offer.giver == seat)
        return sum(self.sailors[seat].pack.values()) + on_offer

    def sees(self, sailor: Sailor, place: Place) -> bool:
        """Whether a sailor sees a place."""
        return in_sight(sailor.place, place, self.rules.sight(sailor.place.level, self.foggy))

    def tell(self, sender: int, to: int, text: str) -> None:
        """Add a message to the inboxes of all, or of its receiver and its sender."""
        message = Said(self.day, self.turn, sender, to, text)
        for seat in self.sailors if to == 0 else {to, sender} - {ISLAND}:
            self.inbox[seat] = (*self.inbox.get(seat, ()), message)[-self.rules.messages_kept :]

    def accuse(self, suspect: int, score: int, text: str) -> None:
        """Add public evidence, and its score to the suspicion of the suspect."""
        evidence = (*self.evidence, Evidence(self.day, self.turn, suspect, score, text))
        self.evidence = evidence[-self.rules.evidence_kept :]
        self.suspicion[suspect] = min(self.rules.suspicion.most, self.suspicion.get(suspect, 0) + score)


class Played(Protocol):
    """The part of a game that observations and legality checks need."""

    rules: Rules
    state: State


def new_state(rules: Rules, seed: int, roles: dict[int, str]) -> State:
    """The state on the first morning: everybody is at the base, with full energy and an empty pack."""
    sailors = {
        seat: Sailor(seat, role, rules.base, rules.energy.full, frames_left=rules.traitor.frames)
        for seat, role in roles.items()
    }
    return State(rules, seed, sailors, make_piles(rules, seed), is_foggy(rules, seed, 1))
