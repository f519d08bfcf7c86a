"""How a message's own reward enters the advantage of its tokens; in self-play, the advantages of each player.

The advantage of a token is its conversation's outcome advantage + weight × (the credit of its message − the mean credit
of its group at that message). The modes, for process rewards r₁ … rₙ of a conversation's messages:

- `immediate`: rₜ.
- `to_go`: the mean of rₜ, rₜ₊₁ … rₙ with weights 1, γ, γ² …: what the message led to. A mean, not a sum, or the first
  messages of long lessons would look worst.
- `progress`: mₜ − mₜ₋₁ with mₜ the mean of r₁ … rₜ and m₀ = 0: how far the message moved the quality of the lesson so
  far. Its sum over the messages is the mean process reward, and a message as good as those before it earns nothing: a
  difference of potentials (Ng, Harada and Russell 1999, "Policy invariance under reward transformations").

Baselines are group means as in GRPO (Shao et al. 2024, "DeepSeekMath"), taken over all messages that the policy sampled
at that place of the conversation, rejected drafts included.

Each player has an outcome of its own. Its advantage is taken over the players of its role in the group, as GRPO takes
that of a conversation over its group (Shao et al. 2024, "DeepSeekMath"): colonists and a traitor want opposite things,
and must not share a mean. Process rewards are compared in the same way: a player's first message with the first ones of
players of its role.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from classroom_rl.config.values import BY_BATCH, IMMEDIATE, NO_CREDIT, PROGRESS, SUPERVISOR_REWARD, TO_GO, UNSCALED
from classroom_rl.rollout.rows import DRAFT, TrainingRow, message_numbers
from classroom_rl.rollout.trajectory import PlayerOutcome, Trajectory

Values = list[float | None]


@dataclass(frozen=True)
class ProcessRewards:
    """The process rewards of one conversation; None for a message that was not scored.

    Attributes:
        messages: one for each message of the policy.
        beside: (number of the message, reward) for each rejected draft.
        replaced: the numbers of the messages that the policy did not sample.
    """

    messages: Values
    beside: list[tuple[int, float | None]]
    replaced: frozenset[int] = frozenset()

    @property
    def mean(self) -> float | None:
        """The conversation's process reward: the mean over its messages."""
        known = [value for value in self.messages if value is not None]
        return fmean(known) if known else None


def process_rewards(record: Trajectory, rows: Sequence[TrainingRow], weights: Mapping[str, float]) -> ProcessRewards:
    """The weighted sum of a conversation's turn rewards, for each message. A reward that could not score a message adds
    nothing to it; a message without any is None.

    Args:
        rows: the conversation's rows. Rejected drafts have the supervisor's penalty alone.
    """
    numbers = message_numbers(record)
    named = {name: record.turn_rewards.get(name) or [None] * len(numbers) for name in weights}
    messages: Values = []
    for number in range(len(numbers)):
        parts = [weights[name] * values[number] for name, values in named.items() if values[number] is not None]
        messages.append(sum(parts) if parts else None)
    price = weights.get(SUPERVISOR_REWARD, 0.0)
    drafts = [row for row in rows if row.kind == DRAFT]
    beside = [(row.message, None if row.reward is None else price * row.reward) for row in drafts]
    replaced = frozenset(number for place, number in numbers.items() if record.turns[place].replaced)
    return ProcessRewards(messages, beside, replaced)


def credits_of(values: Values, mode: str, gamma: float) -> Values:
    """The credit of each message for its process rewards; None for a message that was not scored.

    Raises:
        ValueError: if there is no such mode.
    """
    if mode == IMMEDIATE:
        return list(values)
    if mode == TO_GO:
        return [None if value is None else _to_go(values[place:], gamma) for place, value in enumerate(values)]
    if mode == PROGRESS:
        return _progress(values)
    raise ValueError(f"there is no turn credit {mode!r}")


def _to_go(values: Values, gamma: float) -> float:
    known = [(gamma**steps, value) for steps, value in enumerate(values) if value is not None]
    return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known)


def _progress(values: Values) -> Values:
    found: Values = []
    total, count = 0.0, 0
    for value in values:
        before = total / count if count else 0.0
        if value is None:
            found.append(None)
            continue
        total, count = total + value, count + 1
        found.append(total / count - before)
    return found


@dataclass(frozen=True)
class Credits:
    """The weighted credits of one conversation above the baseline of its group.

    Attributes:
        messages: one for each message of the policy; 0 for one that was not scored.
        beside: one for each rejected draft.
    """

    messages: list[float]
    beside: list[float]


def group_credits(
    rewards: Sequence[ProcessRewards], groups: Sequence[Hashable], mode: str, gamma: float, weight: float
) -> list[Credits]:
    """The credits of a batch.

    Args:
        rewards: those of all conversations of the batch, over all ranks.
        groups: the group of each conversation; those of one group share their baselines.
    """
    if mode == NO_CREDIT:
        return [Credits([0.0] * len(each.messages), [0.0] * len(each.beside)) for each in rewards]
    credits = [credits_of(each.messages, mode, gamma) for each in rewards]
    beside = [_credits_beside(each, mode, gamma) for each in rewards]
    means: dict[Hashable, dict[int, float]] = {}
    for group in set(groups):
        members = [place for place, key in enumerate(groups) if key == group]
        picked = ([values[place] for place in members] for values in (rewards, credits, beside))
        means[group] = _means_by_message(*picked)

    def above(group: Hashable, number: int, credit: float | None) -> float:
        return 0.0 if credit is None else weight * (credit - means[group][number])

    found: list[Credits] = []
    for group, each, own, others in zip(groups, rewards, credits, beside, strict=True):
        own = [None if number in each.replaced else credit for number, credit in enumerate(own)]
        drafts = [above(group, number, credit) for (number, _), credit in zip(each.beside, others, strict=True)]
        found.append(Credits([above(group, *pair) for pair in enumerate(own)], drafts))
    return found


