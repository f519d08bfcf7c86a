"""One game for training: the model's decisions, the scripted players of the other seats, and the rewards.

Everything except the model's messages follows from the problem, so that a game can be replayed from its messages.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from random import Random
from statistics import fmean
from typing import ClassVar

from classroom_rl.environments.marooned.actions import Action
from classroom_rl.environments.marooned.config import Generation
from classroom_rl.environments.marooned.game import UNREADABLE, Game
from classroom_rl.environments.marooned.legality import fault_in
from classroom_rl.environments.marooned.messages import INVALID, REPAIRABLE, VALID, parse_message
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.players import PLAYERS, Player, play_others
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import render
from classroom_rl.environments.marooned.rules import COLONIST, DEAD, ESCAPED, TRAITOR
from classroom_rl.errors import DataError
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import Review
from classroom_rl.rollout.supervision import SampledDraft
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import TokenBuffer, Turn
from classroom_rl.rollout.trajectory import PlayerOutcome, Trajectory

DECISION, REVIEW, END = "DECISION", "REVIEW", "END"
GAME = "game"
"""The role of the turns that show the game before a decision."""
_ISLAND = re.compile(r"island (\d{1,9}), seat ([1-9])")


@dataclass(frozen=True)
class Decision:
    """One decision of the model and its outcome.

    Attributes:
        day, turn: when it was made.
        seat: the seat that made it.
        action: the action that was played, which may be the supervisor's correction; "" if none could be read.
        grade: how the model wrote it: `valid`, `repairable` or `invalid`.
        fault: why the action that the model wrote was not possible; "" if it was.
        reward: the scaled reward of the seat from this decision to its next one, or to the end.
    """

    day: int
    turn: int
    action: str
    grade: str
    fault: str
    reward: float = 0.0
    seat: int = 0


@dataclass(frozen=True)
class SeatReward:
    """The reward of one seat in self-play.

    Attributes:
        seat, role: the seat, and the role of its sailor.
        reward: the weighted sum of its rewards.
    """

    seat: int
    role: str
    reward: float | None


class GameRecord(Trajectory):
    """A finished game.

    The limit of decisions is part of the task: a game that ends there is not truncated, and its return is what was
    earned until then.

    Attributes:
        seat, role: those that the problem names; they are under training.
        outcome: the game's outcome; "" if it was not decided.
        fell: whether the sailor of the seat died or was removed by a vote.
        decisions: the model's decisions; in self-play those of all seats.
        seats: the rewards of all seats in self-play, otherwise empty. `reward` is always that of `seat`.
    """

    preset: str = ""
    seat: int = 0
    role: str = ""
    outcome: str = ""
    ship_progress: float = 0.0
    fell: bool = False
    decisions: list[Decision] = []
    seats: list[SeatReward] = []

    figure_labels: ClassVar[dict[str, str]] = {
        "valid": "valid actions (in the exact grammar, and possible)",
        "readable": "actions in the exact grammar",
        "ship": "ship finished",
        "decisions": "decisions a game",
    }

    @property
    def figures(self) -> dict[str, float]:
        decisions = self.decisions
        if not decisions or self.reward is None:
            return {}
        return {
            "valid": fmean(decision.grade == VALID and not decision.fault for decision in decisions),
            "readable": fmean(decision.grade == VALID for decision in decisions),
            "ship": self.ship_progress,
            "reward": self.reward,
            "decisions": float(len(decisions)),
        }

    @property
    def players(self) -> list[PlayerOutcome]:
        """The seats of self-play, each with the indices of its decisions."""
        return [
            PlayerOutcome(
                seat.role,
                seat.reward,
                tuple(index for index, decision in enumerate(self.decisions) if decision.seat == seat.seat),
            )
            for seat in self.seats
        ]


def island_of(problem: Problem) -> tuple[int, int]:
    """The seed and the seat of a problem, such as `island 17, seat 3`.

    Raises:
        DataError: if the problem is not a game.
    """
    match = _ISLAND.fullmatch(problem.text.strip())
    if match is None:
        raise DataError(
            f"Problem {problem.id} ({problem.text[:60]!r}) is no game of Marooned: write it as 'island 17, seat 3', or "
            "make a file of them with python -m classroom_rl.environments.marooned.islands."
        )
    return int(match[1]), int(match[2])


def problem_text(seed: int, seat: int) -> str:
    """The problem of a seed and a seat."""
    return f"island {seed}, seat {seat}"


@dataclass
class Episode:
    """A game that is being played.

    Attributes:
        seat: the seat that the problem names.
        own: the model's seats: only `seat`, or in self-play all.
        players: a scripted player for every seat.
        most_decisions: the limit of decisions for each of the model's seats.
        prompt_ids: the prompt of the decision that is due; () before it is encoded.
        sampled: the number of messages that the model has sampled.
        shadow: the action that a scripted player of the same role would choose now. It sees what the model sees, and
            remembers earlier turns.
        _unpaid: by seat, the index of its last decision and its return before it, until the decision gets its reward.
    """

    id: str
    problem: Problem
    game: Game
    seat: int
    own: tuple[int, ...]
    players: Mapping[int, Player]
    most_decisions: int
    supervised: bool = False
    turns: list[Turn] = field(default_factory=list)
    buffer: TokenBuffer | None = None
    decisions: list[Decision] = field(default_factory=list)
    drafts: list[SampledDraft] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    rewards: dict[str, float | None] = field(default_factory=dict)
    state: str = DECISION
    sampled: int = 0
    shadow: Action | None = None
    failure: str | None = None
    overflow: str | None = None
    rejected: bool = False
    _unpaid: dict[int, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, id: str, problem: Problem, generation: Generation) -> "Episode":
        """A new game, played by the other seats up to the model's first decision.

        Raises:
            DataError: if the problem is not a game, or if there is no such seat.
        """
        seed, seat = island_of(problem)
        rules = PRESETS[generation.preset]
        if seat not in rules.seats:
            raise DataError(f"Problem {problem.id}: there is no seat {seat}; there are {rules.sailors}.")
        game = Game(rules, seed, traitor=generation.has_traitor)
        own_seats = rules.seats if generation.self_play else (seat,)
        players = cast_around(game, own_seats, generation)
        episode = cls(id, problem, game, seat, tuple(own_seats), players, generation.max_turns)
        episode._play_others()
        episode._next_decision()
        return episode

    @property
    def finished(self) -> bool:
        """Whether the episode has ended."""
        return self.state == END

    @property
    def answers(self) -> int:
        """The number of the model's messages so far, rejected ones included."""
        return self.sampled

    @property
    def role(self) -> str:
        """The role of the seat that the problem names."""
        return self.game.roles[self.seat]

    @property
    def due(self) -> int:
        """The seat for which the model decides now; if it is not the model's turn, the seat of the problem."""
        return self.game.seat if self.game.seat in self.own else self.seat

    @property
    def view(self) -> Observation:
        """What the sailor who decides knows now."""
        return observe(self.game, self.due)

    @property
    def plays_on(self) -> bool:
        """Whether it is the model's turn, and the seat has decisions left."""
        seat = self.game.seat
        return seat in self.own and sum(decision.seat == seat for decision in self.decisions) < self.most_decisions

    def add_draft(self, draft: SampledDraft) -> None:
        """Record a draft, to be reviewed by the supervisor."""
        self.drafts.append(draft)
        self.sampled += 1
        self.state = REVIEW

    def reject_draft(self, review: Review) -> None:
        """Record that the last draft was rejected: the model retries."""
        self.drafts[-1] = replace(self.drafts[-1], review=review)
        self.state = DECISION

    def act(self, turn: Turn) -> None:
        """Play the action of a message, and let the others play until the model's next decision."""
        if not self.drafts:
            self.sampled += 1
        self.turns.append(turn)
        self.drafts, self.prompt_ids = [], ()
        message, seat = parse_message(visible_text(turn.text)), self.due
        # Grade and fault are those of what the model wrote, even if a correction is played instead.
        written = parse_message(visible_text(turn.drafts[-1].text)) if turn.replaced else message
        fault = UNREADABLE if written.action is None else fault_in(self.view, self.game.rules, written.action)
        action, reason = "" if message.action is None else str(message.action), "" if fault is None else fault.text
        day, game_turn = self.game.state.day, self.game.state.turn
        self._unpaid[seat] = (len(self.decisions), self.game.returns[seat])
        self.decisions.append(Decision(day, game_turn, action, written.grade, reason, seat=seat))
        self.game.step(message.action)
        self._play_others()
        self._next_decision()

    def cut(self, reason: str) -> None:
        """End the game here because a context is full."""
        self.overflow, self.state = reason, END
        self._pay(*self.own)

    def _next_decision(self) -> None:
        self.state = DECISION if self.plays_on else END
        if self.plays_on:
            self._pay(self.due)
            self.turns.append(Turn(GAME, render(self.game, self.due)))
        else:
            self._pay(*self.own)

    def _pay(self, *seats: int) -> None:
        """Set the reward of the last decision of each of these seats to what it has earned until now."""
        for seat in seats:
            if (unpaid := self._unpaid.pop(seat, None)) is not None:
                index, return_before = unpaid
                earned = (self.game.returns[seat] - return_before) * self.game.rules.reward_scale
                self.decisions[index] = replace(self.decisions[index], reward=earned)

    def _play_others(self) -> None:
        game = self.game
        play_others(game, self.players, *self.own)
        if game.seat in self.own:
            rng = Random(f"{game.seed}|{game.steps}|shadow")
            self.shadow = self.players[game.seat].act(self.view, game.rules, rng)


