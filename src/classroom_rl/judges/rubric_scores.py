"""A judge's scores by a rubric of one's own: the schema that it answers in, its answer parsed, and the weighted sum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from classroom_rl.config.rubric import Rubric, weighted_score
from classroom_rl.errors import JudgeOutputError
from classroom_rl.judges.json_answer import number_in, quote


@dataclass(frozen=True)
class RubricScores:
    """The scores by a rubric.

    Attributes:
        values: each criterion's score as a share of its scale, 0 for its lowest anchor and 1 for its highest, by its
            key in the judge's JSON.
        final_reward: `weighted_score` of them, cut to [0, 1] and rounded to four decimal places.
    """

    values: dict[str, float] = field(hash=False)
    final_reward: float


def rubric_properties(rubric: Rubric) -> dict[str, Any]:
    """The properties of a JSON schema of the judge's answer: of each criterion a reason, then its score."""
    properties: dict[str, Any] = {}
    for criterion in rubric:
        low, high = criterion.scale
        properties[f"{criterion.name}_reasoning"] = {"type": "string"}
        properties[criterion.key] = {"type": "number", "description": f"from {low:g} to {high:g}"}
    return properties


def rubric_variables(rubric: Rubric) -> list[dict[str, Any]]:
    """The criteria as the judge's prompt template gets them. The judge is not told their weights."""
    return [
        {
            "name": criterion.name,
            "question": criterion.question,
            "anchors": [{"score": f"{score:g}", "text": text} for score, text in sorted(criterion.anchors.items())],
        }
        for criterion in rubric
    ]


def read_rubric_scores(rubric: Rubric, answer: dict[str, Any], text: str) -> RubricScores:
    """The scores in the JSON object of a judge's answer.

    Args:
        answer: the object.
        text: the whole answer, for error messages.

    Raises:
        JudgeOutputError: if a criterion's score is missing, not a finite number or out of its scale. No score is
            assumed in its place.
    """
    shares: dict[str, float] = {}
    for criterion in rubric:
        if criterion.key not in answer:
            raise JudgeOutputError(f"The judge's answer has no {criterion.key}: {quote(text)}")
        value, (low, high) = answer[criterion.key], criterion.scale
        number = number_in(value)
        if not math.isfinite(number) or not low <= number <= high:
            rule = f"it must be a number from {low:g} to {high:g}"
            raise JudgeOutputError(f"{criterion.key} is {quote(value)}; {rule}: {quote(text)}")
        shares[criterion.key] = (number - low) / (high - low)
    score = weighted_score((shares[criterion.key], criterion.weight) for criterion in rubric)
    return RubricScores(shares, round(min(1.0, max(0.0, score)), 4))


def mean_rubric_scores(attempts: Sequence[RubricScores]) -> RubricScores:
    """The means over several attempts at the same rubric. The reward is the mean of the attempts' rewards."""
    means = {key: fmean(scores.values[key] for scores in attempts) for key in attempts[0].values}
    return RubricScores(means, round(fmean(scores.final_reward for scores in attempts), 4))
