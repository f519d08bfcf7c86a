"""All advantages: of a group's outcomes, of single messages, of players; and generalised advantage estimation.

**Group-relative**, for GRPO. The advantage of a token is its episode's outcome advantage + weight × (the credit of its
message − the mean credit of its group at that message). The outcome advantage is the reward's distance from the mean of
its group, divided by a standard deviation (Shao et al. 2024, "DeepSeekMath"). The credits, for process rewards r₁ … rₙ
of an episode's messages:

- `immediate`: rₜ.
- `to_go`: the mean of rₜ, rₜ₊₁ … rₙ with weights 1, γ, γ² …: what the message led to. A mean, not a sum, or the first
  messages of long lessons would look worst.
- `progress`: mₜ − mₜ₋₁ with mₜ the mean of r₁ … rₜ and m₀ = 0: how far the message moved the quality of the lesson so
  far. Its sum over the messages is the mean process reward, and a message as good as those before it earns nothing: a
  difference of potentials (Ng, Harada and Russell 1999, "Policy invariance under reward transformations").

The means of a group are taken over all messages that the policy sampled at that place, rejected drafts included. Each
player has an outcome of its own, whose advantage is taken over the players of its role in the group: colonists and a
traitor want opposite things, and must not share a mean. A player's first message is compared with the first ones of
players of its role.

**Generalised advantage estimation**, for PPO, over the tokens of episodes or over their messages. A step is what the
policy decides: a token that it sampled, or a whole message. Tokens of the chat template and of the student lie between
steps and are none: γ and λ count from one step to the next one, across the messages in between. With V the critic, r
the reward of a step and t + 1 the step after t,

    δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}        return_t = A_t + V_t

(Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", equations 12 and
16). At the end of an episode V_{t+1} is its bootstrap: 0 if it ended by the environment's rules. What the last step of
an episode that was cut led to is not known, and the critic is not trained on states that no step follows: such an
episode counts up to the state before its last step, whose value is its bootstrap (`cut_before_last_step`). With λ = 1
and a critic that is 0 everywhere, A_t is the Monte-Carlo return. In the shapes of these functions, E is the number of
episodes and L the most tokens of one.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor
from statistics import fmean, stdev
from types import MappingProxyType

import torch
from torch import Tensor

from classroom_rl.config.values import (
    BY_BATCH,
    BY_GROUP,
    IMMEDIATE,
    NO_CREDIT,
    PROGRESS,
    SUPERVISOR_REWARD,
    TO_GO,
    TURNS,
    UNSCALED,
)
from classroom_rl.rollout.rows import DRAFT, TrainingRow, message_numbers
from classroom_rl.rollout.trajectory import PlayerOutcome, Trajectory

Values = list[float | None]


@dataclass(frozen=True)
class ProcessRewards:
    """The process rewards of one conversation; None for a message that was not scored.

    Attributes:
        messages: one for each message of the policy.
        drafts: (number of the message, reward) for each rejected draft.
        replaced: the numbers of the messages that the policy did not sample.
    """

    messages: Values
    drafts: list[tuple[int, float | None]]
    replaced: frozenset[int] = frozenset()

    @property
    def mean(self) -> float | None:
        """The conversation's process reward: the mean over its messages."""
        rewards = [reward for reward in self.messages if reward is not None]
        return fmean(rewards) if rewards else None


def process_rewards(record: Trajectory, rows: Sequence[TrainingRow], weights: Mapping[str, float]) -> ProcessRewards:
    """The weighted sum of a conversation's turn rewards, for each message. A reward that could not score a message adds
    nothing to it; a message without any is None.

    Args:
        rows: the conversation's rows. Rejected drafts have the supervisor's penalty alone.
    """
    numbers = message_numbers(record)
    turn_rewards = {name: record.turn_rewards.get(name) or [None] * len(numbers) for name in weights}
    messages: Values = []
    for number in range(len(numbers)):
        parts = [weights[name] * values[number] for name, values in turn_rewards.items() if values[number] is not None]
        messages.append(sum(parts) if parts else None)
    penalty_weight = weights.get(SUPERVISOR_REWARD, 0.0)
    drafts = [row for row in rows if row.kind == DRAFT]
    draft_rewards = [(row.message, None if row.reward is None else penalty_weight * row.reward) for row in drafts]
    replaced = frozenset(number for index, number in numbers.items() if record.turns[index].replaced)
    return ProcessRewards(messages, draft_rewards, replaced)


