"""Makes what a training on the tiny island starts from: games to train on and to measure, a corpus of decisions, and an
untrained model with a tokenizer.

python -m classroom_rl.environments.marooned.world --out runs/marooned/world --seed 42
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from classroom_rl.environments.marooned.corpus import make_corpus
from classroom_rl.environments.marooned.islands import islands
from classroom_rl.environments.marooned.things import COLONIST
from classroom_rl.models.tiny_chat_model import write_tiny_chat_model
from classroom_rl.system.artifact_cache import make_folder

PRESET = "tiny"
TRAINED, HELD_OUT, HELD_OUT_FROM = 400, 48, 100_000
GAMES, PER_GAME = 900, 16
CONTEXT, VOCABULARY = 2048, 1024
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}


def build_world(out: Path, seed: int) -> bool:
    """Write the world of a seed into the folder `out`, as `make_folder` does; the game's whole code determines it.

    Returns:
        Whether anything was written.

    Raises:
        FileExistsError: if `out` holds something else.
    """
    return make_folder(out, seed, sorted(Path(__file__).parent.glob("*.py")), _write)


def _write(folder: Path, seed: int) -> None:
    for name, first, count in (("train", 0, TRAINED), ("heldout", HELD_OUT_FROM, HELD_OUT)):
        rows = ({"problem": each, "answer": ""} for each in islands(PRESET, first, count, COLONIST))
        _write_jsonl(folder / f"islands_{name}.jsonl", rows)
    corpus = make_corpus(PRESET, GAMES, PER_GAME, seed)
    _write_jsonl(folder / "corpus.jsonl", corpus)
    texts = (message["content"] for row in corpus for message in row["messages"])
    write_tiny_chat_model(folder / "blank", texts, vocabulary=VOCABULARY, context=CONTEXT, seed=seed, sizes=SIZES)


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the world of the tiny island.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    made = build_world(arguments.out, arguments.seed)
    print(f"{arguments.out}: {'made' if made else 'is there already'}")


if __name__ == "__main__":
    main()
