"""Draws what varies between conversations: the type, the student's name, and a persona for each student turn.

The draw depends only on (seed, problem id, step). All conversations of a group therefore have the same setup, on every
rank and after a restart: they differ by what the teacher did, not by luck.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from classroom_rl.config.values import ERROR_PERSONA
from classroom_rl.rollout.problem import Problem


class ConversationType(StrEnum):
    """Who opens: the teacher (GUIDED), or the student with an attempt at the problem (ATTEMPTED)."""

    GUIDED = "guided"
    ATTEMPTED = "attempt"


@dataclass(frozen=True)
class Setup:
    """The draw for one problem. `personas[i]` is the persona of the i-th student turn after the opening attempt."""

    type: ConversationType
    student_name: str | None
    personas: tuple[str, ...]


@dataclass(frozen=True)
class SetupOptions:
    """The options to draw from. `types` are equally likely, and so are `student_names`; `persona_weights` sum to 1."""

    types: tuple[ConversationType, ...]
    student_names: tuple[str | None, ...]
    persona_weights: Mapping[str, float]
    student_turns: int


def draw_setup(problem: Problem, seed: int, step: int, options: SetupOptions) -> Setup:
    """The setup of every conversation on `problem` in this step."""
    generator = random.Random(f"{seed}|{problem.id}|{step}")
    weights = options.persona_weights
    return Setup(
        type=generator.choice(options.types),
        student_name=generator.choice(options.student_names),
        personas=tuple(generator.choices(list(weights), list(weights.values()), k=options.student_turns)),
    )


def persona_weights(personas: Sequence[str], error_rate: float | Mapping[str, float]) -> dict[str, float]:
    """The probability of each persona: the error rate for `error_student`, and equal shares of the rest for the others.

    A single persona gets 1. Without an `error_student`, all are equally likely. A mapping as `error_rate` holds a
    weight for every persona, which is normalized.
    """
    if isinstance(error_rate, Mapping):
        total = sum(error_rate[name] for name in personas)
        return {name: error_rate[name] / total for name in personas}
    if len(personas) == 1 or ERROR_PERSONA not in personas:
        return {name: 1 / len(personas) for name in personas}
    others = [name for name in personas if name != ERROR_PERSONA]
    return {name: error_rate if name == ERROR_PERSONA else (1 - error_rate) / len(others) for name in personas}
