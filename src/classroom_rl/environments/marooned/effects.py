"""What each action does to the state. Whether it is possible was checked before (`legality.py`)."""

from collections.abc import Callable
from random import Random

from classroom_rl.environments.marooned.actions import Action
from classroom_rl.environments.marooned.state import ISLAND, Event, Offer, Sailor, State
from classroom_rl.environments.marooned.things import ANTIDOTE, TABLET, add

Effect = Callable[[State, Sailor, tuple], list[Event]]


def apply(state: State, sailor: Sailor, action: Action) -> list[Event]:
    """Take the action's energy, then do it. Returns what happened, the spent energy included."""
    events = []
    cost = state.rules.cost(sailor.role, action.name)
    if cost:
        events.append(change_energy(state, sailor, -cost, action.name))
    return events + _EFFECTS[action.name](state, sailor, action.args)


def change_energy(state: State, sailor: Sailor, amount: float, reason: str) -> Event:
    """Add energy within 0 and full. Returns the event with the amount that really changed."""
    before = sailor.energy
    sailor.energy = round(min(state.rules.energy.full, max(0.0, before + amount)), 1)
    return Event("energy", sailor.seat, reason, round(sailor.energy - before, 1))


def take_from_pack(sailor: Sailor, kind: str, number: int = 1) -> None:
    """Take pieces out of a pack, the open ones first."""
    add(sailor.pack, kind, -number)
    surplus = sailor.hidden.get(kind, 0) - sailor.pack.get(kind, 0)
    if surplus > 0:
        add(sailor.hidden, kind, -surplus)


def eat(state: State, sailor: Sailor, food: str) -> list[Event]:
    """What eating does; the food was taken from where it lay."""
    sailor.fed = True
    add(state.used_up, food, 1)
    return [Event("ate", sailor.seat, food), change_energy(state, sailor, state.rules.energy.food[food], "EAT")]


def return_offer(state: State, offer: Offer) -> None:
    """Put what was offered back into its giver's pack, the tablet too."""
    state.offers = tuple(each for each in state.offers if each != offer)
    pack = state.sailors[offer.giver].pack
    add(pack, offer.food, 1)
    if offer.poisoned:
        add(pack, TABLET, 1)


def pack_text(sailor: Sailor) -> str:
    """What others find in a pack; hidden pieces are left out."""
    open_pieces = {kind: number - sailor.hidden.get(kind, 0) for kind, number in sailor.pack.items()}
    return ", ".join(f"{number} {kind}" for kind, number in sorted(open_pieces.items()) if number) or "nothing"


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


def _take(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    offer = next(each for each in state.offers if each[:2] == (args[0], sailor.seat))
    state.offers = tuple(each for each in state.offers if each != offer)
    state.meals = (*state.meals, (offer.giver, sailor.seat))
    events = eat(state, sailor, offer.food)
    if offer.poisoned:
        add(state.used_up, TABLET, 1)
        if sailor.poison_nights is None:
            sailor.poison_nights = 0
            events.append(Event("poisoned", offer.giver, others=(sailor.seat,)))
    return events


def _refuse(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    return_offer(state, next(each for each in state.offers if each[:2] == (args[0], sailor.seat)))
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
    other = state.sailors[args[0]]
    state.tell(ISLAND, sailor.seat, f"In the pack of {other.seat} you find: {pack_text(other)}")
    state.tell(ISLAND, other.seat, f"{sailor.seat} searches your pack")
    if other.pack.get(TABLET, 0) > other.hidden.get(TABLET, 0):
        text = f"{sailor.seat} found poison in the pack of {other.seat}"
        state.accuse(other.seat, state.rules.suspicion.tablet, text)
    return [Event("searched", sailor.seat, others=args)]


def _sabotage(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    """Undo building turns; a part of which none is left is lost with its material."""
    part = args[0]
    undone = min(state.rules.traitor.sabotage_turns, state.turns_built[part])
    state.turns_built[part] -= undone
    if not state.turns_built[part]:
        del state.turns_built[part]
        for kind, number in state.rules.part[part].material.items():
            add(state.used_up, kind, number)
    rules = state.rules.suspicion
    witnesses = [s.seat for s in state.active if s is not sailor and state.sees(s, sailor.place)]
    if witnesses:
        state.accuse(sailor.seat, rules.witness, f"{witnesses[0]} saw {sailor.seat} damage the {part}")
    elif Random(f"{state.seed}:trace:{state.day}:{state.turn}").random() < rules.trace_chance:
        state.accuse(sailor.seat, rules.trace, _trace(sailor.seat))
    return [Event("sabotaged", sailor.seat, part, undone)]


def _trace(seat: int) -> str:
    return f"a trace at the ship points to {seat}"


def _hide(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    add(sailor.hidden, args[0], 1)
    return [Event("hid", sailor.seat, args[0])]


def _frame(state: State, sailor: Sailor, args: tuple) -> list[Event]:
    sailor.frames_left -= 1
    state.accuse(args[0], state.rules.suspicion.trace, _trace(args[0]))
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