def credits_of(values: Values, mode: str, gamma: float) -> Values:
    """The credit of each message for its process rewards; None for a message that was not scored.

    Raises:
        ValueError: if there is no such mode.
    """
    if mode == IMMEDIATE:
        return list(values)
    if mode == TO_GO:
        return [None if value is None else _to_go(values[index:], gamma) for index, value in enumerate(values)]
    if mode == PROGRESS:
        return _progress(values)
    raise ValueError(f"there is no turn credit {mode!r}")


def _to_go(values: Values, gamma: float) -> float:
    weighted_values = [(gamma**steps, value) for steps, value in enumerate(values) if value is not None]
    return sum(weight * value for weight, value in weighted_values) / sum(weight for weight, _ in weighted_values)


def _progress(values: Values) -> Values:
    credits: Values = []
    total, count = 0.0, 0
    for value in values:
        mean_before = total / count if count else 0.0
        if value is None:
            credits.append(None)
            continue
        total, count = total + value, count + 1
        credits.append(total / count - mean_before)
    return credits


@dataclass(frozen=True)
class Credits:
    """The weighted credits of one conversation above the baseline of its group.

    Attributes:
        messages: one for each message of the policy; 0 for one that was not scored.
        drafts: one for each rejected draft.
        outcome: the outcome advantage of an episode's only player, which is in its messages already; 0 with several.
    """

    messages: list[float]
    drafts: list[float]
    outcome: float = 0.0


def group_credits(
    rewards: Sequence[ProcessRewards], groups: Sequence[Hashable], mode: str, gamma: float, weight: float
) -> list[Credits]:
    """The credits of a batch.

    Args:
        rewards: those of all conversations of the batch, over all ranks.
        groups: the group of each conversation; those of one group share their baselines.
    """
    if mode == NO_CREDIT:
        return [Credits([0.0] * len(process.messages), [0.0] * len(process.drafts)) for process in rewards]
    credits = [credits_of(process.messages, mode, gamma) for process in rewards]
    draft_credits = [_credits_of_drafts(process, mode, gamma) for process in rewards]
    means: dict[Hashable, dict[int, float]] = {}
    for group in set(groups):
        members = [index for index, key in enumerate(groups) if key == group]
        of_members = ([values[index] for index in members] for values in (rewards, credits, draft_credits))
        means[group] = _means_by_message(*of_members)

    def above(group: Hashable, number: int, credit: float | None) -> float:
        return 0.0 if credit is None else weight * (credit - means[group][number])

    relative_credits: list[Credits] = []
    for group, process, of_messages, of_drafts in zip(groups, rewards, credits, draft_credits, strict=True):
        of_messages = [None if number in process.replaced else credit for number, credit in enumerate(of_messages)]
        drafts = [above(group, number, credit) for (number, _), credit in zip(process.drafts, of_drafts, strict=True)]
        relative_credits.append(Credits([above(group, *pair) for pair in enumerate(of_messages)], drafts))
    return relative_credits


def _credits_of_drafts(rewards: ProcessRewards, mode: str, gamma: float) -> Values:
    """The credit of each rejected draft: as if it had been the last message."""
    return [credits_of([*rewards.messages[:number], value], mode, gamma)[number] for number, value in rewards.drafts]


