"""Trains classifiers of tutor moves ("readers") on messages with labels by human annotators:

    python -m classroom_rl.judges.moves.train --data cima.jsonl mrbench.jsonl mathdial.jsonl --out readers/mine

Each name is a local .jsonl or .json file, or a data set on the Hub (eth-nlped/mathdial). For each label, rules and a
linear classifier are compared by cross-validation, and the one with the higher kappa is used. The output folder
contains no code; set generation.readers_path to it. docs/classroom.md reports the results.
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
from classroom_rl.judges.moves.classifier import (
    FEATURES_VERSION,
    Vectoriser,
    figure_names,
    fit_linear,
    require_sklearn,
    seen,
    texts_of,
)
from classroom_rl.judges.moves.cross_validation import (
    BY_RULES,
    INNER_FOLDS,
    OUTER_FOLDS,
    Measured,
    check_both_occur,
    measure,
)
from classroom_rl.judges.moves.labelled import CITATIONS, LICENCES, LabelledMessage, read_labelled
from classroom_rl.judges.moves.stored import FORMAT, save_readers
from classroom_rl.judges.readings import LABELS, interval_text


def train(names: Sequence[str], out: Path, split: str = "train", folds: int = OUTER_FOLDS) -> dict[str, Measured]:
    """Train move classifiers on labelled messages, and write them into the folder `out`. Returns the evaluation of each
    label.

    Args:
        names: files or Hub data sets (of which a `split` is taken). Several that belong to the same data set are
            combined.
        folds: the number of folds of the outer cross-validation.

    Raises:
        DataError: if the data cannot be read, or are too few.
        ConfigError: if scikit-learn is not installed.
        StorageError: if the folder cannot be written.
    """
    require_sklearn()
    by_name = {name: read_labelled(name, split) for name in dict.fromkeys(names)}
    check_distinct(by_name)
    messages = [message for part in by_name.values() for message in part]
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
    """Raise a `DataError` if at least half of a file's messages are also in the files before it: they would count
    twice."""
    file_of: dict[tuple, str] = {}
    for name, messages in by_name.items():
        keys = [(message.source, message.lesson, message.exchange) for message in messages]
        duplicates = [file_of[key] for key in keys if key in file_of]
        if 2 * len(duplicates) >= len(keys):
            raise DataError(
                f"{len(duplicates)} of the {len(keys)} messages in {name} are also in {duplicates[0]}: name one of the "
                "two."
            )
        file_of |= dict.fromkeys(keys, name)


def _fit(
    messages: Sequence[LabelledMessage], measured: Mapping[str, Measured]
) -> tuple[dict[str, dict[str, list[str]]], dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Fit the chosen classifiers to all messages. Returns the `vocabularies` of readers.json, the tensors, and the
    `readers` of readers.json."""
    vectorisers: dict[str, Vectoriser] = {}
    tensors: dict[str, np.ndarray] = {}
    readers: dict[str, dict[str, Any]] = {}
    for label, result in measured.items():
        of_source = [message for message in messages if message.source == result.source]
        exchanges = [seen(label, message.exchange) for message in of_source]
        name, intercept = None, 0.0
        if result.chosen != BY_RULES:
            # Labels of one data set that use the same texts share a vectoriser.
            name = f"{result.source}.{'_'.join(texts_of(label))}"
            if name not in vectorisers:
                vectorisers[name] = Vectoriser.fit(exchanges, texts_of(label))
            targets = np.array([message.labels[label] for message in of_source])
            check_both_occur(label, targets)
            linear = fit_linear(vectorisers[name].tables(exchanges), targets)
            intercept = linear.intercept
            tensors |= {f"{label}.{text}": weights for text, weights in linear.weights.items()}
            tensors[f"{label}.figures"] = linear.figure_weights
        readers[label] = _reader_entry(result, name, intercept)
    for name, vectoriser in vectorisers.items():
        tensors |= {f"{name}.{text}.idf": ngrams.idf for text, ngrams in vectoriser.ngrams.items()}
    vocabularies = {
        name: {text: list(ngrams.vocabulary) for text, ngrams in vectoriser.ngrams.items()}
        for name, vectoriser in vectorisers.items()
    }
    return vocabularies, tensors, readers


def _reader_entry(result: Measured, vocabularies: str | None, intercept: float) -> dict[str, Any]:
    return {
        "source": result.source,
        "by": result.chosen,
        "vocabularies": vocabularies,
        "intercept": intercept,
        "threshold": result.threshold,
        "measured": {kind: asdict(figures) for kind, figures in result.agreements.items()},
        "gain": result.gain[0],
        "gain_ci95": result.gain[1],
    }


def _card(by_name: Mapping[str, Sequence[LabelledMessage]], folds: int) -> dict[str, Any]:
    import sklearn

    data = []
    for name, messages in by_name.items():
        for source in dict.fromkeys(message.source for message in messages):
            of_source = [message for message in messages if message.source == source]
            data.append(
                {
                    "name": Path(name).name if Path(name).is_file() else name,
                    "sha256": hashlib.sha256(Path(name).read_bytes()).hexdigest() if Path(name).is_file() else "",
                    "source": source,
                    "licence": LICENCES[source],
                    "messages": len(of_source),
                    "lessons": len({message.lesson for message in of_source}),
                }
            )
    return {"data": data, "folds": folds, "inner_folds": INNER_FOLDS, "scikit_learn": sklearn.__version__}


def card_text(content: Mapping[str, Any]) -> str:
    """The model card of trained classifiers as Markdown: data, licences, and measured agreement. `content` is that of
    readers.json."""
    card = content["card"]
    data = [
        f"| {source['name']} | {source['source']} | {source['licence']} | {source['messages']} | {source['lessons']} |"
        for source in card["data"]
    ]
    rows = []
    for label, reader in content["readers"].items():
        for kind, figures in reader["measured"].items():
            interval = f" {interval_text(figures['ci95'])}" if figures["ci95"] else ""
            mark = " (reads)" if kind == reader["by"] else ""
            rows.append(
                f"| {label} | {reader['source']} | {figures['base_rate']:.2f} | {kind}{mark} | "
                f"{figures['kappa']:.2f}{interval} | {_cell(figures['precision'])} | {_cell(figures['recall'])} |"
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
            *(f"{source}: {CITATIONS[source]}." for source in dict.fromkeys(part["source"] for part in card["data"])),
            "",
            f"Agreement with labels: {card['folds']}-fold cross-validation, all messages of a lesson in one fold; "
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
    """Run the command line; returns the exit status."""
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
    for label, result in measured.items():
        agreement = result.agreements[result.chosen]
        interval = f" {interval_text(agreement.ci95)}" if agreement.ci95 else ""
        print(f"{label:20} {result.chosen:18} κ {agreement.kappa:.2f}{interval}  base {agreement.base_rate:.2f}")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
