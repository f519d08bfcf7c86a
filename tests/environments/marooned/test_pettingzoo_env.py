"""Marooned in PettingZoo: its own checks of environments, the rewards of the rules, and agents that leave."""

import subprocess
import sys
import warnings
from random import Random

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.environments.marooned import pettingzoo_env
from classroom_rl.environments.marooned.actions import format_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import possible_actions
from classroom_rl.environments.marooned.messages import format_message
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import cast
from classroom_rl.environments.marooned.presets import PRESETS, TINY
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR, RulesError
from classroom_rl.errors import ConfigError
from tests.environments.marooned.support import ROLES, played

WITHOUT = """
import sys
sys.modules["pettingzoo"] = None
from classroom_rl.environments.marooned import pettingzoo_env
try:
    pettingzoo_env.env()
except ImportError as error:
    print(error)
"""


def test_without_pettingzoo_the_error_says_how_to_get_it() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "pip install pettingzoo" in result.stdout, result.stderr


@pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)
def test_every_possible_action_is_a_command_and_every_command_can_be_read(rules) -> None:
    commands = pettingzoo_env.commands(rules)
    assert len(set(commands)) == len(commands)
    assert all(format_action(pettingzoo_env.read_action(command)) == command for command in commands)
    for seed in range(3):
        for game, _ in played(rules, seed, 400):
            if game.seat is not None:
                assert {format_action(action) for action in possible_actions(game, game.seat)} <= set(commands)


needs_pettingzoo = pytest.mark.skipif(
    pettingzoo_env._MISSING is not None, reason="pettingzoo is not installed: pip install -r requirements-dev.txt"
)


@needs_pettingzoo
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("actions", ["discrete", "text"])
def test_pettingzoo_accepts_it(preset: str, actions: str) -> None:
    """A warning is a failure, but for those that its checks give to all text and all dicts."""
    from pettingzoo.test import api_test

    expected = "Observation is not a NumPy array|space for each agent probably should be|Action mask .* all zeros"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=f".*({expected})")
        api_test(pettingzoo_env.env(preset, seed=1, actions=actions), num_cycles=100)


@needs_pettingzoo
@pytest.mark.parametrize("actions", ["discrete", "text"])
def test_equal_seeds_give_equal_games(actions: str) -> None:
    from pettingzoo.test import seed_test

    seed_test(lambda: pettingzoo_env.env(actions=actions), num_cycles=60)


def play_in_both(env, game: Game, message) -> dict[str, float]:
    """Scripted players play the same game here and in the environment; returns what the environment paid."""
    players, rng = cast(game), Random(0)
    paid = dict.fromkeys(env.possible_agents, 0.0)
    left = []
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, info = env.last()
        paid[agent] += reward
        assert not truncated and info["role"] == game.roles[int(agent[-1])]
        if terminated:
            left.append(agent)
            assert not env.unwrapped.possible(agent)
            env.step(None)
            continue
        assert game.seat == int(agent[-1])
        action = players[game.seat].act(observe(game, game.seat), game.rules, rng)
        env.step(message(env.unwrapped, observation, action))
        game.step(action)
    assert game.over and env.unwrapped.game.outcome == game.outcome
    assert sorted(left) == env.possible_agents, "each leaves once"
    return paid


@needs_pettingzoo
@pytest.mark.parametrize("seed", range(8))
def test_what_is_paid_is_the_scaled_return_of_the_rules(seed: int) -> None:
    env = pettingzoo_env.env("tiny", actions="text")
    env.reset(seed=seed)
    game = Game(TINY, seed)
    paid = play_in_both(env, game, lambda env, seen, action: format_message("so", action))
    scaled = {f"sailor_{seat}": amount * TINY.reward_scale for seat, amount in game.returns.items()}
    assert paid == pytest.approx(scaled)


@needs_pettingzoo
def test_the_mask_says_what_is_possible_and_numbers_are_commands() -> None:
    env = pettingzoo_env.env("tiny", seed=3)
    env.reset()

    def number(env, seen, action) -> int:
        chosen = env.commands.index(format_action(action)) if action.name != "SPEAK" else len(env.commands) - 1
        possible = {env.commands[index] for index in seen["action_mask"].nonzero()[0]}
        assert possible == {format_action(move) for move in possible_actions(env.game, env.game.seat)}
        assert not any(info["fault"] for info in env.infos.values())
        return chosen

    play_in_both(env, Game(TINY, 3), number)


@needs_pettingzoo
def test_who_dies_or_is_removed_leaves_and_the_others_play_on() -> None:
    env = pettingzoo_env.env("tiny", roles=ROLES, actions="text")
    env.reset(seed=0)
    while env.unwrapped.game.state.turn < TINY.turns:
        env.step("WAIT")
    for agent in env.possible_agents:
        assert env.agent_selection == agent
        env.step("WAIT" if agent == "sailor_5" else "VOTE 5")
    assert env.agent_selection == "sailor_5" and env.terminations["sailor_5"]
    assert env.last()[1] < TINY.rewards.removed * TINY.reward_scale * 0.9
    env.step(None)
    assert env.agents == ["sailor_1", "sailor_2", "sailor_3", "sailor_4"] and env.agent_selection == "sailor_1"
    assert not any(env.terminations.values())


@needs_pettingzoo
def test_a_message_in_any_script_reaches_the_others_and_what_cannot_be_read_fails() -> None:
    env = pettingzoo_env.env("tiny", seed=1, actions="text")
    env.reset()
    first, second = env.possible_agents[:2]
    env.step("REASONING: so\nACTION: SPEAK Привет, 你好")
    observation = env.last()[0]
    assert "sailor 1: Привет, 你好" in observation["text"] and env.observation_space(second).contains(observation)
    env.step("glub")
    assert (env.infos[first]["fault"], env.infos[second]["fault"]) == ("", "the message held no action")
    assert env.infos[second]["prompt"].startswith("5 sailors are stranded")


@needs_pettingzoo
def test_each_reset_goes_on_to_the_next_island() -> None:
    env = pettingzoo_env.env("tiny", seed=4)
    islands = []
    for seed in (None, None, 9, None):
        env.reset(seed=seed)
        islands.append(env.unwrapped.game.seed)
    assert islands == [4, 5, 9, 10]


@needs_pettingzoo
def test_the_game_can_be_drawn(capsys) -> None:
    env = pettingzoo_env.env("tiny", seed=4, render_mode="ansi")
    env.reset()
    assert "island:" in env.render() and not capsys.readouterr().out
    env = pettingzoo_env.env("tiny", seed=4, render_mode="human")
    env.reset()
    env.step(len(env.unwrapped.commands) - 1)
    assert "island:" in capsys.readouterr().out
    env.close()


@needs_pettingzoo
def test_wrong_arguments_and_actions_are_named() -> None:
    for wrong in ({"preset": "moon"}, {"actions": "signs"}, {"render_mode": "rgb_array"}):
        with pytest.raises(ConfigError, match="it can be"):
            pettingzoo_env.env(**wrong)
    env = pettingzoo_env.raw_env("tiny", roles=(COLONIST, TRAITOR))
    with pytest.raises(RulesError, match="5 sailors need as many roles"):
        env.reset()
    env = pettingzoo_env.raw_env("tiny", seed=1)
    env.reset()
    for wrong in (-1, len(env.commands), "WAIT", None):
        with pytest.raises(ValueError, match="is no action"):
            env.step(wrong)
