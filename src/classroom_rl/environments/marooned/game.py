"""One game: whose turn it is, what a step does, and how it ends. Pure; equal seeds and actions give equal games."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from classroom_rl.environments.marooned.actions import WAIT, Action
from classroom_rl.environments.marooned.effects import apply, end_round
from classroom_rl.environments.marooned.legality import Fault, fault_of
from classroom_rl.environments.marooned.rewards import rewards_of
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR, Rules, RulesError
from classroom_rl.environments.marooned.state import Event, new_state

UNREADABLE = Fault("format", "the message held no action")
UNLOGGED = {"turn", "energy"}
"""Kinds of events that almost every step has. They are left out of the log."""


class GameOver(RuntimeError):
    """A step was made in a game that is over."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        seat: who acted.
        action: the requested action; WAIT if the message held none.
        rewards: by seat, unscaled, as in the reward table.
        events: what happened.
        fault: why the action was not possible and became WAIT; None if it was possible.
    """

    seat: int
    action: Action
    rewards: dict[int, float]
    events: tuple[Event, ...]
    fault: Fault | None


class Game:
    """The game of a seed.

    Args:
        roles: the roles of seats 1, 2, …; if None, the seed draws the traitor's seat.
        traitor: whether there is a traitor; without one, all sailors are colonists.

    Raises:
        RulesError: if the rules cannot be played, or if the roles do not fit them.
    """

    def __init__(self, rules: Rules, seed: int, roles: Sequence[str] | None = None, traitor: bool = True):
        rules.check()
        self.rules, self.seed = rules, seed
        self.roles = _roles(rules, seed, roles, traitor)
        self.state = new_state(rules, seed, self.roles)
        self.returns = dict.fromkeys(self.roles, 0.0)
        self.steps = 0

    @property
    def seat(self) -> int | None:
        """Whose turn it is; None when the game is over."""
        return self.state.seat

    @property
    def over(self) -> bool:
        """Whether the game is decided."""
        return self.state.outcome is not None

    @property
    def outcome(self) -> str | None:
        """`escaped` (the ship is built), `stranded` (no days are left), or `dead` (no colonist acts any more).

        None while the game goes on.
        """
        return self.state.outcome

    @property
    def ship_progress(self) -> float:
        """How much of the ship is built, in [0, 1]."""
        return self.state.ship_percent() / 100

    def step(self, action: Action | None) -> StepResult:
        """Take the action of the sailor whose turn it is. After the last sailor of a round, the round ends, and perhaps
        the day.

        Args:
            action: None for a message without an action. It fails like an action that is not possible.

        Raises:
            GameOver: if the game is over.
        """
        state, seat = self.state, self.state.seat
        if seat is None:
            raise GameOver(f"the game is over ({state.outcome}); start another one")
        sailor, day, turn = state.sailors[seat], state.day, state.turn
        fault = UNREADABLE if action is None else fault_of(self, seat, action)
        sailor.fault = "" if fault is None else fault.text if action is None else f"{action}: {fault.text}"
        events = [Event("turn", seat)]
        if fault is not None:
            events.append(Event("failed", seat, sailor.fault))
        events += apply(state, sailor, action if fault is None else WAIT)
        later_seats = [
            other_seat
            for other_seat, other_sailor in state.sailors.items()
            if other_seat > seat and other_sailor.active
        ]
        state.seat = later_seats[0] if later_seats else None
        if not later_seats:
            events += end_round(state)
            if state.outcome is None:
                state.seat = state.active[0].seat
        state.log += [(day, turn, event) for event in events if event.kind not in UNLOGGED]
        rewards = rewards_of(events, self.roles, self.rules.rewards)
        for rewarded_seat, amount in rewards.items():
            self.returns[rewarded_seat] += amount
        self.steps += 1
        return StepResult(seat, action or WAIT, rewards, tuple(events), fault)


def _roles(rules: Rules, seed: int, roles: Sequence[str] | None, traitor: bool) -> dict[int, str]:
    if roles is None:
        traitor_seat = Random(f"{seed}:roles").choice(rules.seats) if traitor else None
        return {seat: TRAITOR if seat == traitor_seat else COLONIST for seat in rules.seats}
    are_known = set(roles) <= {COLONIST, TRAITOR}
    if len(roles) != rules.sailors or not are_known or COLONIST not in roles or (TRAITOR in roles and not traitor):
        raise RulesError(f"{rules.sailors} sailors need as many roles, a colonist among them; given: {list(roles)}")
    return dict(zip(rules.seats, roles, strict=True))
