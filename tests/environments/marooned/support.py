"""Games of the tests: played from seeds, and positions made by hand."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from random import Random

from fastapi import FastAPI

from classroom_rl.environments.marooned.actions import WAIT, parse_action
from classroom_rl.environments.marooned.config import Generation
from classroom_rl.environments.marooned.game import Game, StepResult
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import PLAYERS, Player
from classroom_rl.environments.marooned.presets import TINY
from classroom_rl.environments.marooned.routes import GameTable
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR, Place, Rules
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import Roles
from classroom_rl.server.error_responses import add_error_answers
from classroom_rl.viewer.routes import add_viewer
from tests.support.scripted_engine import ScriptedEngine

DISCUSSION = TINY.phases[2].last + 1
"""The first turn of the discussion."""
WEALTH = {"WOOD": 50, "METAL": 20, "FIBRE": 20, "APPLE": 10, "BERRY": 10}
ROLES = (COLONIST, COLONIST, COLONIST, COLONIST, TRAITOR)
"""Of a game made by hand: sailor 5 is the traitor."""


def made(rules: Rules = TINY, seed: int = 0, roles: tuple[str, ...] = ROLES) -> Game:
    """A clear first morning with an empty island."""
    game = Game(rules, seed, roles=roles)
    game.state.piles, game.state.foggy = {}, False
    return game


def do(game: Game, text: str, seat: int = 1) -> StepResult:
    """Have one sailor act now, whoever's turn it is."""
    game.state.seat = seat
    return game.step(parse_action(text))


def end_round(game: Game, *acts: str) -> StepResult:
    """A whole round: sailors 1, 2, … do these, the others wait. Returns the last step."""
    game.state.seat = game.state.active[0].seat
    texts = dict(enumerate(acts, start=1))
    while True:
        seat, when = game.seat, (game.state.day, game.state.turn)
        result = game.step(parse_action(texts[seat]) if texts.get(seat) else WAIT)
        if game.over or (game.state.day, game.state.turn) != when:
            return result


def end_day(game: Game) -> None:
    """Wait until the next day."""
    day = game.state.day
    while not game.over and game.state.day == day:
        game.step(WAIT)


def put(game: Game, seat: int, x: int, y: int, level: int = 0) -> None:
    """Put a sailor somewhere."""
    game.state.sailors[seat].place = Place(level, x, y)


def played(rules: Rules, seed: int, steps: int) -> Iterator[tuple[Game, StepResult]]:
    """A game of random and scripted players, drawn from the seed, step by step."""
    rng = Random(seed)
    game = Game(rules, seed)
    players = {seat: PLAYERS[rng.choice(["random", "random", "builder", "traitor"])]() for seat in game.roles}
    for _ in range(steps):
        if game.seat is None:
            return
        yield game, game.step(players[game.seat].act(observe(game, game.seat), rules, rng))


def play(game: Game, players: Mapping[int, Player], rng: Random) -> Game:
    """Play the game to its end, and return it."""
    while game.seat is not None:
        game.step(players[game.seat].act(observe(game, game.seat), game.rules, rng))
    return game


def clone(game: Game) -> Game:
    """A copy of the game that shares nothing with it except the rules, which never change."""
    return deepcopy(game, {id(game.rules): game.rules})


MODEL = "REASONING: I wait <b>here</b>.\nACTION: WAIT"


def game_app(tokenizer, folder: Path, context: int = 20_000) -> FastAPI:
    """The application of a server that plays Marooned, whose model waits."""
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "vllm_server.yaml").write_text("environment: marooned\n")
    app = FastAPI()
    add_error_answers(app)
    add_viewer(app, folder, live=True)
    engine = app.state.engine = ScriptedEngine(tokenizer, lambda prompt: MODEL)
    generation = Generation(max_tokens_in_conversation=20_000, max_tokens_per_turn=200)
    app.state.opened = GameTable(Roles({"teacher": engine}), generation, context, Sampling(1.0), 10.0)
    return app
