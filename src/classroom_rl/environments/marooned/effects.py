"""What each action does to the state, and what happens at the end of a round or a day: building, votes, hunger, poison.
The caller has checked that an action is possible (`legality.py`).
"""

from collections import Counter
from collections.abc import Callable
from random import Random

from classroom_rl.environments.marooned.actions import Action
from classroom_rl.environments.marooned.rules import (
    ANTIDOTE,
    COLONIST,
    DEAD,
    ESCAPED,
    STRANDED,
    TABLET,
    TRAITOR,
    add,
    is_foggy,
)
from classroom_rl.environments.marooned.state import ISLAND, Event, Offer, Sailor, State

Effect = Callable[[State, Sailor, tuple], list[Event]]


def apply(state: State, sailor: Sailor, action: Action) -> list[Event]:
    """Take the energy of an action, then do it. Returns all events, including that of the energy."""
    events = []
    cost = state.rules.cost(sailor.role, action.name)
    if cost:
        events.append(change_energy(state, sailor, -cost, action.name))
    return events + _EFFECTS[action.name](state, sailor, action.args)


def change_energy(state: State, sailor: Sailor, amount: float, reason: str) -> Event:
    """Change a sailor's energy, clipped to [0, full]. Returns the event with the actual change."""
    before = sailor.energy
    sailor.energy = round(min(state.rules.energy.full, max(0.0, before + amount)), 1)
    return Event("energy", sailor.seat, reason, round(sailor.energy - before, 1))


def take_from_pack(sailor: Sailor, kind: str, number: int = 1) -> None:
    """Take pieces out of a pack, visible ones before hidden ones."""
    add(sailor.pack, kind, -number)
    surplus = sailor.hidden.get(kind, 0) - sailor.pack.get(kind, 0)
    if surplus > 0:
        add(sailor.hidden, kind, -surplus)


def eat(state: State, sailor: Sailor, food: str) -> list[Event]:
    """The effects of eating. The caller has removed the food from where it was."""
    sailor.fed = True
    add(state.used_up, food, 1)
    return [Event("ate", sailor.seat, food), change_energy(state, sailor, state.rules.energy.food[food], "EAT")]


def return_offer(state: State, offer: Offer) -> None:
    """Put offered food back into its giver's pack, and the tablet if it is poisoned."""
    state.offers = tuple(other for other in state.offers if other != offer)
    pack = state.sailors[offer.giver].pack
    add(pack, offer.food, 1)
    if offer.poisoned:
        add(pack, TABLET, 1)


def pack_text(sailor: Sailor) -> str:
    """The contents of a pack as others see them, without hidden pieces."""
    visible = {kind: number - sailor.hidden.get(kind, 0) for kind, number in sailor.pack.items()}
    return ", ".join(f"{number} {kind}" for kind, number in sorted(visible.items()) if number) or "nothing"


