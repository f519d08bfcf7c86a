"""What the program draws before a conversation begins: its type, the student's name, and a persona for each student
turn.

The draw depends on (seed, problem id, step) alone. So it is equal for all conversations of a group, on every rank and
after a restart, and the group differs by what the teacher did, not by luck.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from src.rollout.problem import Problem

ERROR_PERSONA = "error_student"
"""The persona that is told to err."""


class ConversationType(StrEnum):
    """Who opens: the teacher (GUIDED), or the student with an attempt at the problem (ATTEMPTED)."""

    GUIDED = "guided"
    ATTEMPTED = "attempt"


@dataclass(frozen=True)
class Setup:
    """The draw for one problem. `personas[i]` is the prompt of the i-th student turn after the opening attempt."""

    type: ConversationType
    student_name: str | None
    personas: tuple[str, ...]


@dataclass(frozen=True)
class SetupOptions:
    """What can be drawn. `types` are equally likely, so are `student_names`; `persona_weights` sum to one."""

    types: tuple[ConversationType, ...]
    student_names: tuple[str | None, ...]
    persona_weights: Mapping[str, float]
    student_turns: int


def draw_setup(problem: Problem, seed: int, step: int, options: SetupOptions) -> Setup:
    """The setup of every conversation on `problem` in this step."""
    generator = random.Random(f"{seed}|{problem.id}|{step}")
    return Setup(
        type=generator.choice(options.types),
        student_name=generator.choice(options.student_names),
        personas=_draw_personas(generator, options.persona_weights, options.student_turns),
    )


def _draw_personas(generator: random.Random, weights: Mapping[str, float], count: int) -> tuple[str, ...]:
    names: Sequence[str] = list(weights)
    return tuple(generator.choices(names, [weights[name] for name in names], k=count))


def persona_weights(personas: Sequence[str], error_rate: float | Mapping[str, float]) -> dict[str, float]:
    """`error_student` with the error rate, the others sharing the rest; a single persona always. A mapping gives every
    persona its own weight."""
    if isinstance(error_rate, Mapping):
        total = sum(error_rate[name] for name in personas)
        return {name: error_rate[name] / total for name in personas}
    if len(personas) == 1 or ERROR_PERSONA not in personas:
        return {name: 1 / len(personas) for name in personas}
    others = [name for name in personas if name != ERROR_PERSONA]
    return {name: error_rate if name == ERROR_PERSONA else (1 - error_rate) / len(others) for name in personas}
