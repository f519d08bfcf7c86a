"""Makes the quickstart's world, a folder with its lessons, corpus, tokenizer and untrained model.

python -m classroom_rl.environments.toy_language.build --out runs/quickstart/world --seed 42
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from classroom_rl.environments.toy_language.corpus import PROMPTS, Row, make_corpus
from classroom_rl.environments.toy_language.lessons import Lesson, make_lessons, render_problem
from classroom_rl.environments.toy_language.tiny_model import save_blank
from classroom_rl.system.artifact_cache import make_folder

_MODULES = ("grammar.py", "lessons.py", "scripts.py", "corpus.py", "tiny_model.py", "build.py")


def build_world(out: Path, seed: int) -> bool:
    """Write the world for `seed` into the folder `out`. The folder is complete or not there.

    A folder that already holds this world stays as it is. A world made from another seed or by other code is replaced.

    Returns:
        Whether anything was written.

    Raises:
        FileExistsError: if `out` holds something other than a world.
    """
    files = [*(Path(__file__).parent / module for module in _MODULES), *sorted(PROMPTS.glob("*.txt"))]
    return make_folder(out, seed, files, _write)


def _write(folder: Path, seed: int) -> None:
    train, heldout = make_lessons(seed)
    corpus = make_corpus(train, seed)
    _write_jsonl(folder / "lessons_train.jsonl", _lesson_rows(train))
    _write_jsonl(folder / "lessons_heldout.jsonl", _lesson_rows(heldout))
    _write_jsonl(folder / "corpus.jsonl", corpus)
    save_blank(folder / "blank", _texts(corpus), seed)


def _lesson_rows(lessons: Sequence[Lesson]) -> list[dict[str, str]]:
    return [{"problem": render_problem(lesson), "answer": ""} for lesson in lessons]


def _texts(corpus: Sequence[Row]) -> Iterable[str]:
    for row in corpus:
        for message in row["messages"]:
            yield f"{message['role']}\n{message['content']}"


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the quickstart's world.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    made = build_world(arguments.out, arguments.seed)
    print(f"{arguments.out}: {'made' if made else 'is there already'}")


if __name__ == "__main__":
    main()
