"""Trains readers of a tutor's message on messages that people labelled:

    python -m classroom_rl.judges.moves.train --data cima.jsonl mrbench.jsonl mathdial.jsonl --out readers/mine

Each name is a local .jsonl or .json file, or a data set on the Hub (eth-nlped/mathdial). Rules and a classifier are
measured by cross-validation, and whichever agrees better with people reads the label. The folder holds no code; name it
in generation.readers_path. docs/classroom.md has the figures.
"""

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.judges.moves.classifier import Vectoriser, figure_names, fit_linear, require_sklearn, seen, texts_of
from classroom_rl.judges.moves.cross_validation import (
    BY_RULES,
    INNER_FOLDS,
    OUTER_FOLDS,
    Measured,
    check_both_occur,
    measure,
)
from classroom_rl.judges.moves.features import FEATURES_VERSION
from classroom_rl.judges.moves.labelled import CITATIONS, LICENCES, LabelledMessage, read_labelled
from classroom_rl.judges.moves.stored import FORMAT, save_readers
from classroom_rl.judges.readings import LABELS, interval_text


def train(names: Sequence[str], out: Path, split: str = "train", folds: int = OUTER_FOLDS) -> dict[str, Measured]:
    """Train readers on labelled messages and write them into a folder.

    Args:
        names: files or Hub data sets; those that belong to one data set are taken together.
        split: the split of Hub data sets.
        folds: of the cross-validation.

    Raises:
        DataError: if the data cannot be read, or is too little.
        ConfigError: if scikit-learn is not installed.
        StorageError: if the folder cannot be written.
    """
    require_sklearn()
    by_name = {name: read_labelled(name, split) for name in dict.fromkeys(names)}
    check_distinct(by_name)
    messages = [each for found in by_name.values() for each in found]
    measured = measure(messages, folds)
    vocabularies, tensors, readers = _fit(messages, measured)
    content = {
        "format": FORMAT,
        "features_version": FEATURES_VERSION,
        "figures": list(figure_names()),
        "card": _card(by_name, folds),
        "vocabularies": vocabularies,
        "readers": readers,
    }
    save_readers(out, content, tensors, card_text(content))
    return measured


def check_distinct(by_name: Mapping[str, Sequence[LabelledMessage]]) -> None:
    """Raise a `DataError` if half of a file's messages are also in another file: they would count twice."""
    known: dict[tuple, str] = {}
    for name, found in by_name.items():
        keys = [(each.source, each.lesson, each.exchange) for each in found]
        again = [known[key] for key in keys if key in known]
        if 2 * len(again) >= len(keys):
            raise DataError(
                f"{len(again)} of the {len(keys)} messages in {name} are also in {again[0]}: name one of the two."
            )
        known |= dict.fromkeys(keys, name)