def cast_around(game: Game, own_seats: Collection[int], generation: Generation) -> dict[int, Player]:
    """A scripted player for each seat. Those of the model's own seats are good players of their roles: they do not
    act, but suggest what would be right."""
    names = cycle(generation.colonists)
    other_roles = {seat: role for seat, role in game.roles.items() if seat not in own_seats}
    players = {
        seat: PLAYERS[generation.traitor if role == TRAITOR else next(names)]() for seat, role in other_roles.items()
    }
    return players | {seat: PLAYERS["traitor" if game.roles[seat] == TRAITOR else "builder"]() for seat in own_seats}


# Rewards -------------------------------------------------------------------------------------------------------------


def scaled_return(episode: Episode, seat: int) -> float:
    """The seat's return by the rules, scaled to be of the order of 1."""
    return sum(decision.reward for decision in _decisions(episode, seat))


def ship(episode: Episode, seat: int) -> float:
    """The share of the ship that is built, in [0, 1]. For the traitor, the share that is not built, or 0 if the traitor
    died or was removed."""
    progress = episode.game.ship_progress
    if episode.game.roles[seat] == COLONIST:
        return progress
    return 1 - progress if episode.game.state.sailors[seat].active else 0.0


def readable(episode: Episode, seat: int) -> float:
    """The share of the seat's messages in the exact grammar."""
    decisions = _decisions(episode, seat)
    return sum(decision.grade == VALID for decision in decisions) / max(len(decisions), 1)


