"""What happens when a round ends, and when a day ends: building, votes, hunger, poison, and how a game is decided."""

from collections import Counter

from classroom_rl.environments.marooned.effects import change_energy, return_offer
from classroom_rl.environments.marooned.island import is_foggy
from classroom_rl.environments.marooned.state import ISLAND, Event, Sailor, State
from classroom_rl.environments.marooned.things import COLONIST, DEAD, ESCAPED, STRANDED, TRAITOR, add


def end_round(state: State) -> list[Event]:
    """Build what enough sailors built together, pass on to the next turn or day, and decide the game if it is over."""
    events = _build_parts(state)
    if all(state.finished(part) for part in state.rules.part):
        return events + _decide(state, ESCAPED)
    if state.turn == state.rules.turns:
        events += end_day(state)
    else:
        state.turn += 1
    return events + _decide_if_lost(state)


def end_day(state: State) -> list[Event]:
    """Count the votes, then the night: offers go back, hunger, poison. Then the next day begins."""
    events = _count_votes(state)
    for offer in state.offers:
        return_offer(state, offer)
    for sailor in state.active:
        events += _night(state, sailor)
    state.meals = ()
    state.day, state.turn = state.day + 1, 1
    state.foggy = is_foggy(state.rules, state.seed, state.day)
    return events


def _build_parts(state: State) -> list[Event]:
    events = []
    for part, seats in state.building.items():
        material = state.rules.part[part].material
        started = part in state.turns_built
        stocked = started or all(state.store.get(kind, 0) >= number for kind, number in material.items())
        if len(seats) < state.rules.builders or not stocked or not can_follow(state, part):
            why = "alone" if len(seats) < state.rules.builders else "in vain"
            for seat in seats:
                state.tell(ISLAND, seat, f"You worked {why} on the {part}")
            continue
        if not started:
            for kind, number in material.items():
                add(state.store, kind, -number)
        state.turns_built[part] = state.turns_built.get(part, 0) + 1
        events += _paid_building(state, part, seats)
    state.building = {}
    return events + _milestones(state)


def can_follow(state: State, part: str) -> bool:
    """Whether what must be built before a part is finished."""
    after = state.rules.part[part].after
    return after is None or state.finished(after)


def _paid_building(state: State, part: str, seats: tuple[int, ...]) -> list[Event]:
    """The building turn, and the progress if the part was never as far before: rebuilding earns nothing."""
    turns = state.turns_built[part]
    if turns <= state.most_built.get(part, 0):
        return [Event("rebuilt", seats[0], part, others=seats[1:])]
    state.most_built[part] = turns
    percent = state.rules.part[part].share / state.rules.build_turns
    return [
        Event("built", seats[0], part, others=seats[1:]),
        Event("progress", seats[0], part, percent, seats[1:]),
    ]


def _milestones(state: State) -> list[Event]:
    events = []
    goals = state.rules.rewards.milestones
    while state.milestones < len(goals) and state.ship_percent() >= goals[state.milestones][0]:
        seats = tuple(sailor.seat for sailor in state.active)
        events.append(Event("milestone", seats[0], amount=goals[state.milestones][0], others=seats[1:]))
        state.milestones += 1
    return events


def _count_votes(state: State) -> list[Event]:
    """Remove the sailor with more votes than any other, if there are enough of them."""
    counts = Counter(state.votes[sailor.seat] for sailor in state.active if sailor.seat in state.votes)
    events = []
    ranked = counts.most_common(2)
    if ranked and ranked[0][1] >= state.rules.least_votes and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
        seat = ranked[0][0]
        if state.sailors[seat].active:
            voters = tuple(sorted(voter for voter, suspect in state.votes.items() if suspect == seat))
            _leave(state, state.sailors[seat])
            state.sailors[seat].removed = True
            state.tell(ISLAND, 0, f"{seat} is removed by vote")
            events.append(Event("removed", seat, others=voters))
    state.votes = {}
    return events


def _night(state: State, sailor: Sailor) -> list[Event]:
    energy, poison = state.rules.energy, state.rules.poison
    amount, reason = (energy.fed, "fed") if sailor.fed else (-energy.unfed, "unfed")
    events = [change_energy(state, sailor, amount, reason)]
    sailor.fed = False
    if sailor.poison_nights is not None:
        sailor.poison_nights += 1
        if sailor.poison_nights == poison.symptoms:
            _suspect_givers(state, sailor)
    poisoned = sailor.poison_nights is not None and sailor.poison_nights >= poison.death
    if sailor.energy <= 0 or poisoned:
        _leave(state, sailor)
        sailor.alive = False
        state.tell(ISLAND, 0, f"{sailor.seat} died of {'poison' if poisoned else 'exhaustion'}")
        events.append(Event("died", sailor.seat, "poison" if poisoned else "exhaustion"))
    return events


def _suspect_givers(state: State, sailor: Sailor) -> None:
    """Everybody of whom a sailor with first symptoms took food that day is suspected."""
    for giver in sorted({giver for giver, taker in state.meals if taker == sailor.seat}):
        text = f"{sailor.seat} is poisoned and took food from {giver}"
        state.accuse(giver, state.rules.suspicion.meal, text)


def _leave(state: State, sailor: Sailor) -> None:
    """What a sailor who acts no more carries stays where the sailor stands; offers to and from the sailor end."""
    for offer in state.offers:
        if sailor.seat in (offer.giver, offer.taker):
            return_offer(state, offer)
    if sailor.pack:
        pile = state.piles.setdefault(sailor.place, {})
        for kind, number in sailor.pack.items():
            add(pile, kind, number)
    sailor.pack, sailor.hidden = {}, {}


def _decide_if_lost(state: State) -> list[Event]:
    if not any(sailor.role == COLONIST for sailor in state.active):
        return _decide(state, DEAD)
    return _decide(state, STRANDED) if state.day > state.rules.days else []


def _decide(state: State, outcome: str) -> list[Event]:
    """End the game. Only who still acts wins: the colonists aboard, or a traitor at large without a finished ship."""
    state.outcome, state.seat = outcome, None
    kind, role = ("escaped", COLONIST) if outcome == ESCAPED else ("prevented", TRAITOR)
    return [Event(kind, sailor.seat) for sailor in state.active if sailor.role == role]
