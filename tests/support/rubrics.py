"""A rubric of ten criteria, one of them a penalty, and a judge's answers by it."""

import json
from pathlib import Path
from typing import Any

import yaml

from classroom_rl.config.rubric import RubricCriterion

PENALTY = "gives_answer"
RUBRIC: list[dict[str, Any]] = [
    {"name": f"criterion_{number}", "question": f"Is number {number} there?", "weight": float(number)}
    for number in range(1, 9)
]
RUBRIC += [
    {"name": "warmth", "question": "How warm?", "weight": 4.0, "anchors": {1: "cold", 3: "polite", 5: "warm"}},
    {"name": PENALTY, "question": "Does the tutor give the answer?", "weight": -10.0},
]
"""The positive weights are 1 to 8 and 4: 40 in sum."""


def write_rubric(folder: Path, criteria: Any = RUBRIC) -> str:
    path = folder / "criteria.yaml"
    path.write_text(yaml.safe_dump(criteria, sort_keys=False), encoding="utf-8")
    return str(path)


def rubric_answer(left_out: str | None = None, **scores: Any) -> str:
    """An answer that gives each criterion its lowest score, unless `scores` has another."""
    answer: dict[str, Any] = {}
    for entry in RUBRIC:
        criterion = RubricCriterion.model_validate(entry | {"anchors": dict(entry.get("anchors", {0: "no", 1: "yes"}))})
        answer[f"{criterion.name}_reasoning"] = f"about {criterion.name}"
        answer[criterion.key] = scores.get(criterion.name, criterion.scale[0])
    answer.pop(f"{left_out}_score", None)
    return json.dumps(answer)