def possible(episode: Episode, seat: int) -> float:
    """The share of the seat's messages with an action that was possible."""
    decisions = _decisions(episode, seat)
    return sum(decision.grade != INVALID and not decision.fault for decision in decisions) / max(len(decisions), 1)


def _decisions(episode: Episode, seat: int) -> list[Decision]:
    return [decision for decision in episode.decisions if decision.seat == seat]


REWARDS: dict[str, Callable[[Episode, int], float]] = {
    **{"return": scaled_return, "ship": ship, "readable": readable, "possible": possible},
}


def batch_metrics(records: Sequence[GameRecord]) -> dict[str, float]:
    """Means over the games of a batch: outcomes, progress of the ship, decisions, shares of well-formed and of possible
    decisions, and the reward of each role."""
    decisions = [decision for record in records for decision in record.decisions]
    metrics = {
        "marooned/ship_progress": fmean(record.ship_progress for record in records),
        "marooned/escaped_share": fmean(record.outcome == ESCAPED for record in records),
        "marooned/dead_share": fmean(record.outcome == DEAD for record in records),
        "marooned/decisions": len(decisions) / len(records),
    }
    if decisions:
        metrics |= {
            f"marooned/{grade}_share": fmean(decision.grade == grade for decision in decisions) for grade in GRADES
        }
        metrics["marooned/possible_share"] = fmean(
            decision.grade != INVALID and not decision.fault for decision in decisions
        )
    for role in (COLONIST, TRAITOR):
        rewards = [reward for record in records for player_role, reward in _rewards(record) if player_role == role]
        if rewards:
            metrics[f"marooned/reward_of_{role}"] = fmean(rewards)
    return metrics


def _rewards(record: GameRecord) -> list[tuple[str, float]]:
    """(role, reward) of the seat under training, or of all seats in self-play."""
    rewards = [(seat.role, seat.reward) for seat in record.seats] or [(record.role, record.reward)]
    return [(role, reward) for role, reward in rewards if reward is not None]


GRADES = (VALID, REPAIRABLE, INVALID)
