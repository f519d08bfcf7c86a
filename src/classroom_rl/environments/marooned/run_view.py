"""What the page and the plots show of Marooned's runs."""

from collections.abc import Mapping
from typing import Any

from classroom_rl.rollout.extensions import MetricPanel, RunView


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of games, by label."""
    return {"own decisions at most": (config.get("generation") or {}).get("max_turns")}


PANELS = (
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
VIEW = RunView(live_tab="game", facts=facts, panels=PANELS)
