"""One game with one seat under training: its decisions, the scripted others, and what it was worth.

Everything but the model's messages follows from the problem, so that a game can be played again from its messages.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from random import Random
from statistics import fmean

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
"""The role of what the game shows before a decision."""
_ISLAND = re.compile(r"island (\d{1,9}), seat ([1-9])")


@dataclass(frozen=True)
class Decision:
    """What became of one message of the model.

    Attributes:
        day, turn: when it was made.
        seat: whose it was.
        action: the action that was done, the supervisor's correction included; "" if none could be read.
        grade: how the model wrote it: `valid`, `repairable` or `invalid`.
        fault: why the action that the model wrote was not possible; "" if it was.
        reward: the scaled reward of the seat from this decision to its next one.
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
    """What a seat had of a game that the model played alone.

    Attributes:
        seat, role: the seat, and the role of its sailor.
        reward: the weighted sum of its rewards.
    """

    seat: int
    role: str
    reward: float | None


class GameRecord(Trajectory):
    """A finished game. `seat` and `role` are those under training. `outcome` is the game's; "" if it was not decided.
    `fell` says that the sailor of the seat died or was removed before that. The most decisions are a part of the task:
    a game that ends there is not truncated, and its return is what was earned until then. `seats` is empty but in
    self-play, where the model plays all seats: then `decisions` holds those of all of them, and `reward` is that of the
    seat that the problem names."""

    preset: str = ""
    seat: int = 0
    role: str = ""
    outcome: str = ""
    ship_progress: float = 0.0
    fell: bool = False
    decisions: list[Decision] = []
    seats: list[SeatReward] = []

    @property
    def players(self) -> list[PlayerOutcome]:
        """The seats of self-play, with the numbers of their decisions."""
        return [
            PlayerOutcome(
                each.role,
                each.reward,
                tuple(number for number, decision in enumerate(self.decisions) if decision.seat == each.seat),
            )
            for each in self.seats
        ]


def island_of(problem: Problem) -> tuple[int, int]:
    """The seed and the seat of a problem, such as `island 17, seat 3`.

    Raises:
        DataError: if it is none.
    """
    found = _ISLAND.fullmatch(problem.text.strip())
    if found is None:
        raise DataError(
            f"Problem {problem.id} ({problem.text[:60]!r}) is no game of Marooned: write it as 'island 17, seat 3', or "
            "make a file of them with python -m classroom_rl.environments.marooned.islands."
        )
    return int(found[1]), int(found[2])


def problem_text(seed: int, seat: int) -> str:
    """The problem of a seed and a seat."""
    return f"island {seed}, seat {seat}"


@dataclass
class Episode:
    """A game that is being played. The model plays `own` seats: that of the problem, or in self-play all of them.
    `prompt_ids` is the prompt of the decision that is due, () before it is made. `shadow` is what a scripted player of
    the same role would do now: it sees what the model sees, and remembers."""

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
        """A new game, played by the others up to the first decision of the seat.

        Raises:
            DataError: if the problem is no game, or if there is no such seat.
        """
        seed, seat = island_of(problem)
        rules = PRESETS[generation.preset]
        if seat not in rules.seats:
            raise DataError(f"Problem {problem.id}: there is no seat {seat}; there are {rules.sailors}.")
        game = Game(rules, seed, traitor=generation.has_traitor)
        own = rules.seats if generation.self_play else (seat,)
        players = cast_around(game, own, generation)
        episode = cls(id, problem, game, seat, tuple(own), players, generation.max_turns)
        episode._until_own_turn()
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
        """The seat whose decision the model makes now."""
        return self.game.seat if self.game.seat in self.own else self.seat

    @property
    def view(self) -> Observation:
        """What the sailor who decides knows now."""
        return observe(self.game, self.due)

    @property
    def plays_on(self) -> bool:
        """Whether a sailor of the model has another decision to make."""
        seat = self.game.seat
        return seat in self.own and sum(each.seat == seat for each in self.decisions) < self.most_decisions

    def add_draft(self, draft: SampledDraft) -> None:
        """Put a message before the supervisor."""
        self.drafts.append(draft)
        self.sampled += 1
        self.state = REVIEW

    def reject_draft(self, review: Review) -> None:
        """The last draft was rejected: the model writes its message again."""
        self.drafts[-1] = replace(self.drafts[-1], review=review)
        self.state = DECISION

    def act(self, turn: Turn) -> None:
        """A message enters the game: its action is done, and the others play until the next decision."""
        if not self.drafts:
            self.sampled += 1
        self.turns.append(turn)
        self.drafts, self.prompt_ids = [], ()
        done, seat = parse_message(visible_text(turn.text)), self.due
        written = parse_message(visible_text(turn.drafts[-1].text)) if turn.replaced else done
        fault = UNREADABLE if written.action is None else fault_in(self.view, self.game.rules, written.action)
        action, reason = "" if done.action is None else str(done.action), "" if fault is None else fault.text
        day, number = self.game.state.day, self.game.state.turn
        self._unpaid[seat] = (len(self.decisions), self.game.returns[seat])
        self.decisions.append(Decision(day, number, action, written.grade, reason, seat=seat))
        self.game.step(done.action)
        self._until_own_turn()
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
        """The last decision of these seats gets what it earned until now."""
        for seat in seats:
            if (unpaid := self._unpaid.pop(seat, None)) is not None:
                place, before = unpaid
                earned = (self.game.returns[seat] - before) * self.game.rules.reward_scale
                self.decisions[place] = replace(self.decisions[place], reward=earned)

    def _until_own_turn(self) -> None:
        game = self.game
        play_others(game, self.players, *self.own)
        if game.seat in self.own:
            rng = Random(f"{game.seed}|{game.steps}|shadow")
            self.shadow = self.players[game.seat].act(self.view, game.rules, rng)


