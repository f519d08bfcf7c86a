"""One game: whose turn it is, what a step does, how it ends. Pure, and equal for equal seeds and actions."""

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
"""Kinds of events that every step has; the log leaves them out."""


class GameOver(RuntimeError):
    """A step was made in a game that is over."""


@dataclass(frozen=True)
class StepResult:
    """What a step did: rewards by seat in the numbers of the table, the events, and the fault of an action that was not
    possible and became WAIT (None: it was possible)."""

    seat: int
    action: Action
    rewards: dict[int, float]
    events: tuple[Event, ...]
    fault: Fault | None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The fault as a tuple of none or one."""
        return () if self.fault is None else (self.fault,)


class Game:
    """A game of a seed. `roles` are those of seats 1, 2, …; if None, the seed draws the traitor's seat. With
    `traitor=False`, all are colonists.

    Raises:
        RulesError: if the rules cannot be played by, or if the roles do not fit them.
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
        """`escaped` (the ship is built), `stranded` (no days are left), `dead` (no colonist acts any more), or None."""
        return self.state.outcome

    @property
    def ship_progress(self) -> float:
        """How much of the ship is built, in [0, 1]."""
        return self.state.ship_percent() / 100

    def step(self, action: Action | None) -> StepResult:
        """The sailor whose turn it is acts. The last one of a round ends it: building is done, and perhaps the day.
        None stands for a message that holds no action: it fails, as an action does that is not possible.

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
        later = [other for other, each in state.sailors.items() if other > seat and each.active]
        state.seat = later[0] if later else None
        if not later:
            events += end_round(state)
            if state.outcome is None:
                state.seat = state.active[0].seat
        state.log += [(day, turn, event) for event in events if event.kind not in UNLOGGED]
        rewards = rewards_of(events, self.roles, self.rules.rewards)
        for each, amount in rewards.items():
            self.returns[each] += amount
        self.steps += 1
        return StepResult(seat, action or WAIT, rewards, tuple(events), fault)

    def clone(self) -> "Game":
        """A copy that goes its own way."""
        copy = object.__new__(Game)
        copy.rules, copy.seed, copy.roles, copy.steps = self.rules, self.seed, self.roles, self.steps
        copy.state, copy.returns = self.state.copy(), self.returns.copy()
        return copy


def _roles(rules: Rules, seed: int, roles: Sequence[str] | None, traitor: bool) -> dict[int, str]:
    if roles is None:
        seat = Random(f"{seed}:roles").choice(rules.seats) if traitor else None
        return {each: TRAITOR if each == seat else COLONIST for each in rules.seats}
    known = set(roles) <= {COLONIST, TRAITOR}
    if len(roles) != rules.sailors or not known or COLONIST not in roles or (TRAITOR in roles and not traitor):
        raise RulesError(f"{rules.sailors} sailors need as many roles, a colonist among them; given: {list(roles)}")
    return dict(zip(rules.seats, roles, strict=True))
