"""The file of a counterfactual check, with every comparison, and its table for the terminal."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.evaluation.counterfactuals.comparing import Compared
from classroom_rl.evaluation.counterfactuals.figures import LEVEL, outcome_with_ci, price_difference
from classroom_rl.evaluation.counterfactuals.prices import JUDGE, OUTCOMES, SUPERVISOR
from classroom_rl.system.storage import write_whole

COMPARISONS_NAME = "counterfactuals.json"
_COMPARED = TypeAdapter(Compared)


def write_comparisons(folder: Path, compared: Compared) -> Path:
    """Write the comparisons, each with its differences in price and in outcome (other minus said), and return the path.
    Differences in outcome have intervals over pairs of playouts."""
    path = folder / COMPARISONS_NAME
    content: dict[str, Any] = asdict(compared)
    for entry, comparison in zip(content["comparisons"], compared.comparisons, strict=True):
        entry["difference"] = {
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


_NO_VALUE = "–"
_COLUMNS = (30, 4, 8, 24, 9)


def counterfactual_table(figures: Mapping[str, Any]) -> str:
    """The figures as text: the comparisons, then for each outcome the prices, the categories, and what predicts
    nothing."""
    if not figures["comparisons"]:
        return f"Counterfactuals: no message could be compared with another one. {_left_out(figures)}"
    kinds = ", ".join(f"{count} with a {kind}" for kind, count in figures["kinds"].items())
    head = (
        f"Counterfactuals: {figures['comparisons']} messages of {figures['lessons']} lessons, {kinds}; "
        f"{figures['playouts']} playouts a branch. {_left_out(figures)}"
    )
    outcomes = [_outcome_text(name, outcome_figures) for name, outcome_figures in figures["outcomes"].items()]
    return "\n\n".join([head, *outcomes])


def _left_out(figures: Mapping[str, Any]) -> str:
    labels = {
        "without_other": "without another message of another price",
        "unpriced": "without a verdict of the supervisor",
        "lost_playouts": "pairs of playouts lost to failures",
    }
    return "; ".join(f"{figures[key]} {label}" for key, label in labels.items() if figures[key])


def _outcome_text(name: str, figures: Mapping[str, Any]) -> str:
    lines = [f"Outcome “{name}”: {OUTCOMES[name]}"]
    lines.append(_aligned("price set by", "n", "", "rank correlation", "p", ""))
    for source, price in figures["prices"].items():
        lines.append(_price_row(source, price))
        if source in (SUPERVISOR, JUDGE):
            lines.append(_price_row("  its size alone", price["size"]))
    lines.append(_aligned("a message faulty by", "n", "price", "outcome against a better", "", ""))
    for category, harm in figures["categories"].items():
        value = _estimate_text(harm["mean"], harm["ci95"])
        lines.append(_aligned(category, str(harm["n"]), f"{harm['price']:+.2f}", value, "", harm["verdict"]))
    nothing = ", ".join(figures["predict_nothing"]) or "none was found to"
    lines.append(f"Predict nothing: {nothing}.")
    reliability = figures["reliability"]
    reliable = _NO_VALUE if reliability is None else f"{reliability:.2f}"
    shuffled = figures["shuffled"]
    lines.append(
        f"Reliability of the outcome differences {reliable}. Shuffled prices were found to predict nothing (p ≥ "
        f"{LEVEL:g}) in {shuffled['flagged']} of {shuffled['seeds']} seeds."
    )
    return "\n".join(line.rstrip() for line in lines)


def _price_row(label: str, agreement: Mapping[str, Any]) -> str:
    value = _estimate_text(agreement["rank_correlation"], agreement["ci95"])
    return _aligned(label, str(agreement["n"]), "", value, _p_text(agreement["p"]), agreement["verdict"])


def _aligned(*cells: str) -> str:
    *first, last = cells
    return " ".join([*(cell.ljust(width) for cell, width in zip(first, _COLUMNS, strict=True)), last])


def _estimate_text(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return _NO_VALUE
    return f"{value:+.2f}" + (f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else "")


def _p_text(value: float | None) -> str:
    if value is None:
        return ""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