def cast_around(game: Game, own: Collection[int], generation: Generation) -> dict[int, Player]:
    """A scripted player for each seat. Those in the model's own seats are good ones of their roles: they say what would
    be right."""
    names = cycle(generation.colonists)
    others = {each: role for each, role in game.roles.items() if each not in own}
    players = {each: PLAYERS[generation.traitor if role == TRAITOR else next(names)]() for each, role in others.items()}
    return players | {seat: PLAYERS["traitor" if game.roles[seat] == TRAITOR else "builder"]() for seat in own}


# Rewards -------------------------------------------------------------------------------------------------------------


def scaled_return(episode: Episode, seat: int) -> float:
    """What the rules paid the seat, scaled to be of the order of 1."""
    return sum(each.reward for each in _decisions(episode, seat))


def ship(episode: Episode, seat: int) -> float:
    """How much of the ship is built, in [0, 1]; for the traitor, how much is not, and nothing if the traitor fell."""
    progress = episode.game.ship_progress
    if episode.game.roles[seat] == COLONIST:
        return progress
    return 1 - progress if episode.game.state.sailors[seat].active else 0.0


def readable(episode: Episode, seat: int) -> float:
    """The share of the seat's messages in the exact grammar."""
    own = _decisions(episode, seat)
    return sum(each.grade == VALID for each in own) / max(len(own), 1)


def possible(episode: Episode, seat: int) -> float:
    """The share of the seat's messages with an action that was possible."""
    own = _decisions(episode, seat)
    return sum(each.grade != INVALID and not each.fault for each in own) / max(len(own), 1)


def _decisions(episode: Episode, seat: int) -> list[Decision]:
    return [each for each in episode.decisions if each.seat == seat]


REWARDS: dict[str, Callable[[Episode, int], float]] = {
    **{"return": scaled_return, "ship": ship, "readable": readable, "possible": possible},
}


def batch_metrics(records: Sequence[GameRecord]) -> dict[str, float]:
    """Means over the games of a batch: outcomes, the ship, decisions, how they were written and whether they were
    possible, and the reward of each role."""
    decisions = [decision for record in records for decision in record.decisions]
    metrics = {
        "marooned/ship_progress": fmean(record.ship_progress for record in records),
        "marooned/escaped_share": fmean(record.outcome == ESCAPED for record in records),
        "marooned/dead_share": fmean(record.outcome == DEAD for record in records),
        "marooned/decisions": len(decisions) / len(records),
    }
    if decisions:
        metrics |= {f"marooned/{grade}_share": fmean(each.grade == grade for each in decisions) for grade in GRADES}
        metrics["marooned/possible_share"] = fmean(each.grade != INVALID and not each.fault for each in decisions)
    for role in (COLONIST, TRAITOR):
        rewards = [reward for record in records for own, reward in _rewards(record) if own == role]
        if rewards:
            metrics[f"marooned/reward_of_{role}"] = fmean(rewards)
    return metrics


def _rewards(record: GameRecord) -> list[tuple[str, float]]:
    """(role, reward) of the seat under training, or of all seats in self-play."""
    found = [(each.role, each.reward) for each in record.seats] or [(record.role, record.reward)]
    return [(role, reward) for role, reward in found if reward is not None]


GRADES = (VALID, REPAIRABLE, INVALID)
