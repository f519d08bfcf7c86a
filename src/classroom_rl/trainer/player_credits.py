"""Credits of an episode in which the policy played several players: self-play.

Each player has an outcome of its own. Its advantage is taken over the players of its role in the group, as GRPO takes
that of a conversation over its group (Shao et al. 2024, "DeepSeekMath"): colonists and a traitor want opposite things,
and must not share a mean. Process rewards are compared in the same way: a player's first message with the first ones of
players of its role.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from classroom_rl.config.values import BY_BATCH, UNSCALED
from classroom_rl.rollout.trajectory import PlayerOutcome
from classroom_rl.trainer.turn_advantages import Credits, ProcessRewards

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