def _means_by_message(
    group: Sequence[ProcessRewards], credits: Sequence[Values], draft_credits: Sequence[Values]
) -> dict[int, float]:
    by_message: dict[int, list[float]] = defaultdict(list)
    for process, of_messages, of_drafts in zip(group, credits, draft_credits, strict=True):
        for number, credit in enumerate(of_messages):
            if credit is not None and number not in process.replaced:
                by_message[number].append(credit)
        for (number, _), credit in zip(process.drafts, of_drafts, strict=True):
            if credit is not None:
                by_message[number].append(credit)
    return {number: fmean(values) for number, values in by_message.items()}


def shuffled(rewards: Sequence[ProcessRewards], seed: int) -> list[ProcessRewards]:
    """The same process rewards, permuted over all messages of a batch: a control that must teach nothing."""
    pool = [value for each in rewards for value in [*each.messages, *(b for _, b in each.drafts)] if value is not None]
    random.Random(seed).shuffle(pool)
    values = iter(pool)

    def drawn(value: float | None) -> float | None:
        return None if value is None else next(values)

    return [
        ProcessRewards(
            [drawn(value) for value in process.messages],
            [(number, drawn(value)) for number, value in process.drafts],
            process.replaced,
        )
        for process in rewards
    ]


EPSILON = 1e-4
"""What is added to a standard deviation before it divides: TRL's, for a group without variance."""


@dataclass(frozen=True)
class PlayerRewards:
    """The rewards of one player of an episode.

    Attributes:
        role: its role; "" for the only player.
        outcome: the reward of its outcome, the episode's for the only player; None for one that could not be scored.
        messages: the numbers of its messages in the episode.
        draft_indices: the indices of its rejected drafts among all of the episode's.
        process: the process rewards of its messages, numbered from 0.
        criteria: the parts of its outcome by name; {} for one of several players.
    """

    role: str
    outcome: float | None
    messages: tuple[int, ...]
    draft_indices: tuple[int, ...]
    process: ProcessRewards
    criteria: Mapping[str, float] = field(default_factory=dict)


def by_player(
    process: ProcessRewards,
    players: Sequence[PlayerOutcome],
    reward: float | None,
    criteria: Mapping[str, float] = MappingProxyType({}),
) -> list[PlayerRewards]:
    """The rewards of an episode, apart for each player; of the only one if `players` is empty.

    Args:
        reward, criteria: the episode's reward, and its parts.
    """
    everything = tuple(range(len(process.messages)))
    if not players:
        return [PlayerRewards("", reward, everything, tuple(range(len(process.drafts))), process, dict(criteria))]
    player_rewards = []
    for player in players:
        index_of = {number: index for index, number in enumerate(player.messages)}
        draft_indices = tuple(index for index, (number, _) in enumerate(process.drafts) if number in index_of)
        player_process = ProcessRewards(
            [process.messages[number] for number in player.messages],
            [(index_of[process.drafts[index][0]], process.drafts[index][1]) for index in draft_indices],
            frozenset(index_of[number] for number in process.replaced if number in index_of),
        )
        player_rewards.append(PlayerRewards(player.role, player.reward, player.messages, draft_indices, player_process))
    return player_rewards


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
    advantages = []
    for player, group in zip(players, groups, strict=True):
        if player.outcome is None:
            advantages.append(0.0)
            continue
        advantage = player.outcome - fmean(values[group])
        if scale != UNSCALED:
            outcomes = spread[_spread_key(group, player.role, scale)]
            advantage /= (stdev(outcomes) if len(outcomes) > 1 else 0.0) + EPSILON
        advantages.append(advantage)
    return advantages


