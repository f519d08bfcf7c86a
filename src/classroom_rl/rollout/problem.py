"""The problem that an episode is about."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict

_STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


@dataclass(frozen=True)
class Step:
    """An intermediate result of a problem's solution: its name, such as "the seats in total", and its value, in the
    notation of answers."""

    name: str
    value: str

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class SiblingProblem:
    """A problem of the same structure with other numbers. Its `steps` have the same names as the problem's."""

    problem: str
    answer: str
    steps: tuple[Step, ...] = ()

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class PostTestMaterial:
    """What a post-test on a maths problem needs besides its answer (docs/trusting_rewards.md). Raises a `ValueError` if
    a name, value, problem or answer is empty, two steps have the same name, or the steps of a sibling problem have
    other names than the problem's."""

    steps: tuple[Step, ...] = ()
    siblings: tuple[SiblingProblem, ...] = ()

    __pydantic_config__ = _STRICT

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError(f"two steps have the same name: {', '.join(names)}")
        all_steps = [*self.steps, *(step for sibling in self.siblings for step in sibling.steps)]
        if not all(step.name.strip() and step.value.strip() for step in all_steps):
            raise ValueError("a step has no name or no value")
        for sibling in self.siblings:
            if not sibling.problem.strip() or not sibling.answer.strip():
                raise ValueError("a sibling problem has no text or no answer")
            sibling_names = [step.name for step in sibling.steps]
            if sibling_names != names:
                raise ValueError(
                    f"a sibling problem has the steps {sibling_names}, and the problem has {names}: give the same "
                    "names in the same order, or no steps at all"
                )


@dataclass(frozen=True)
class Problem:
    """The problem of an episode: a maths problem, a lesson plan, a game. It has a text, and an answer for rewards that
    need one.

    Attributes:
        id: a hash of text and answer, the same on every rank and after a restart.
        material: what a post-test asks instead of the problem itself; empty for most problems.
    """

    id: str
    text: str
    answer: str = ""
    material: PostTestMaterial = field(default=PostTestMaterial(), repr=False, compare=False)

    @classmethod
    def of(cls, text: str, answer: str = "", material: PostTestMaterial | None = None) -> "Problem":
        """The problem with this text, answer and material."""
        digest = hashlib.sha256(json.dumps([text, answer]).encode()).hexdigest()
        return cls(digest[:16], text, answer, material or PostTestMaterial())


def material_of(problems: Sequence[Problem]) -> list[PostTestMaterial] | None:
    """The material of each problem; None if no problem has any."""
    materials = [problem.material for problem in problems]
    return materials if any(material != PostTestMaterial() for material in materials) else None
