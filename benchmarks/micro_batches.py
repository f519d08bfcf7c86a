"""Micro-batches of a number of rows against micro-batches filled by tokens, on the conversations that a run played.

    python -m benchmarks.micro_batches RUN_FOLDER MODEL_FOLDER --rows 8 --tokens 4096 [--steps 5] [--dtype bfloat16]

For each of the last steps of RUN_FOLDER, its conversations are divided three ways: as they were played, sorted by
length, and by `train.max_tokens_per_micro_batch`. Each micro-batch goes forward and backward through the model with
log-probs of the sampled tokens only; the three ways take turns on each step. Prints the number of micro-batches, the
share of their tokens that is padding, the largest micro-batch in tokens, and the median of the seconds.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.results.rollout_files import read_records
from classroom_rl.trainer.batch import micro_batches_by_tokens
from classroom_rl.trainer.model_loading import prepare_cpu

Division = list[list[int]]


@dataclass(frozen=True)
class Row:
    """A conversation as it is trained on: its tokens, and which of the completion's the teacher sampled."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]

    @property
    def tokens(self) -> int:
        """Its length without padding."""
        return len(self.prompt) + len(self.completion)


def divisions(rows: Sequence[Row], count: int, limit: int) -> dict[str, Division]:
    """The rows' indices, divided in each of the three ways."""
    played = list(range(len(rows)))
    by_length = sorted(played, key=lambda row: -rows[row].tokens)
    lengths = [len(row.prompt) for row in rows], [len(row.completion) for row in rows]
    return {
        f"{count} rows, as played": [played[start : start + count] for start in range(0, len(rows), count)],
        f"{count} rows, by length": [by_length[start : start + count] for start in range(0, len(rows), count)],
        f"{limit} tokens": micro_batches_by_tokens(*lengths, limit),
    }


def size_of(rows: Sequence[Row]) -> int:
    """The tokens of a micro-batch, padding included."""
    return len(rows) * (max(len(row.prompt) for row in rows) + max(len(row.completion) for row in rows))


def train_on(model: PreTrainedModel, rows: Sequence[Row], dtype: torch.dtype) -> None:
    """Forward and backward of one micro-batch."""
    left, right = max(len(row.prompt) for row in rows), max(len(row.completion) for row in rows)
    ids, attention, wanted = (torch.zeros(len(rows), left + right, dtype=torch.long) for _ in range(3))
    for place, row in enumerate(rows):
        own = slice(left - len(row.prompt), left + len(row.completion))
        ids[place, own] = torch.tensor(row.prompt + row.completion)
        attention[place, own] = 1
        wanted[place, left : own.stop] = torch.tensor(row.mask)
    chosen = wanted[:, 1:].bool()
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        hidden = model.base_model(ids, attention_mask=attention).last_hidden_state[:, :-1]
        logits = model.get_output_embeddings()(hidden[chosen])
    cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="sum").backward()


def read_steps(run: Path, steps: int) -> list[list[Row]]:
    """The conversations of the last steps of a run, of all its processes."""
    files: dict[str, list[Path]] = {}
    for path in sorted((run / "rollouts").glob("step_*.parquet")):
        files.setdefault(path.stem.split("-")[0], []).append(path)
    last = sorted(files)[-steps:]
    return [[row_of(record) for path in files[step] for record in read_records(path)] for step in last]


def row_of(record: ConversationRecord) -> Row:
    """The row of a conversation."""
    return Row(record.prompt_ids, record.completion_ids, record.mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    prepare_cpu(options.dtype)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    seconds: dict[str, list[float]] = {}
    figures: dict[str, list[tuple[int, float, int]]] = {}
    batches = read_steps(options.run, options.steps)
    train_on(model, batches[0][: options.rows], dtype)  # the first pass asks for memory
    for rows in batches:
        for way, division in divisions(rows, options.rows, options.tokens).items():
            micro_batches = [[rows[row] for row in chosen] for chosen in division]
            started = time.perf_counter()
            for micro_batch in micro_batches:
                train_on(model, micro_batch, dtype)
            seconds.setdefault(way, []).append(time.perf_counter() - started)
            sizes = [size_of(each) for each in micro_batches]
            padding = 1 - sum(row.tokens for row in rows) / sum(sizes)
            figures.setdefault(way, []).append((len(sizes), padding, max(sizes)))
            model.zero_grad()
    print("| micro-batches of | number | padding | largest, tokens | seconds |\n|---|---|---|---|---|")
    for way, found in figures.items():
        number, padding, largest = (median(each) for each in zip(*found, strict=True))
        print(f"| {way} | {number:g} | {padding:.0%} | {largest:g} | {median(seconds[way]):.2f} |")


if __name__ == "__main__":
    main()