def advantages_per_criterion(
    players: Sequence[PlayerRewards], groups: Sequence[Hashable], weights: Mapping[str, float]
) -> list[float]:
    """The advantage of each player's outcome from those of its criteria: each is compared within its group and divided
    by its deviation there; their weighted sum is scaled over all players of the role in the batch. 0 for a player
    without an outcome. Liu et al. 2026, "GDPO"; TRL's `multi_objective_aggregation: normalize_then_sum`.

    Args:
        weights: of the criteria. A player without criteria has one, its outcome.
    """
    parts = {name: [player.criteria.get(name) for player in players] for name in weights}
    parts[""] = [None if player.criteria else player.outcome for player in players]
    sums = [0.0] * len(players)
    for name, values in parts.items():
        of_criterion = [replace(player, outcome=value) for player, value in zip(players, values, strict=True)]
        for index, advantage in enumerate(outcome_advantages(of_criterion, groups, BY_GROUP)):
            sums[index] += weights.get(name, 1.0) * advantage
    summed = [
        replace(player, outcome=None if player.outcome is None else total)
        for player, total in zip(players, sums, strict=True)
    ]
    return outcome_advantages(summed, [player.role for player in players], BY_GROUP)


def to_step(value: float | None, step: float | None) -> float | None:
    """The nearest multiple of `step` (`train.reward_step`); a reward as it is if either is None."""
    if value is None or step is None:
        return value
    return step * floor(value / step + 0.5 + 1e-9)  # halves, such as means of two scores, all go up


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
    episode_credits, of_players = [], iter(zip(credits, outcomes, strict=True))
    for players in episodes:
        messages = [0.0] * sum(len(player.messages) for player in players)
        drafts = [0.0] * sum(len(player.draft_indices) for player in players)
        for player in players:
            credit, outcome = next(of_players)
            for number, value in zip(player.messages, credit.messages, strict=True):
                messages[number] = value + outcome
            for index, value in zip(player.draft_indices, credit.drafts, strict=True):
                drafts[index] = value
        episode_credits.append(Credits(messages, drafts, outcome if len(players) == 1 else 0.0))
    return episode_credits


NO_STEP = -1


@dataclass(frozen=True)
class Estimates:
    """What is trained on of a batch; all of shape (E, L).

    Attributes:
        advantages: of each sampled token, 0 elsewhere.
        returns: what the critic should say of the state before a token, 0 where `value_mask` is.
        value_mask: true where the critic is trained: before each sampled token, or before the first one of a message.
    """

    advantages: Tensor
    returns: Tensor
    value_mask: Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float, lam: float) -> Tensor:
    """The advantage of every step.

    Args:
        rewards: the reward of each step, of shape (E, L); what stands where `mask` is 0 does not count.
        values: the critic's value of the state before each step, of shape (E, L).
        mask: 1 for steps, of shape (E, L).
        bootstrap: the value of the state after the last step, of shape (E,): 0 for an episode that has ended.
        gamma, lam: the discount γ and the λ of the estimator, from 0 to 1.

    Returns:
        The advantages, of shape (E, L); 0 where there is no step.
    """
    advantages = torch.zeros_like(values)
    value_after, advantage_after = bootstrap, torch.zeros_like(bootstrap)
    for position in reversed(range(values.size(1))):
        is_step = mask[:, position].bool()
        error = rewards[:, position] + gamma * value_after - values[:, position]
        advantage = error + gamma * lam * advantage_after
        advantages[:, position] = torch.where(is_step, advantage, 0.0)
        # Tokens between two steps hand the later step's value and advantage on to the earlier one.
        advantage_after = torch.where(is_step, advantage, advantage_after)
        value_after = torch.where(is_step, values[:, position], value_after)
    return advantages


def estimate(
    rewards: Tensor, values: Tensor, messages: Tensor, bootstrap: Tensor, gamma: float, lam: float, over: str
) -> Estimates:
    """Advantages and returns over tokens, or over messages (`turns`).

    Args:
        messages: the number of the message that each sampled token belongs to, from 0 and not falling along a row;
            `NO_STEP` for all other tokens.
        over: `tokens`: each sampled token is a step. `turns`: each message is one, in the state before its first
            token; its reward is the sum over its tokens, and all of them have its advantage.
    """
    if over == TURNS:
        return _over_messages(rewards, values, messages, bootstrap, gamma, lam)
    mask = messages != NO_STEP
    advantages = gae(rewards, values, mask, bootstrap, gamma, lam)
    return Estimates(advantages, torch.where(mask, advantages + values, 0.0), mask)


