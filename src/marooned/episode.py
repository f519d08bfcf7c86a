"""One game with one seat under training: its decisions, the scripted others, and what it was worth.

Everything but the model's messages follows from the problem, so that a game can be played again from its messages.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from random import Random

from src.errors import DataError
from src.marooned.actions import Action
from src.marooned.config import Generation
from src.marooned.game import Game
from src.marooned.legality import Fault
from src.marooned.messages import INVALID, VALID, Message, parse_message
from src.marooned.observation import Observation, observe
from src.marooned.players import PLAYERS, Player, play_others
from src.marooned.presets import PRESETS
from src.marooned.render import render
from src.marooned.things import COLONIST, TRAITOR
from src.rollout.problem import Problem
from src.rollout.reviews import Review
from src.rollout.supervision import SampledDraft
from src.rollout.thoughts import visible_text
from src.rollout.tokens import TokenBuffer, Turn
from src.rollout.trajectory import Trajectory

DECISION, REVIEW, END = "DECISION", "REVIEW", "END"
GAME = "game"
"""The role of what the game shows before a decision."""
_ISLAND = re.compile(r"island (\d{1,9}), seat ([1-9])")


@dataclass(frozen=True)
class Decision:
    """What became of one message.

    Attributes:
        day, turn: when it was made.
        action: the action that was meant; "" if none could be read.
        grade: `valid`, `repairable` or `invalid`.
        fault: why the action was not possible; "" if it was.
        reward: the scaled reward of the seat from this decision to its next one.
    """

    day: int
    turn: int
    action: str
    grade: str
    fault: str
    reward: float = 0.0


class GameRecord(Trajectory):
    """A finished game of one seat. `outcome` is the game's; "" if it was not decided. `fell` says that the sailor of
    the seat died or was removed before that. The most decisions are a part of the task: a game that ends there is not
    truncated, and its return is what was earned until then."""

    preset: str = ""
    seat: int = 0
    role: str = ""
    outcome: str = ""
    ship_progress: float = 0.0
    fell: bool = False
    decisions: list[Decision] = []


def island_of(problem: Problem) -> tuple[int, int]:
    """The seed and the seat of a problem, such as `island 17, seat 3`.

    Raises:
        DataError: if it is none.
    """
    found = _ISLAND.fullmatch(problem.text.strip())
    if found is None:
        raise DataError(
            f"Problem {problem.id} ({problem.text[:60]!r}) is no game of Marooned: write it as 'island 17, seat 3', or "
            "make a file of them with python -m src.marooned.islands."
        )
    return int(found[1]), int(found[2])


def problem_text(seed: int, seat: int) -> str:
    """The problem of a seed and a seat."""
    return f"island {seed}, seat {seat}"


@dataclass
class Episode:
    """A game that is being played. `prompt_ids` is the prompt of the decision that is due, () before it is made.
    `shadow` is what a scripted player of the same role would do now: it sees what the model sees, and remembers."""

    id: str
    problem: Problem
    game: Game
    seat: int
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
        episode = cls(id, problem, game, seat, cast_around(game, seat, generation), generation.max_turns)
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
        """The role of the seat."""
        return self.game.roles[self.seat]

    @property
    def view(self) -> Observation:
        """What the sailor of the seat knows now."""
        return observe(self.game, self.seat)

    @property
    def plays_on(self) -> bool:
        """Whether the sailor of the seat has another decision to make."""
        return self.game.seat == self.seat and len(self.decisions) < self.most_decisions

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
        message, before = parse_message(visible_text(turn.text)), self.game.returns[self.seat]
        day, number = self.game.state.day, self.game.state.turn
        done = self.game.step(message.action)
        self._until_own_turn()
        reward = (self.game.returns[self.seat] - before) * self.game.rules.reward_scale
        self.decisions.append(_decision(day, number, message, done.fault, reward))
        self._next_decision()

    def cut(self, reason: str) -> None:
        """End the game here because a context is full."""
        self.overflow, self.state = reason, END

    def _next_decision(self) -> None:
        self.state = DECISION if self.plays_on else END
        if self.plays_on:
            self.turns.append(Turn(GAME, render(self.game, self.seat)))

    def _until_own_turn(self) -> None:
        game = self.game
        play_others(game, self.players, self.seat)
        if game.seat == self.seat:
            rng = Random(f"{game.seed}|{game.steps}|shadow")
            self.shadow = self.players[self.seat].act(self.view, game.rules, rng)


def cast_around(game: Game, seat: int, generation: Generation) -> dict[int, Player]:
    """A scripted player for each seat. The one in the seat under training is a good one of its role: it says what would
    be right."""
    names = cycle(generation.colonists)
    others = {each: role for each, role in game.roles.items() if each != seat}
    players = {each: PLAYERS[generation.traitor if role == TRAITOR else next(names)]() for each, role in others.items()}
    return players | {seat: PLAYERS["traitor" if game.roles[seat] == TRAITOR else "builder"]()}


def _decision(day: int, turn: int, message: Message, fault: Fault | None, reward: float) -> Decision:
    action = "" if message.action is None else str(message.action)
    return Decision(day, turn, action, message.grade, "" if fault is None else fault.text, reward)


# Rewards -------------------------------------------------------------------------------------------------------------


def scaled_return(episode: Episode) -> float:
    """What the rules paid the seat, scaled to be of the order of 1."""
    return sum(each.reward for each in episode.decisions)


def ship(episode: Episode) -> float:
    """How much of the ship is built, in [0, 1]; for the traitor, how much is not."""
    progress = episode.game.ship_progress
    return progress if episode.role == COLONIST else 1 - progress


def readable(episode: Episode) -> float:
    """The share of messages in the exact grammar."""
    return sum(each.grade == VALID for each in episode.decisions) / max(len(episode.decisions), 1)


def possible(episode: Episode) -> float:
    """The share of messages with an action that was possible."""
    return sum(each.grade != INVALID and not each.fault for each in episode.decisions) / max(len(episode.decisions), 1)


REWARDS: dict[str, Callable[[Episode], float]] = {
    **{"return": scaled_return, "ship": ship, "readable": readable, "possible": possible},
}
