"""The rewards: one small function for each, from an event to rewards by seat, unscaled as in the reward table.

To change a reward, change its function; to add one, add it to `REWARDS` under the kind of event that it rewards.
Training uses the rewards multiplied by `Rules.reward_scale`. The docstrings of the functions are shown in
docs/marooned.md (`rules_docs.py`).
"""

from collections.abc import Callable, Iterable, Mapping

from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR, RewardTable
from classroom_rl.environments.marooned.state import Event

Paid = dict[int, float]
Reward = Callable[[Event, Mapping[int, str], RewardTable], Paid]
"""A function from an event, the roles by seat, and the reward table to rewards by seat."""


def turn(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """Each turn costs a little, so that time matters."""
    return {event.seat: table.turn}


def failed(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """An action that was not possible."""
    return {event.seat: table.failed}


def gather(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """Each piece that a colonist picks up."""
    return _to_colonists((event.seat,), roles, table.gather * event.amount)


def deposit(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """Each piece that a colonist brings to the store, unless it came from there."""
    return _to_colonists((event.seat,), roles, table.deposit * event.amount)


def build(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """A building turn, to each colonist who took part."""
    return _to_colonists((event.seat, *event.others), roles, table.build)


def progress(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """The percent by which the ship grew, to each colonist who built."""
    return _to_colonists((event.seat, *event.others), roles, table.progress * event.amount)


def milestone(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """A milestone of the ship, to all colonists who still act."""
    return _to_colonists((event.seat, *event.others), roles, dict(table.milestones)[int(event.amount)])


def escape(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """Getting away, once, to each colonist aboard."""
    return {event.seat: table.escape}


def death(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """Dying, once."""
    return {event.seat: table.death}


def vote(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """A vote that removed somebody: right if it was the traitor. The traitor who is removed loses."""
    is_right = roles[event.seat] == TRAITOR
    paid = _to_colonists(event.others, roles, table.right_vote if is_right else table.wrong_vote)
    return paid | ({event.seat: table.removed} if is_right else {})


def sabotage(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """A sabotage, if it undid anything."""
    return {event.seat: table.sabotage} if event.amount > 0 else {}


def poisoning(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """A colonist swallowed the traitor's tablet."""
    return {event.seat: table.poisoning}


def prevented(event: Event, roles: Mapping[int, str], table: RewardTable) -> Paid:
    """The ship is not finished, and the traitor is at large."""
    return {event.seat: table.prevented}


def _to_colonists(seats: Iterable[int], roles: Mapping[int, str], amount: float) -> Paid:
    return {seat: amount for seat in seats if roles[seat] == COLONIST} if amount else {}


REWARDS: dict[str, Reward] = {
    **{"turn": turn, "failed": failed, "gathered": gather, "deposited": deposit, "built": build, "progress": progress},
    **{"milestone": milestone, "escaped": escape, "died": death, "removed": vote, "sabotaged": sabotage},
    **{"poisoned": poisoning, "prevented": prevented},
}
"""The reward functions by the kind of event that they reward."""


def rewards_of(events: Iterable[Event], roles: Mapping[int, str], table: RewardTable) -> Paid:
    """The sum of the rewards of one step's events, for every seat."""
    paid = dict.fromkeys(roles, 0.0)
    for event in events:
        reward = REWARDS.get(event.kind)
        if reward is not None:
            for seat, amount in reward(event, roles, table).items():
                paid[seat] += amount
    return paid