def _over_messages(
    rewards: Tensor, values: Tensor, messages: Tensor, bootstrap: Tensor, gamma: float, lam: float
) -> Estimates:
    mask, first = messages != NO_STEP, first_tokens(messages)
    numbers = messages.clamp(min=0)
    shape = (len(messages), int(messages.max().clamp(min=0)) + 1)

    def by_message(tokens: Tensor, counted: Tensor) -> Tensor:
        """The sums over the counted tokens of each message, of shape (E, messages)."""
        return values.new_zeros(shape).scatter_add(1, numbers, torch.where(counted, tokens, 0.0))

    steps = by_message(torch.ones_like(values), first)
    message_advantages = gae(by_message(rewards, mask), by_message(values, first), steps, bootstrap, gamma, lam)
    advantages = torch.where(mask, message_advantages.gather(1, numbers), 0.0)
    return Estimates(advantages, torch.where(first, advantages + values, 0.0), first)


def first_tokens(messages: Tensor) -> Tensor:
    """True for the first sampled token of every message, of shape (E, L). A message may be interrupted by tokens that
    were not sampled."""
    latest = torch.cummax(messages, dim=1).values
    before = torch.nn.functional.pad(latest, (1, 0), value=NO_STEP)[:, :-1]
    return (messages != NO_STEP) & (messages > before)


def cut_before_last_step(messages: Tensor, cut: Tensor, values: Tensor, over: str) -> tuple[Tensor, Tensor]:
    """Take the last step of episodes that were cut out of them.

    Args:
        cut: which episodes were cut, of shape (E,).
        over: what a step is, as in `estimate`.

    Returns:
        The messages without it, and the bootstrap of each row, of shape (E,): the value before the step that was taken
        out; 0 where none was.
    """
    positions = torch.arange(messages.size(1), device=messages.device).expand_as(messages)
    starts = first_tokens(messages) if over == TURNS else messages != NO_STEP
    last = torch.where(starts, positions, NO_STEP).max(dim=1).values
    shortened = cut & (last != NO_STEP)
    remaining = messages.masked_fill(shortened.unsqueeze(1) & (positions >= last.unsqueeze(1)), NO_STEP)
    bootstrap = values.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1)
    return remaining, torch.where(shortened, bootstrap, 0.0)


def token_rewards(messages: Tensor, process: Tensor, outcome: Tensor) -> Tensor:
    """The reward of every token: `process` as it is, and the outcome at the last sampled token of its row.

    Args:
        process: of shape (E, L).
        outcome: of shape (E,).
    """
    positions = torch.arange(messages.size(1), device=messages.device)
    last = torch.where(messages != NO_STEP, positions, NO_STEP).max(dim=1).values
    return process + (positions == last.unsqueeze(1)) * outcome.unsqueeze(1)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Number, sum and sum of squares of the values where the mask is true: three numbers that can be added up over
    processes."""
    counted = values[mask.bool()].double()
    return torch.stack([counted.new_tensor(counted.numel()), counted.sum(), counted.square().sum()])


def mean_and_variance(summed: Tensor) -> tuple[float, float]:
    """Mean and variance of what `moments` counted; (0, 0) of nothing."""
    count, total, squares = summed.tolist()
    if count == 0:
        return 0.0, 0.0
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0)


def whitened(advantages: Tensor, mask: Tensor, summed: Tensor) -> Tensor:
    """The advantages with mean 0 and standard deviation 1 over the tokens that `summed` counts, 0 elsewhere.

    Args:
        summed: the `moments` of all processes together.
    """
    mean, variance = mean_and_variance(summed)
    return torch.where(mask.bool(), (advantages - mean) / (variance**0.5 + 1e-8), 0.0)