def _fit(
    messages: Sequence[LabelledMessage], measured: Mapping[str, Measured]
) -> tuple[dict[str, dict[str, list[str]]], dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """The n-grams, tensors and readers of readers.json, fitted to all messages."""
    vectorisers: dict[str, Vectoriser] = {}
    tensors: dict[str, np.ndarray] = {}
    readers: dict[str, dict[str, Any]] = {}
    for label, found in measured.items():
        there = [each for each in messages if each.source == found.source]
        rows = [seen(label, each.exchange) for each in there]
        name, intercept = None, 0.0
        if found.chosen != BY_RULES:
            name = f"{found.source}.{'_'.join(texts_of(label))}"
            if name not in vectorisers:
                vectorisers[name] = Vectoriser.fit(rows, texts_of(label))
            given = np.array([each.labels[label] for each in there])
            check_both_occur(label, given)
            linear = fit_linear(vectorisers[name].tables(rows), given)
            intercept = linear.intercept
            tensors |= {f"{label}.{text}": each for text, each in linear.weights.items()}
            tensors[f"{label}.figures"] = linear.figure_weights
        readers[label] = _reader(found, name, intercept)
    for name, each in vectorisers.items():
        tensors |= {f"{name}.{text}.idf": ngrams.idf for text, ngrams in each.ngrams.items()}
    vocabularies = {
        name: {text: list(ngrams.vocabulary) for text, ngrams in each.ngrams.items()}
        for name, each in vectorisers.items()
    }
    return vocabularies, tensors, readers


def _reader(found: Measured, vocabularies: str | None, intercept: float) -> dict[str, Any]:
    return {
        "source": found.source,
        "by": found.chosen,
        "vocabularies": vocabularies,
        "intercept": intercept,
        "threshold": found.threshold,
        "measured": {kind: asdict(each) for kind, each in found.agreements.items()},
        "gain": found.gain[0],
        "gain_ci95": found.gain[1],
    }


def _card(by_name: Mapping[str, Sequence[LabelledMessage]], folds: int) -> dict[str, Any]:
    import sklearn

    data = []
    for name, found in by_name.items():
        for source in dict.fromkeys(each.source for each in found):
            there = [each for each in found if each.source == source]
            data.append(
                {
                    "name": Path(name).name if Path(name).is_file() else name,
                    "sha256": hashlib.sha256(Path(name).read_bytes()).hexdigest() if Path(name).is_file() else "",
                    "source": source,
                    "licence": LICENCES[source],
                    "messages": len(there),
                    "lessons": len({each.lesson for each in there}),
                }
            )
    return {"data": data, "folds": folds, "inner_folds": INNER_FOLDS, "scikit_learn": sklearn.__version__}


def card_text(content: Mapping[str, Any]) -> str:
    """The card of trained readers as Markdown: data, licences, and what was measured."""
    card = content["card"]
    data = [
        f"| {each['name']} | {each['source']} | {each['licence']} | {each['messages']} | {each['lessons']} |"
        for each in card["data"]
    ]
    rows = []
    for label, reader in content["readers"].items():
        for kind, found in reader["measured"].items():
            interval = f" {interval_text(found['ci95'])}" if found["ci95"] else ""
            mark = " (reads)" if kind == reader["by"] else ""
            rows.append(
                f"| {label} | {reader['source']} | {found['base_rate']:.2f} | {kind}{mark} | {found['kappa']:.2f}"
                f"{interval} | {_cell(found['precision'])} | {_cell(found['recall'])} |"
            )
    meanings = [f"- `{label}`: {LABELS[label]}" for label in content["readers"]]
    return "\n".join(
        [
            "# Readers of a tutor's message",
            "",
            "Each says whether a label holds for one message of a tutor. They hold words of the data that they were "
            "trained on, under its licence.",
            "",
            *meanings,
            "",
            "| data | set | licence | messages | lessons |",
            "|---|---|---|---|---|",
            *data,
            "",
            *(f"{source}: {CITATIONS[source]}." for source in dict.fromkeys(each["source"] for each in card["data"])),
            "",
            f"Agreement with people: {card['folds']}-fold cross-validation, all messages of a lesson in one fold; "
            f"thresholds by {card['inner_folds']} folds inside of each training part; 95 % intervals over "
            f"lessons. Fitted with scikit-learn {card['scikit_learn']}.",
            "",
            "| label | set | base rate | by | κ | precision | recall |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom_rl.judges.moves.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME", help="files, or data sets on the Hub")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    parser.add_argument("--split", default="train", help="the split of data sets on the Hub")
    parser.add_argument("--folds", type=int, default=OUTER_FOLDS, help="of the cross-validation")
    options = parser.parse_args(arguments)
    if options.folds < 2:
        parser.error("--folds must be at least 2")
    try:
        measured = train(options.data, options.out, options.split, options.folds)
    except ClassroomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for label, found in measured.items():
        best = found.agreements[found.chosen]
        interval = f" {interval_text(best.ci95)}" if best.ci95 else ""
        print(f"{label:20} {found.chosen:18} κ {best.kappa:.2f}{interval}  base {best.base_rate:.2f}")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
