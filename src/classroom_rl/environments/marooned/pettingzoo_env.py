"""Marooned for PettingZoo: the agents `sailor_1`, `sailor_2`, … take turns.

An observation is a dict. `text` is what the sailor knows now, as a model would read it. With `actions="discrete"`, an
action is the index of a command in a fixed list, and the observation has an `action_mask` of the possible commands.
With `actions="text"`, an action is a message (`REASONING: …`, `ACTION: …`) or just a command, such as `MOVE NORTH`.
An impossible or unreadable action becomes WAIT and costs a small penalty.

A sailor who dies or is removed by a vote is terminated; PettingZoo removes the agent with its next step, whose action
must be None. The end of a game terminates all remaining agents. Nothing is ever truncated.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from classroom_rl.environments.marooned.actions import ACTIONS, SAMPLE_TEXT, WORDS, Action, action_of, format_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import possible_actions
from classroom_rl.environments.marooned.messages import read_action
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import observation_text, render, system_prompt
from classroom_rl.environments.marooned.rules import STORABLE, Rules
from classroom_rl.errors import ConfigError

try:
    import numpy as np
    from gymnasium import spaces
    from pettingzoo import AECEnv
    from pettingzoo.utils import wrappers
except ImportError as error:
    _MISSING: ImportError | None = error
    AECEnv = _Text = object
else:
    _MISSING, _Text = None, spaces.Text

DISCRETE, TEXT = "discrete", "text"
LONGEST_TEXT = 100_000
"""The most characters of a text in the spaces. Real texts have some hundreds to some thousands."""
ISLANDS = 10**9
"""Drawn seeds are below this number, as in the files of problems."""


def env(preset: str = "tiny", seed: int | None = None, **options: Any) -> "AECEnv":
    """The game in PettingZoo's usual wrappers, which refuse actions outside the space and calls in the wrong order.
    Arguments and errors are those of `raw_env`."""
    game = raw_env(preset, seed, **options)
    if game.actions == DISCRETE:
        game = wrappers.AssertOutOfBoundsWrapper(game)
    return wrappers.OrderEnforcingWrapper(game)


def commands(rules: Rules) -> tuple[str, ...]:
    """The fixed list of commands for discrete actions: every command that can ever be possible under these rules. Free
    text is a sample text."""
    return tuple(format_action(action) for form in ACTIONS for action in _actions_of(form, rules))


def _actions_of(name: str, rules: Rules) -> Iterator[Action]:
    if name in ("UP", "DOWN") and not rules.stairs:
        return
    max_pieces = rules.gather_limit if name == "GATHER" else rules.pack
    words = {**WORDS, "part": tuple(rules.part), "food": tuple(rules.energy.food), "text": (SAMPLE_TEXT,)}
    if name in ("DEPOSIT", "WITHDRAW"):
        words["thing"] = STORABLE
    words |= {"number": range(1, min(max_pieces, 99) + 1), "sailor": rules.seats}
    arguments: list[tuple[str | int, ...]] = [()]
    for kind in ACTIONS[name].types:
        arguments = [(*args, word) for args in arguments for word in words[kind]]
    yield from (action_of(name, *args) for args in arguments)


class AnyText(_Text):
    """All texts of at most `LONGEST_TEXT` characters, in any script. `sample` draws one of `samples`."""

    def __init__(self, samples: Sequence[str]):
        super().__init__(LONGEST_TEXT, min_length=0)
        self.samples = tuple(samples)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text and not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """One of the sample texts; masks are ignored."""
        return self.samples[int(self.np_random.integers(len(self.samples)))]

    def __repr__(self) -> str:
        return f"AnyText(at most {self.max_length} characters)"

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts in any script cannot be flattened to a fixed-size array."""
        return False