def _move(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    sailor.place = state.rules.neighbour(sailor.place, args[0]) or sailor.place
    return [Event("moved", sailor.seat, args[0])]


def _stairs(name: str) -> Effect:
    def climb(state: State, sailor: Sailor, args: tuple) -> list[Event]:
        sailor.place = state.rules.way(sailor.place, name) or sailor.place
        return [Event("moved", sailor.seat, name)]

    return climb


def _gather(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    kind, number = args
    pile = state.piles[sailor.place]
    add(pile, kind, -number)
    if not pile:
        del state.piles[sailor.place]
    add(sailor.pack, kind, number)
    return [Event("gathered", sailor.seat, kind, number)]


def _deposit(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    kind, number = args
    take_from_pack(sailor, kind, number)
    add(state.store, kind, number)
    # Pieces that came from the store earn nothing when they are brought back.
    unpaid = min(number, sailor.unpaid.get(kind, 0))
    add(sailor.unpaid, kind, -unpaid)
    return [Event("deposited", sailor.seat, kind, number - unpaid)]


def _withdraw(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    kind, number = args
    add(state.store, kind, -number)
    add(sailor.pack, kind, number)
    add(sailor.unpaid, kind, number)
    return [Event("withdrew", sailor.seat, kind, number)]


def _build(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    state.building[args[0]] = (*state.building.get(args[0], ()), sailor.seat)
    return []


def _eat(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    take_from_pack(sailor, args[0])
    add(sailor.unpaid, args[0], -min(1, sailor.unpaid.get(args[0], 0)))
    return eat(state, sailor, args[0])


def _offer(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    food, taker = args
    take_from_pack(sailor, food)
    state.offers = (*state.offers, Offer(sailor.seat, taker, food, False))
    return [Event("offered", sailor.seat, food, others=(taker,))]


def _poison(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    food, taker = args
    take_from_pack(sailor, food)
    take_from_pack(sailor, TABLET)
    state.offers = (*state.offers, Offer(sailor.seat, taker, food, True))
    return [Event("offered", sailor.seat, food, others=(taker,))]


def _offer_from(state: State, giver: int, taker: int) -> Offer:
    return next(offer for offer in state.offers if (offer.giver, offer.taker) == (giver, taker))


def _take(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    offer = _offer_from(state, args[0], sailor.seat)
    state.offers = tuple(other for other in state.offers if other != offer)
    state.meals = (*state.meals, (offer.giver, sailor.seat))
    events = eat(state, sailor, offer.food)
    if offer.poisoned:
        add(state.used_up, TABLET, 1)
        if sailor.poison_nights is None:  # a second tablet changes nothing and is not rewarded
            sailor.poison_nights = 0
            events.append(Event("poisoned", offer.giver, others=(sailor.seat,)))
    return events


def _refuse(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    return_offer(state, _offer_from(state, args[0], sailor.seat))
    return [Event("refused", sailor.seat, others=(args[0],))]


def _antidote(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    take_from_pack(sailor, ANTIDOTE)
    add(state.used_up, ANTIDOTE, 1)
    patient = state.sailors[args[0]]
    helps = patient.poison_nights is not None and patient.poison_nights <= state.rules.poison.antidote_until
    if helps:
        patient.poison_nights = None
    return [Event("cured" if helps else "antidote", sailor.seat, others=args)]


def _show(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    state.tell(ISLAND, args[0], f"{sailor.seat} shows you the pack: {pack_text(sailor)}")
    return [Event("showed", sailor.seat, others=args)]


def _search(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    searched = state.sailors[args[0]]
    state.tell(ISLAND, sailor.seat, f"In the pack of {searched.seat} you find: {pack_text(searched)}")
    state.tell(ISLAND, searched.seat, f"{sailor.seat} searches your pack")
    if searched.pack.get(TABLET, 0) > searched.hidden.get(TABLET, 0):
        text = f"{sailor.seat} found poison in the pack of {searched.seat}"
        state.accuse(searched.seat, state.rules.suspicion.tablet, text)
    return [Event("searched", sailor.seat, others=args)]


def _sabotage(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    """Undo building turns. If none is left, the part is lost together with its material."""
    part = args[0]
    undone_turns = min(state.rules.traitor.sabotage_turns, state.turns_built[part])
    state.turns_built[part] -= undone_turns
    if not state.turns_built[part]:
        del state.turns_built[part]
        for kind, number in state.rules.part[part].material.items():
            add(state.used_up, kind, number)
    rules = state.rules.suspicion
    witnesses = [other.seat for other in state.active if other is not sailor and state.sees(other, sailor.place)]
    if witnesses:
        state.accuse(sailor.seat, rules.witness, f"{witnesses[0]} saw {sailor.seat} damage the {part}")
    elif Random(f"{state.seed}:trace:{state.day}:{state.turn}").random() < rules.trace_chance:
        state.accuse(sailor.seat, rules.trace, _trace_text(sailor.seat))
    return [Event("sabotaged", sailor.seat, part, undone_turns)]


def _trace_text(seat: int) -> str:
    return f"a trace at the ship points to {seat}"


def _hide(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    add(sailor.hidden, args[0], 1)
    return [Event("hid", sailor.seat, args[0])]


def _frame(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    sailor.frames_left -= 1
    state.accuse(args[0], state.rules.suspicion.trace, _trace_text(args[0]))
    return [Event("framed", sailor.seat, others=args)]


def _speak(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    state.tell(sailor.seat, 0, args[0])
    return [Event("spoke", sailor.seat, args[0])]


def _whisper(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    state.tell(sailor.seat, args[0], args[1])
    return [Event("whispered", sailor.seat, args[1], others=args[:1])]


def _vote(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    state.votes[sailor.seat] = args[0]
    return [Event("voted", sailor.seat, others=args)]


def _wait(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    return []


_EFFECTS: dict[str, Effect] = {
    **{"MOVE": _move, "UP": _stairs("UP"), "DOWN": _stairs("DOWN"), "GATHER": _gather, "DEPOSIT": _deposit},
    **{"WITHDRAW": _withdraw, "BUILD": _build, "EAT": _eat, "OFFER": _offer, "TAKE": _take, "REFUSE": _refuse},
    **{"POISON": _poison, "ANTIDOTE": _antidote, "SHOW": _show, "SEARCH": _search, "SABOTAGE": _sabotage},
    **{"HIDE": _hide, "FRAME": _frame, "SPEAK": _speak, "WHISPER": _whisper, "VOTE": _vote, "WAIT": _wait},
}


def end_round(state: State) -> list[Event]:
    """End a round: build the parts on which enough sailors worked together, go on to the next turn or day, and end the
    game if it is decided."""
    events = _build_parts(state)
    if all(state.finished(part) for part in state.rules.part):
        return events + _decide(state, ESCAPED)
    if state.turn == state.rules.turns:
        events += end_day(state)
    else:
        state.turn += 1
    return events + _decide_if_lost(state)


def end_day(state: State) -> list[Event]:
    """End a day: count the votes, return open offers, apply hunger and poison, and begin the next day."""
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
        has_material = started or all(state.store.get(kind, 0) >= number for kind, number in material.items())
        if len(seats) < state.rules.builders or not has_material or not can_follow(state, part):
            reason = "alone" if len(seats) < state.rules.builders else "in vain"
            for seat in seats:
                state.tell(ISLAND, seat, f"You worked {reason} on the {part}")
            continue
        if not started:
            for kind, number in material.items():
                add(state.store, kind, -number)
        state.turns_built[part] = state.turns_built.get(part, 0) + 1
        events += _building_events(state, part, seats)
    state.building = {}
    return events + _milestones(state)


def can_follow(state: State, part: str) -> bool:
    """Whether the part that must be built before this one is finished."""
    after = state.rules.part[part].after
    return after is None or state.finished(after)


def _building_events(state: State, part: str, seats: tuple[int, ...]) -> list[Event]:
    """The events of a building turn. Only a new maximum of the part's turns is progress: rebuilding after a sabotage
    earns nothing."""
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
    milestones = state.rules.rewards.milestones
    while state.milestones < len(milestones) and state.ship_percent() >= milestones[state.milestones][0]:
        seats = tuple(sailor.seat for sailor in state.active)
        events.append(Event("milestone", seats[0], amount=milestones[state.milestones][0], others=seats[1:]))
        state.milestones += 1
    return events


def _count_votes(state: State) -> list[Event]:
    """Remove the sailor with strictly the most votes, if these reach the minimum."""
    counts = Counter(state.votes[sailor.seat] for sailor in state.active if sailor.seat in state.votes)
    events = []
    ranked = counts.most_common(2)
    if ranked and ranked[0][1] >= state.rules.least_votes and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
        seat = ranked[0][0]
        if state.sailors[seat].active:
            voters = tuple(sorted(voter for voter, suspect in state.votes.items() if suspect == seat))
            _drop_out(state, state.sailors[seat])
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
        _drop_out(state, sailor)
        sailor.alive = False
        state.tell(ISLAND, 0, f"{sailor.seat} died of {'poison' if poisoned else 'exhaustion'}")
        events.append(Event("died", sailor.seat, "poison" if poisoned else "exhaustion"))
    return events


def _suspect_givers(state: State, sailor: Sailor) -> None:
    """Suspect everybody from whom a sailor with first symptoms took food on that day."""
    for giver in sorted({giver for giver, taker in state.meals if taker == sailor.seat}):
        text = f"{sailor.seat} is poisoned and took food from {giver}"
        state.accuse(giver, state.rules.suspicion.meal, text)


def _drop_out(state: State, sailor: Sailor) -> None:
    """Take a sailor out of the game: the pack stays where the sailor stood, and offers to and from the sailor end."""
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
    """End the game. Only sailors who still act win: the colonists if the ship is finished, otherwise the traitor."""
    state.outcome, state.seat = outcome, None
    kind, role = ("escaped", COLONIST) if outcome == ESCAPED else ("prevented", TRAITOR)
    return [Event(kind, sailor.seat) for sailor in state.active if sailor.role == role]
