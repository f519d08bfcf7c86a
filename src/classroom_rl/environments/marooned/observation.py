"""What one sailor may know. Players, prompts and faults use only this, so they cannot leak hidden information."""

from dataclasses import dataclass
from typing import NamedTuple

from classroom_rl.environments.marooned.rules import TABLET, TRAITOR, Place, Rules, in_sight
from classroom_rl.environments.marooned.state import Evidence, Played, Said, Sailor, State

ACTIVE, REMOVED, DIED = "active", "removed", "dead"


class Other(NamedTuple):
    """Another sailor as the observer sees it. `energy` is rounded. `health` is empty without symptoms. `place` is None
    if the observer does not see the sailor."""

    seat: int
    status: str
    energy: int
    health: str
    place: Place | None


@dataclass(frozen=True)
class Observation:
    """What a sailor knows now.

    Attributes:
        seat, role, place, pack: the sailor's own.
        active: whether the sailor still acts.
        sight: how far the sailor sees now.
        energy: own energy, exactly.
        health: own symptoms; poison without symptoms is known to nobody.
        fed: whether the sailor ate today.
        hidden: own hidden pieces (traitor).
        load: pieces in the pack and on offer.
        frames_left: false traces left (traitor).
        others: of each other: status, energy in steps, symptoms; the place if in sight, the traitor sees all places.
        piles: what lies in sight; poison tablets are shown to the traitor alone.
        store: the store, from everywhere.
        turns_built: the building turns of each part.
        messages: the last messages to all, and those to or from the sailor; what a search or a shown pack told.
        evidence: the last evidence, the same for all.
        suspicion: everybody's suspicion score, the same for all.
        votes: today's votes, the same for all.
        offers: food offered to the sailor, and by whom; not whether it is poisoned.
        offered_to: whom the sailor's own offers wait for.
        last_fault: why the sailor's last action failed.
    """

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
        """The pile at the sailor's place."""
        return self.piles.get(self.place, {})


def observe(game: Played, seat: int) -> Observation:
    """What the sailor of a seat knows now.

    Raises:
        KeyError: if there is no such seat.
    """
    rules, state, me = game.rules, game.state, game.state.sailors[seat]
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
        others={sailor.seat: _other(state, me, sailor, sight) for sailor in state.sailors.values() if sailor is not me},
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
    """The piles in sight. Only the traitor sees poison tablets."""
    level, x, y = me.place
    piles = {}
    for place, pile in state.piles.items():
        if place[0] == level and abs(place[1] - x) <= sight and abs(place[2] - y) <= sight:
            visible = pile.copy()
            if me.role != TRAITOR:
                visible.pop(TABLET, None)
            if visible:
                piles[place] = visible
    return piles


def _other(state: State, me: Sailor, sailor: Sailor, sight: int) -> Other:
    if not sailor.active:
        return Other(sailor.seat, REMOVED if sailor.alive else DIED, 0, "", None)
    # The traitor always sees where the others are.
    is_visible = me.role == TRAITOR or in_sight(me.place, sailor.place, sight)
    energy = state.rules.shown_energy(sailor.energy)
    return Other(sailor.seat, ACTIVE, energy, _health(sailor, state.rules), sailor.place if is_visible else None)


def _health(sailor: Sailor, rules: Rules) -> str:
    """The visible symptoms. Poison without symptoms is known to nobody, not even to the poisoned sailor."""
    nights = sailor.poison_nights or 0
    if nights >= rules.poison.severe:
        return "severe symptoms"
    return "symptoms" if nights >= rules.poison.symptoms else ""
