"""One seat of a game as an OpenEnv environment: the client sends the sailor's action, then the other sailors play."""

from random import Random
from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment

from classroom_rl.environments.marooned.actions import format_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import possible_actions
from classroom_rl.environments.marooned.messages import read_action
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.openenv_server.models import MaroonedAction, MaroonedObservation, MaroonedState
from classroom_rl.environments.marooned.players import PLAYERS, cast, play_others
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import observation_text, system_prompt

ISLANDS = 10**9


class MaroonedEnvironment(Environment[MaroonedAction, MaroonedObservation, MaroonedState]):
    """A game between one client and scripted sailors. Equal options and messages give equal games."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = MaroonedState()
        self._game: Game | None = None

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        preset: str = "tiny",
        seat: int | None = None,
        has_traitor: bool = True,
        colonists: str = "builder",
        traitor: str = "traitor",
        **unknown: Any,
    ) -> MaroonedObservation:
        """Begin a game, and play it up to the first decision of the seat.

        Args:
            seed: the island; None draws one.
            episode_id: a name for the game; None makes one.
            preset: the rules, `tiny` or `seed`.
            seat: the sailor to play, from 1; None takes the one that the island determines.
            has_traitor: whether one of the sailors is a traitor; the island determines which one.
            colonists, traitor: the names of the scripted players of the others.

        Raises:
            ValueError: for an unknown option or an invalid value.
        """
        if unknown:
            raise ValueError(f"reset has no option {', '.join(sorted(unknown))}")
        _check("preset", preset, PRESETS)
        _check("colonists", colonists, PLAYERS)
        _check("traitor", traitor, PLAYERS)
        _check("has_traitor", has_traitor, (True, False))
        if seed is not None and (type(seed) is not int or seed < 0):
            raise ValueError(f"seed is {seed!r}; it can be any whole number from 0")
        rules = PRESETS[preset]
        island = Random().randrange(ISLANDS) if seed is None else seed
        seat = Random(f"{island}:seat").choice(rules.seats) if seat is None else seat
        _check("seat", seat, rules.seats)
        self._game = Game(rules, island, traitor=has_traitor)
        self._players = cast(self._game, colonists, traitor)
        self._state = MaroonedState(
            episode_id=str(uuid4()) if episode_id is None else episode_id,
            preset=preset,
            island=island,
            seat=seat,
            role=self._game.roles[seat],
        )
        play_others(self._game, self._players, seat)
        return self._observation("", prompt=system_prompt(rules, self._state.role))

    def step(self, action: MaroonedAction, timeout_s: float | None = None, **kwargs: Any) -> MaroonedObservation:
        """Play the sailor's action. The others then play until the sailor's next decision, or until it acts no more.

        Raises:
            RuntimeError: if no game has begun, or if it is over for the sailor.
        """
        if self._game is None:
            raise RuntimeError("no game has begun: call reset; over plain HTTP each call is a session of its own")
        game, seat = self._game, self._state.seat
        if game.seat != seat:
            raise RuntimeError("the game is over for this sailor: call reset")
        fault = game.step(read_action(action.message)).fault
        play_others(game, self._players, seat)
        self._state.step_count += 1
        return self._observation("" if fault is None else fault.text)

    def _observation(self, fault: str, prompt: str = "") -> MaroonedObservation:
        """What the sailor knows now, with the reward since the last observation."""
        game, state = self._game, self._state
        total = game.returns[state.seat] * game.rules.reward_scale
        reward, state.total_reward = total - state.total_reward, total
        state.day, state.turn, state.ship_progress = game.state.day, game.state.turn, game.ship_progress
        state.outcome = game.outcome or ""
        return MaroonedObservation(
            text=observation_text(game.rules, observe(game, state.seat)),
            prompt=prompt,
            seat=state.seat,
            role=state.role,
            possible=[format_action(action) for action in possible_actions(game, state.seat)],
            fault=fault,
            outcome=state.outcome,
            reward=None if prompt else reward,
            done=game.seat != state.seat,
        )

    @property
    def state(self) -> MaroonedState:
        """The game so far."""
        return self._state


def _check(option: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; it can be {', '.join(map(str, choices))}")
