"""The file of a counterfactual check: every comparison, with prices and outcomes, so that figures can be made again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.evaluation.counterfactuals.comparing import Compared
from classroom_rl.evaluation.counterfactuals.figures import outcome_with_ci, price_difference
from classroom_rl.evaluation.counterfactuals.outcome import OUTCOMES
from classroom_rl.system.storage import write_whole

COMPARISONS_NAME = "counterfactuals.json"
_COMPARED = TypeAdapter(Compared)


def write_comparisons(folder: Path, compared: Compared) -> Path:
    """Write the comparisons, each with its differences in price and in outcome (other minus said), the latter with
    intervals over pairs of playouts; returns the path."""
    path = folder / COMPARISONS_NAME
    content: dict[str, Any] = asdict(compared)
    for shown, comparison in zip(content["comparisons"], compared.comparisons, strict=True):
        shown["difference"] = {
            "price": {source: price_difference(comparison, source) for source in comparison.price_said},
            "outcome": {outcome: outcome_with_ci(comparison, outcome) for outcome in OUTCOMES},
        }
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read_comparisons(folder: Path) -> Compared:
    """Read a file of `write_comparisons`.

    Raises:
        DataError: if there is none, or it is damaged.
    """
    path = folder / COMPARISONS_NAME
    if not path.is_file():
        raise DataError(f"There is no {path}: eval.py writes it with counterfactuals.forks above 0.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for comparison in content["comparisons"]:
            del comparison["difference"]  # follows from the rest
        return _COMPARED.validate_python(content)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): measure again with eval.py.") from error