class raw_env(AECEnv):
    """The game without wrappers.

    Args:
        preset: the rules, `tiny` or `seed`.
        seed: the island of the first game. Each `reset` without a seed goes to the next island. None draws one.
        has_traitor: whether one of the sailors is a traitor; the island determines which one.
        roles: the roles of sailors 1, 2, …, instead of those that the island determines.
        actions: `discrete` or `text`.
        render_mode: with `ansi`, `render` returns text; with `human`, it prints. None is like `ansi`.

    Attributes:
        commands: the commands of discrete actions, by index.
        game: the current game. It contains what the sailors must not know.

    `infos` contains for each agent its `role`, its `prompt` (the rules as a model reads them, constant during a game),
    its `fault` (why its last action was not possible; "" if it was), and the game's `outcome` ("" until its end).
    Rewards are those of the rules, multiplied by `rules.reward_scale`.

    Raises:
        ImportError: if pettingzoo is not installed.
        ConfigError: if there is no such preset, render mode or form of actions.
        RulesError: if the roles do not fit the rules.
    """

    metadata = {"name": "marooned_v0", "render_modes": ["ansi", "human"], "is_parallelizable": False}

    def __init__(
        self,
        preset: str = "tiny",
        seed: int | None = None,
        has_traitor: bool = True,
        roles: Sequence[str] | None = None,
        actions: str = DISCRETE,
        render_mode: str | None = None,
    ):
        if _MISSING is not None:
            raise ImportError(f"Marooned for PettingZoo needs pettingzoo: pip install pettingzoo ({_MISSING})")
        for key, value, choices in (
            ("preset", preset, tuple(PRESETS)),
            ("actions", actions, (DISCRETE, TEXT)),
            ("render_mode", render_mode, (None, *self.metadata["render_modes"])),
        ):
            if value not in choices:
                raise ConfigError(f"{key} is {value!r}; it can be {', '.join(map(str, choices))}")
        super().__init__()
        self.rules, self.actions, self.render_mode = PRESETS[preset], actions, render_mode
        self.commands = commands(self.rules)
        self.possible_agents = [f"sailor_{seat}" for seat in self.rules.seats]
        self.agents: list[str] = []
        self._seats = dict(zip(self.possible_agents, self.rules.seats, strict=True))
        self._setup = {"roles": roles, "traitor": has_traitor}
        self._next_island = Random().randrange(ISLANDS) if seed is None else seed
        self._number_of = {command: index for index, command in enumerate(self.commands)}
        self._spaces = {agent: (self._observations(), self._choices()) for agent in self.possible_agents}

    def _observations(self) -> "spaces.Dict":
        parts: dict[str, Any] = {"text": AnyText(("",))}
        if self.actions == DISCRETE:
            parts["action_mask"] = spaces.MultiBinary(len(self.commands))
        return spaces.Dict(parts)

    def _choices(self) -> "spaces.Space":
        if self.actions == DISCRETE:
            return spaces.Discrete(len(self.commands))
        return AnyText(self.commands)

    def observation_space(self, agent: str) -> "spaces.Space":
        """A dict with `text`, and for discrete actions with `action_mask`: int8 of shape (number of commands,), 1 where
        the command is possible."""
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> "spaces.Space":
        """`Discrete(len(commands))`, or any text."""
        return self._spaces[agent][1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin the game of an island; `options` are ignored."""
        island = self._next_island if seed is None else seed
        self._next_island = island + 1
        self.game = Game(self.rules, island, **self._setup)
        self.agents = self.possible_agents.copy()
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        roles = {agent: self.game.roles[seat] for agent, seat in self._seats.items()}
        self.infos = {
            agent: {"role": role, "prompt": system_prompt(self.rules, role), "fault": "", "outcome": ""}
            for agent, role in roles.items()
        }
        self.agent_selection = self._whose_turn()
        self._skip_agent_selection = None

    def observe(self, agent: str) -> dict[str, Any]:
        """What a sailor knows now. For a sailor who acts no more, the mask is zero everywhere."""
        seat = self._seats[agent]
        observation: dict[str, Any] = {"text": observation_text(self.rules, observe(self.game, seat))}
        if self.actions == DISCRETE:
            mask = np.zeros(len(self.commands), dtype=np.int8)
            mask[[self._number_of[command] for command in self.possible(agent)]] = 1
            observation["action_mask"] = mask
        return observation

    def possible(self, agent: str) -> list[str]:
        """The commands that are possible for a sailor now. Commands with free text have a sample text."""
        return [format_action(action) for action in possible_actions(self.game, self._seats[agent])]

    def step(self, action: Any) -> None:
        """Take the action of the agent whose turn it is: the index of a command, a text, or None if it is terminated.

        Raises:
            ValueError: if a terminated agent is given an action, or if the action is not in the action space.
        """
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        if not self.action_space(agent).contains(action):
            raise ValueError(f"{action!r:.80} is no action; there are {self.action_space(agent)}")
        self._cumulative_rewards[agent] = 0.0
        text = self.commands[action] if self.actions == DISCRETE else action
        result = self.game.step(read_action(text))
        scale = self.rules.reward_scale
        self.rewards = {name: result.rewards[self._seats[name]] * scale for name in self.agents}
        self.infos[agent]["fault"] = "" if result.fault is None else result.fault.text
        for name in self.agents:
            self.terminations[name] = self.game.over or not self.game.state.sailors[self._seats[name]].active
            self.infos[name]["outcome"] = self.game.outcome or ""
        self.agent_selection = self._whose_turn()
        self._accumulate_rewards()
        self._deads_step_first()
        if self.render_mode == "human":
            self.render()

    def _whose_turn(self) -> str:
        """The agent that acts next; when the game is over, any remaining one."""
        return self.agents[0] if self.game.seat is None else f"sailor_{self.game.seat}"

    def render(self) -> str | None:
        """The whole island as text, including what is hidden from the sailors; printed if the mode is `human`."""
        text = render(self.game)
        if self.render_mode == "human":
            print(text)
            return None
        return text

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
