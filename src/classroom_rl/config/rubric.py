"""A rubric of one's own for a judge model: criteria in a YAML file, each with a question, a weight and a scale
(`judge_model.rubric`)."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from classroom_rl.errors import ConfigError

MOST_CRITERIA = 50
"""All criteria are asked in one request, so more would leave each too little of the judge's answer."""
TAKEN = ("task_final", "forward_progression", "overall_momentum")
"""Names of the built-in criteria, which are shown on other scales."""

Sentence = Annotated[str, Field(min_length=1, pattern=r"\S")]


class RubricCriterion(BaseModel):
    """A criterion of a rubric.

    Attributes:
        name: its name in figures; the judge's JSON has its score under `name_score`.
        question: what the judge answers by a score.
        weight: what a full score adds to the sum; a negative one is a penalty for what the question asks about.
        anchors: score → what it stands for; the judge may give any number from the lowest to the highest of them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,59}$")]
    question: Sentence
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    anchors: dict[Annotated[float, Field(allow_inf_nan=False)], Sentence] = {0.0: "no", 1.0: "yes"}

    @property
    def key(self) -> str:
        """The key of its score in the judge's JSON, in verdicts and in metrics."""
        return f"{self.name}_score"

    @property
    def scale(self) -> tuple[float, float]:
        """The lowest and the highest score."""
        return min(self.anchors), max(self.anchors)

    @property
    def best(self) -> float:
        """The score that pays most."""
        return self.scale[self.weight > 0]


Rubric = tuple[RubricCriterion, ...]
_CRITERIA = TypeAdapter(list[RubricCriterion])


def weighted_score(shares_and_weights: Iterable[tuple[float, float]]) -> float:
    """Σ weight × share / Σ of the positive weights: 1 if all that is wanted is there and nothing that is penalised, and
    below 0 if penalties outweigh it. It is TutorBench's ARR_w (Srinivasa et al., 2025, eq. 1) where shares are 0 or 1.

    Args:
        shares_and_weights: each criterion's score as a share of its scale, and its weight; one weight is positive.
    """
    pairs = list(shares_and_weights)
    return sum(share * weight for share, weight in pairs) / sum(weight for _, weight in pairs if weight > 0)


def load_rubric(path: str) -> Rubric:
    """Read the criteria of a rubric from a YAML file. Raises a `ConfigError` naming the file, the criterion, the rule
    and the fix."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"judge_model.rubric: there is no file {path}.") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"judge_model.rubric: {path} cannot be read as YAML: {error}.") from error
    if not isinstance(content, list) or not 0 < len(content) <= MOST_CRITERIA:
        raise ConfigError(
            f"judge_model.rubric: {path} must hold a list of 1 to {MOST_CRITERIA} criteria, such as "
            "- {name: hints, question: Does the tutor give hints?, weight: 2, anchors: {0: never, 1: always}}."
        )
    try:
        criteria = _CRITERIA.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        number, *field = first["loc"]
        criterion_name = content[number].get("name") if isinstance(content[number], dict) else content[number]
        location = f"criterion {number + 1} ({str(criterion_name)[:60]})"
        raise ConfigError(
            f"judge_model.rubric: {path}, {location}: {'.'.join(map(str, field)) or 'it'}: {first['msg']}."
        ) from error
    return _checked(path, tuple(criteria))


def _checked(path: str, rubric: Rubric) -> Rubric:
    counts = Counter(criterion.name for criterion in rubric)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ConfigError(f"judge_model.rubric: {path} has {', '.join(repeated)} twice: name each criterion once.")
    if reserved := [name for name in counts if name in TAKEN]:
        raise ConfigError(f"judge_model.rubric: {path} names a criterion {reserved[0]}, as a built-in one: rename it.")
    with_few_anchors = [criterion.name for criterion in rubric if len(criterion.anchors) < 2]
    if with_few_anchors:
        raise ConfigError(
            f"judge_model.rubric: {path}: the anchors of {with_few_anchors[0]} have no two scores: give at least two, "
            "such as {0: never, 1: always}."
        )
    if not any(criterion.weight > 0 for criterion in rubric):
        raise ConfigError(
            f"judge_model.rubric: {path} has no criterion with a positive weight: nothing could be earned."
        )
    return rubric
