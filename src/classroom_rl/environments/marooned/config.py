"""Marooned's part of a configuration: its `generation` block, its rewards, checks, and what page and plots show."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from classroom_rl.config.base import EnvironmentConfig, SupervisionConfig
from classroom_rl.config.fields import Flag, Text, config_group
from classroom_rl.config.values import GRPO, check_choice
from classroom_rl.environments.marooned.players import PLAYERS
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.review import DEFAULT_PENALTIES, NONE
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.extensions import MetricPanel, RunView

HAS_SUPERVISOR = True
REWARD_NAMES = ("return", "ship", "readable", "possible")
STEP_REWARD = "step"
TURN_REWARD_NAMES = (STEP_REWARD,)


def default_penalties() -> dict[str, float]:
    """The penalty of each category of invalid actions."""
    return {category: penalty for category, penalty in DEFAULT_PENALTIES.items() if category != NONE}


@config_group
class Generation(EnvironmentConfig):
    """The `generation` block of Marooned (docs/marooned.md). The model plays the seat that a problem names. A game ends
    after `max_turns` of its decisions, in self-play of each seat."""

    preset: Text = "tiny"
    """The rules: `tiny` is a small island with short prompts, `seed` the whole game."""
    has_traitor: Flag = True
    """Whether one of the sailors is a traitor."""
    colonists: list[str] = field(default_factory=lambda: ["builder"])
    """The scripted players of the other colonists, repeated in this order: `builder`, `gatherer` (never builds or
    votes), `waiter`, `traitor`, `random`."""
    traitor: Text = "traitor"
    """The scripted player of the traitor, if the model does not play it."""
    self_play: Flag = False
    """Whether the model plays all seats. Every decision is then trained with the reward of its own seat, and colonists
    and traitors have separate baselines. Needs `algorithm: grpo`."""
    show_rules: Flag = True
    """Whether each prompt begins with the rules. A model that was fine-tuned on the game does not need them."""
    supervisor: SupervisionConfig = field(default_factory=lambda: SupervisionConfig(penalties=default_penalties()))
    """As for the classroom, with this game's categories."""


def rows_per_episode(generation: Generation) -> int:
    """The most decisions of a game. Each has its own prompt and is one training sample."""
    seats = PRESETS[generation.preset].sailors if generation.self_play else 1
    return generation.max_turns * seats


def default_weights(generation: Generation) -> dict[str, float]:
    """The default: only the scaled return of the seat under training."""
    return {"return": 1.0}


def check(config: Any) -> None:
    """Check Marooned's keys of a configuration.

    Raises:
        ConfigError: for a preset or a player that does not exist, and for `supervisor.show_critique`: every decision
            has its own prompt, which cannot show a critique.
    """
    generation = config.generation
    check_choice("generation.preset", generation.preset, tuple(PRESETS))
    if not generation.colonists:
        raise ConfigError(f"generation.colonists is empty: name one or more of {', '.join(PLAYERS)}.")
    for name in generation.colonists:
        check_choice("generation.colonists", name, tuple(PLAYERS))
    check_choice("generation.traitor", generation.traitor, tuple(PLAYERS))
    if generation.self_play:
        _check_self_play(config)
    if generation.supervisor.show_critique:
        raise ConfigError(
            "generation.supervisor.show_critique is true, but in Marooned an action is written again from the same "
            "prompt, without the critique: leave it out."
        )


def _check_self_play(config: Any) -> None:
    train = getattr(config, "train", None)  # an evaluation trains nothing
    if train is None:
        return
    if train.algorithm != GRPO:
        raise ConfigError(
            f"generation.self_play is true, but train.algorithm is {train.algorithm}, whose steps are those of one "
            "player: set train.algorithm=grpo, or self_play to false."
        )
    if train.shuffle_rewards:
        raise ConfigError(
            "train.shuffle_rewards is true, but in self-play every seat has a reward of its own, which it does not "
            "shuffle: set generation.self_play to false for this control."
        )


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"own decisions at most": (config.get("generation") or {}).get("max_turns")}


_PANELS = (
    MetricPanel(
        "The ship at the end of a game",
        "share",
        (
            ("marooned/ship_progress", "ship finished", "green"),
            ("marooned/escaped_share", "games that got away", "blue"),
            ("marooned/dead_share", "games in which all died", "red"),
        ),
    ),
    MetricPanel(
        "Actions of the model",
        "share of decisions",
        (
            ("marooned/valid_share", "in the exact grammar", "blue"),
            ("marooned/possible_share", "possible", "green"),
            ("marooned/repairable_share", "mended by rules", "grey"),
            ("marooned/invalid_share", "unreadable", "red"),
        ),
    ),
    MetricPanel(
        "Reward by role",
        "reward",
        (
            ("marooned/reward_of_colonist", "colonists", "blue"),
            ("marooned/reward_of_traitor", "traitors", "orange"),
        ),
    ),
)
RUN_VIEW = RunView(live_tab="game", facts=_facts, panels=_PANELS)
