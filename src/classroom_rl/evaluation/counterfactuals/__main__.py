"""Computes the figures of a counterfactual check again from its file, and checks the check with shuffled prices.

python -m classroom_rl.evaluation.counterfactuals FOLDER [--shuffles 20]

FOLDER is that of the evaluation, its logging.save_dir. Ends with status 1 if shuffled prices are found to predict
nothing in fewer than 19 of 20 seeds.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from classroom_rl.errors import ClassroomError
from classroom_rl.evaluation.counterfactuals.comparing import OUTCOMES
from classroom_rl.evaluation.counterfactuals.figures import (
    SHUFFLES,
    counterfactual_figures,
    counterfactual_table,
    read_comparisons,
    shuffled_check,
)

ENOUGH = 0.95
"""The share of seeds in which shuffled prices must predict nothing, or the check itself fails."""


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    options = _parser().parse_args(arguments)
    compared = read_comparisons(options.folder)
    print(counterfactual_table(counterfactual_figures(compared)))
    failures = 0
    for outcome in OUTCOMES:
        check = shuffled_check(compared.comparisons, outcome, options.shuffles)
        message = f"{outcome}: shuffled prices predict nothing in {check['flagged']} of {check['seeds']} seeds"
        passed = check["flagged"] >= ENOUGH * check["seeds"]
        print(f"\n{message}" if passed else f"\nerror: {message}", file=sys.stdout if passed else sys.stderr)
        failures += not passed
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the evaluation")
    parser.add_argument("--shuffles", type=_count, default=SHUFFLES, help=f"the number of seeds (default: {SHUFFLES})")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is no number of seeds: give at least 1")
    return value


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ClassroomError as error:
        sys.exit(f"error: {error}")
