"""Scripted players. They see an observation and never the game, as a model does."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from classroom_rl.environments.marooned.actions import ACTIONS, SAMPLE_TEXT, WAIT, WORDS, Action
from classroom_rl.environments.marooned.builder import Builder
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import possible_in
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.rules import Rules
from classroom_rl.environments.marooned.saboteur import Saboteur
from classroom_rl.environments.marooned.things import STORABLE, TRAITOR


class Player(Protocol):
    """Somebody who plays one seat of one game; it may remember what it saw."""

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        """What to do now. An action that is not possible becomes WAIT."""
        ...


class Gatherer(Builder):
    """Gathers, stores and eats, and never builds or votes."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = [plan for plan in self.plans if plan not in (self.build, self.vote)]


class Waiter:
    """Waits."""

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        return WAIT


class RandomPlayer:
    """Does anything; one action in ten may not be possible."""

    def act(self, view: Observation, rules: Rules, rng: Random) -> Action:
        return any_action(rng) if rng.random() < 0.1 else rng.choice(possible_in(view, rules))


def any_action(rng: Random) -> Action:
    """Any action of the grammar, possible or not; but nobody thinks of poison in the store."""
    form = rng.choice(list(ACTIONS.values()))
    words = {**WORDS, "thing": STORABLE} if form.name in ("DEPOSIT", "WITHDRAW") else WORDS
    drawn: Mapping[str, Callable[[], str | int]] = {
        "number": lambda: rng.randint(1, 9),
        "sailor": lambda: rng.randint(1, 9),
        "text": lambda: SAMPLE_TEXT,
    }
    return Action(form.name, tuple(drawn[kind]() if kind in drawn else rng.choice(words[kind]) for kind in form.types))


PLAYERS: dict[str, Callable[[], Player]] = {
    "builder": Builder,
    "gatherer": Gatherer,
    "waiter": Waiter,
    "traitor": Saboteur,
    "random": RandomPlayer,
}
"""The scripted players by name; each call makes one for one seat of one game."""


def cast(game: Game, colonists: str = "builder", traitor: str = "traitor") -> dict[int, Player]:
    """A player for each seat: one kind for the colonists, one for the traitor."""
    return {seat: PLAYERS[traitor if role == TRAITOR else colonists]() for seat, role in game.roles.items()}


def play_others(game: Game, players: Mapping[int, Player], *seats: int) -> None:
    """Let the others play until a sailor of these seats has a decision to make, none of them acts any more, or the game
    is over. Equal for equal games: what a player draws follows from the seed and the step."""
    while game.seat not in (None, *seats) and any(game.state.sailors[seat].active for seat in seats):
        rng = Random(f"{game.seed}|{game.steps}|others")
        game.step(players[game.seat].act(observe(game, game.seat), game.rules, rng))


def play(game: Game, players: Mapping[int, Player], rng: Random) -> Game:
    """Play the game to its end, and return it."""
    while game.seat is not None:
        game.step(players[game.seat].act(observe(game, game.seat), game.rules, rng))
    return game
