"""A training step in the shape of Qwen3-0.6B on a GPU: micro-batches of few and of many rows, with and without gradient
checkpointing, the pass of the reference, and where the time of a micro-batch goes.

    python -m benchmarks.training_on_gpu [--rows 4 16] [--profile]

64 conversations of 710 to 890 random tokens, of which the teacher sampled about half, go forward and backward through
`trainer.log_probs` and a head like the training's, in bfloat16 on float32 weights. Each way is passed once to warm up,
then timed. The rate counts 6 operations per parameter and token. No engine and no server: 2 minutes, 50 GiB.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from classroom_rl.memory.budget import GIB
from classroom_rl.models.random_model import SHAPES, qwen3_config
from classroom_rl.trainer.batch import Batch, micro_batches_by_rows
from classroom_rl.trainer.log_probs import log_probs

_SAMPLES, _PROMPT, _COMPLETION, _MESSAGE = 64, 190, 700, 128
_DEVICE = torch.device("cuda")


def random_model(outputs: tuple[str, ...]) -> PreTrainedModel:
    """A model of the shape with random weights in float32, on the GPU."""
    with _DEVICE:
        model = Qwen3ForCausalLM(qwen3_config(SHAPES["Qwen3-0.6B"], dtype="float32"))
    add_fused_lm_head(model, outputs=outputs)
    return model


def random_batch() -> Batch:
    """Conversations in which teacher and student take turns, of unequal lengths."""
    draw = torch.Generator().manual_seed(0)
    completions = torch.randint(_COMPLETION * 4 // 5, _COMPLETION + 1, (_SAMPLES, 1), generator=draw)
    prompts = torch.randint(_PROMPT * 4 // 5, _PROMPT + 1, (_SAMPLES, 1), generator=draw)
    ids = torch.randint(5, SHAPES["Qwen3-0.6B"]["vocab_size"], (_SAMPLES, _PROMPT + _COMPLETION), generator=draw)
    position = torch.arange(_COMPLETION)[None]
    completion_mask = position < completions
    mask = completion_mask & (position // _MESSAGE % 2 == 0)
    prompt_mask = torch.arange(_PROMPT)[None] >= _PROMPT - prompts
    zeros = torch.zeros(_SAMPLES, _COMPLETION)
    columns = (
        ids[:, :_PROMPT],
        prompt_mask.long(),
        ids[:, _PROMPT:],
        completion_mask.long(),
        mask,
        torch.zeros_like(mask),
        zeros,
        zeros,
    )
    return Batch(*(column.to(_DEVICE) for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--profile", action="store_true", help="print the kernels of one micro-batch of each size")
    options = parser.parse_args()
    accelerator, batch = Accelerator(mixed_precision="bf16"), random_batch()
    model, reference = random_model(("log_probs", "entropy")).train(), random_model(("log_probs",)).eval()
    tokens = int(batch.prompt_mask_BP.sum() + batch.completion_mask_BT.sum())
    operations = 6 * sum(parameter.numel() for parameter in model.parameters()) * tokens
    print(f"{torch.cuda.get_device_name()}, {tokens} tokens, {int(batch.mask_BT.sum())} of them sampled")

    def forward(scored: PreTrainedModel, places: Sequence[int]) -> torch.Tensor:
        micro = batch.take(places)
        return log_probs(scored, micro, micro.mask_BT, accelerator).logps_BT.sum()

    def train(rows: int, count: int | None = None) -> None:
        for indices in micro_batches_by_rows(_SAMPLES, rows)[:count]:
            forward(model, indices).backward()

    @torch.no_grad()
    def score(rows: int) -> None:
        for indices in micro_batches_by_rows(_SAMPLES, rows):
            forward(reference, indices)

    print("| pass | rows | seconds | TFLOP/s | peak, GiB |\n|---|---|---|---|---|")
    for rows in options.rows:
        show("reference", rows, lambda rows=rows: score(rows), operations // 3)
    for checkpointing in (True, False):
        model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
        for rows in options.rows:
            name = f"forward and backward, {'with' if checkpointing else 'without'} checkpointing"
            show(name, rows, lambda rows=rows: train(rows), operations)
            if options.profile and checkpointing:
                with torch.profiler.profile() as profile:
                    train(rows, 1)
                    torch.cuda.synchronize()
                print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=12))


def show(name: str, rows: int, run: Callable[[], None], operations: int) -> None:
    """Time a pass over the batch after one to warm up, and print its line."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() / GIB
    print(f"| {name} | {rows} | {seconds:.2f} | {operations / seconds / 1e12:.0f} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