def _credits_beside(rewards: ProcessRewards, mode: str, gamma: float) -> Values:
    """The credit of each rejected draft: as if it had been the last message."""
    return [credits_of([*rewards.messages[:number], value], mode, gamma)[number] for number, value in rewards.beside]


def _means_by_message(
    group: Sequence[ProcessRewards], credits: Sequence[Values], beside: Sequence[Values]
) -> dict[int, float]:
    known: dict[int, list[float]] = defaultdict(list)
    for each, own, others in zip(group, credits, beside, strict=True):
        for number, credit in enumerate(own):
            if credit is not None and number not in each.replaced:
                known[number].append(credit)
        for (number, _), credit in zip(each.beside, others, strict=True):
            if credit is not None:
                known[number].append(credit)
    return {number: fmean(values) for number, values in known.items()}


def shuffled(rewards: Sequence[ProcessRewards], seed: int) -> list[ProcessRewards]:
    """The same process rewards, permuted over all messages of a batch: a control that must teach nothing."""
    known = [value for each in rewards for value in [*each.messages, *(b for _, b in each.beside)] if value is not None]
    random.Random(seed).shuffle(known)
    values = iter(known)

    def drawn(value: float | None) -> float | None:
        return None if value is None else next(values)

    return [
        ProcessRewards(
            [drawn(value) for value in each.messages],
            [(number, drawn(value)) for number, value in each.beside],
            each.replaced,
        )
        for each in rewards
    ]


_EPSILON = 1e-4
"""TRL's, for a group without variance."""


@dataclass(frozen=True)
class PlayerRewards:
    """The rewards of one player of an episode.

    Attributes:
        role: its role; "" for the only player.
        outcome: the reward of its outcome; None for the only player, whose outcome is the episode's, and for one that
            could not be scored.
        messages: the numbers of its messages in the episode.
        beside: the places of its rejected drafts among all of the episode's.
        process: the process rewards of its messages, numbered from 0.
    """

    role: str
    outcome: float | None
    messages: tuple[int, ...]
    beside: tuple[int, ...]
    process: ProcessRewards


def by_player(process: ProcessRewards, players: Sequence[PlayerOutcome]) -> list[PlayerRewards]:
    """The process rewards of an episode, apart for each player; of the only one if `players` is empty."""
    everything = tuple(range(len(process.messages)))
    if not players:
        return [PlayerRewards("", None, everything, tuple(range(len(process.beside))), process)]
    found = []
    for player in players:
        place_of = {number: place for place, number in enumerate(player.messages)}
        beside = tuple(place for place, (number, _) in enumerate(process.beside) if number in place_of)
        own = ProcessRewards(
            [process.messages[number] for number in player.messages],
            [(place_of[process.beside[place][0]], process.beside[place][1]) for place in beside],
            frozenset(place_of[number] for number in process.replaced if number in place_of),
        )
        found.append(PlayerRewards(player.role, player.reward, player.messages, beside, own))
    return found


def outcome_advantages(players: Sequence[PlayerRewards], groups: Sequence[Hashable], scale: str) -> list[float]:
    """The advantage of each player's outcome; 0 for one without.

    Args:
        groups: the group of each player; the last element of a group is the role.
        scale: `train.scale_rewards`: the advantage is divided by the deviation of the group (`group`), by that of all
            players of the role in the batch (`batch`), or not at all (`none`).
    """
    values: dict[Hashable, list[float]] = defaultdict(list)
    spread: dict[Hashable, list[float]] = defaultdict(list)
    for player, group in zip(players, groups, strict=True):
        if player.outcome is not None:
            values[group].append(player.outcome)
            spread[_spread_key(group, player.role, scale)].append(player.outcome)
    found = []
    for player, group in zip(players, groups, strict=True):
        if player.outcome is None:
            found.append(0.0)
            continue
        advantage = player.outcome - fmean(values[group])
        if scale != UNSCALED:
            known = spread[_spread_key(group, player.role, scale)]
            advantage /= (stdev(known) if len(known) > 1 else 0.0) + _EPSILON
        found.append(advantage)
    return found


def _spread_key(group: Hashable, role: str, scale: str) -> Hashable:
    return role if scale == BY_BATCH else group


def merged(
    episodes: Sequence[Sequence[PlayerRewards]], credits: Sequence[Credits], outcomes: Sequence[float]
) -> list[Credits]:
    """The credits of each episode: those of its players' messages, in the order of the episode. The outcomes are those
    of all players; rejected drafts have no share in them, as in an episode of one player.

    Args:
        credits, outcomes: those of all players of all episodes, one after the other.
    """
    found, values = [], iter(zip(credits, outcomes, strict=True))
    for players in episodes:
        messages = [0.0] * sum(len(player.messages) for player in players)
        beside = [0.0] * sum(len(player.beside) for player in players)
        for player in players:
            credit, outcome = next(values)
            for number, value in zip(player.messages, credit.messages, strict=True):
                messages[number] = value + outcome
            for place, value in zip(player.beside, credit.beside, strict=True):
                beside[place] = value
        found.append(Credits(messages, beside))
    return found
