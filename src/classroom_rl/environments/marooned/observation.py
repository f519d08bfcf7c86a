"""What one sailor may know. Everything that a player, a prompt or a fault is made from comes from here."""

from dataclasses import dataclass
from typing import NamedTuple

from classroom_rl.environments.marooned.rules import TABLET, TRAITOR, Place, Rules, in_sight
from classroom_rl.environments.marooned.state import Evidence, Played, Said, Sailor, State

ACTIVE, REMOVED, DIED = "active", "removed", "dead"


class Other(NamedTuple):
    """Another sailor as all see it. `place` is None unless the observer sees it; `health` is empty without symptoms."""

    seat: int
    status: str
    energy: int
    health: str
    place: Place | None


@dataclass(frozen=True)
class Observation:
    """What a sailor knows now. `piles` is what lies in sight, `offers` holds (giver, food) offered to the sailor, and
    `offered_to` whom the sailor's own offers wait for; `load` counts the pack and those. `last_fault` says why the
    sailor's last action failed, and is empty if it did not."""

    seat: int
    role: str
    active: bool
    day: int
    turn: int
    phase: str
    foggy: bool
    sight: int
    place: Place
    energy: float
    health: str
    fed: bool
    pack: dict[str, int]
    hidden: dict[str, int]
    load: int
    frames_left: int
    others: dict[int, Other]
    piles: dict[Place, dict[str, int]]
    store: dict[str, int]
    turns_built: dict[str, int]
    ship_percent: float
    messages: tuple[Said, ...]
    evidence: tuple[Evidence, ...]
    suspicion: dict[int, int]
    votes: dict[int, int]
    offers: tuple[tuple[int, str], ...]
    offered_to: tuple[int, ...]
    last_fault: str

    @property
    def here(self) -> dict[str, int]:
        """What lies where the sailor stands."""
        return self.piles.get(self.place, {})


def observe(game: Played, seat: int) -> Observation:
    """What the sailor of a seat knows now.

    Raises:
        KeyError: if no sailor has the seat.
    """
    return observe_state(game.state, seat)


def observe_state(state: State, seat: int) -> Observation:
    """What the sailor of a seat knows in a state."""
    rules, me = state.rules, state.sailors[seat]
    sight = rules.sight(me.place.level, state.foggy)
    return Observation(
        seat=seat,
        role=me.role,
        active=me.active and state.outcome is None,
        day=state.day,
        turn=state.turn,
        phase=rules.phase(state.turn).name,
        foggy=state.foggy,
        sight=sight,
        place=me.place,
        energy=me.energy,
        health=_health(me, rules),
        fed=me.fed,
        pack=me.pack.copy(),
        hidden=me.hidden.copy(),
        load=state.load(seat),
        frames_left=me.frames_left if me.role == TRAITOR else 0,
        others={each.seat: _other(state, me, each, sight) for each in state.sailors.values() if each is not me},
        piles=_piles(state, me, sight),
        store=state.store.copy(),
        turns_built=state.turns_built.copy(),
        ship_percent=state.ship_percent(),
        messages=state.inbox.get(seat, ()),
        evidence=state.evidence,
        suspicion=state.suspicion.copy(),
        votes=state.votes.copy(),
        offers=tuple((offer.giver, offer.food) for offer in state.offers if offer.taker == seat),
        offered_to=tuple(offer.taker for offer in state.offers if offer.giver == seat),
        last_fault=me.fault,
    )


def _piles(state: State, me: Sailor, sight: int) -> dict[Place, dict[str, int]]:
    """What lies in sight. Only the traitor knows poison tablets when they lie there."""
    level, x, y = me.place
    found = {}
    for place, pile in state.piles.items():
        if place[0] == level and abs(place[1] - x) <= sight and abs(place[2] - y) <= sight:
            shown = pile.copy()
            if me.role != TRAITOR:
                shown.pop(TABLET, None)
            if shown:
                found[place] = shown
    return found


def _other(state: State, me: Sailor, sailor: Sailor, sight: int) -> Other:
    if not sailor.active:
        return Other(sailor.seat, REMOVED if sailor.alive else DIED, 0, "", None)
    seen = me.role == TRAITOR or in_sight(me.place, sailor.place, sight)
    energy = state.rules.shown_energy(sailor.energy)
    return Other(sailor.seat, ACTIVE, energy, _health(sailor, state.rules), sailor.place if seen else None)


def _health(sailor: Sailor, rules: Rules) -> str:
    """The visible symptoms; a poison that shows none yet is known to nobody."""
    nights = sailor.poison_nights or 0
    if nights >= rules.poison.severe:
        return "severe symptoms"
    return "symptoms" if nights >= rules.poison.symptoms else ""
