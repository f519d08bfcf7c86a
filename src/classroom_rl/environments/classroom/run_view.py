"""What the page and the reports show of the classroom's runs."""

from collections.abc import Mapping
from typing import Any

from classroom_rl.config.values import ERROR_PERSONA
from classroom_rl.rollout.extensions import RunView


def error_share(config: Mapping[str, Any]) -> float | None:
    """Return the share of the student's messages that should contain an error, from a recorded configuration; None if
    it is unknown or no persona makes errors."""
    generation = config.get("generation") or {}
    rate, personas = generation.get("student_error_rate"), generation.get("student_personas_prompts_paths")
    if isinstance(personas, Mapping) and ERROR_PERSONA not in personas:
        return None
    if isinstance(rate, Mapping):
        total = sum(rate.values())
        return rate.get(ERROR_PERSONA, 0) / total if total else None
    return None if rate is None else float(rate)


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of lessons, by label."""
    generation = config.get("generation") or {}
    return {"tutor closes from message": generation.get("max_turns"), "error turns": error_share(config)}


def personas(config: Mapping[str, Any]) -> list[str]:
    """The student's personas."""
    return list((config.get("generation") or {}).get("student_personas_prompts_paths") or {})


VIEW = RunView(live_tab="chat", facts=facts, personas=personas)
