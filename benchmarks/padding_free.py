"""Forward and backward passes of a batch with padding, cut to the longest row of each micro-batch, and without
(`train.padding_free`), in turns in one process.

    python -m benchmarks.padding_free [--shape Qwen3-0.6B] [--attention flash_attention_2] [--tokens 16384]

The conversations have 4 to 16 messages of 16 to 160 random tokens, half of them sampled, after prompts of 200 to 400.
Micro-batches are filled to `--tokens`, or with `--rows` have so many rows in the order in which they were played, as
a training on CPUs has by default. On a GPU the arithmetic is bfloat16 on float32 weights. Each way is passed once to
warm up. It prints seconds of every round, the ratio of the medians and the largest difference of the log-probs.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from classroom_rl.errors import ConfigError
from classroom_rl.models.random_model import SHAPES, qwen3_config
from classroom_rl.rollout.rows import POLICY, TrainingRow
from classroom_rl.trainer.batch import NO_PADDING, TRIMMED, Batch, Padding, Sample, micro_batches
from classroom_rl.trainer.log_probs import log_probs
from classroom_rl.trainer.model_loading import prepare_cpu
from classroom_rl.trainer.padding_free import attend_within_sequences


def random_batch(samples: int, vocabulary: int, device: torch.device) -> Batch:
    """Conversations in which teacher and student take turns."""
    draw = torch.Generator().manual_seed(0)

    def between(least: int, most: int, count: int = 1) -> list[int]:
        return torch.randint(least, most + 1, (count,), generator=draw).tolist()

    rows = []
    for _ in range(samples):
        lengths = between(16, 160, between(4, 16)[0])
        mask = [int(index % 2 == 0) for index, length in enumerate(lengths) for _ in range(length)]
        prompt, completion = (between(5, vocabulary - 1, count) for count in (between(200, 400)[0], len(mask)))
        nothing = [0] * len(mask)
        rows.append(TrainingRow("", POLICY, None, prompt, completion, mask, nothing, [0.0] * len(mask), nothing))
    return Batch.of([Sample(row, [0.0] * len(row.mask)) for row in rows], 0, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="so many layers of the shape")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, help="micro-batches of so many rows, in place of tokens")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        prepare_cpu("float32")
    accelerator = Accelerator(mixed_precision="bf16" if on_gpu else "no", cpu=not on_gpu)
    config = qwen3_config(SHAPES[options.shape], dtype="float32")
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    with accelerator.device:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=options.attention, trust_remote_code=False
        ).train()
    model.gradient_checkpointing_enable()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if (problem := attend_within_sequences(model)) is not None:
        raise ConfigError(f"--attention {options.attention}: {problem}")
    attention: dict[Padding, str] = {TRIMMED: options.attention, NO_PADDING: model.config._attn_implementation}
    batch = random_batch(options.samples, config.vocab_size, accelerator.device)
    limit = None if options.rows else options.tokens
    divisions = {way: micro_batches(batch, options.rows or 1, limit, way) for way in attention}
    real = int(batch.prompt_mask_BP.sum() + batch.completion_mask_BT.sum())

    def passed(way: Padding) -> tuple[float, torch.Tensor]:
        model.set_attn_implementation(attention[way])
        logps, started = torch.zeros_like(batch.advantages_BT), now()
        for indices in divisions[way]:
            micro = batch.take(indices)
            micro_logps = log_probs(model, micro, micro.wanted_BT, accelerator, way).logps_BT
            micro_logps.sum().backward()
            logps[indices] = micro_logps.detach()
        model.zero_grad()
        return now() - started, logps

    one, other = (passed(way)[1] for way in attention)
    seconds = {way: [] for way in attention}
    for turn in range(options.rounds):
        for way in list(attention)[:: -1 if turn % 2 else 1]:
            seconds[way].append(passed(way)[0])
    for way, times in seconds.items():
        print(f"padding {way}: {len(divisions[way])} micro-batches, {computed(batch, divisions[way], way)} tokens, "
              f"{real} of them real; {', '.join(f'{value:.2f}' for value in times)} s")  # fmt: skip
    ratio = median(seconds[NO_PADDING]) / median(seconds[TRIMMED])
    print(f"without / with padding: {ratio:.3f}; log-probs differ by at most {(one - other).abs().max():.1e}")


def computed(batch: Batch, divisions: Sequence[Sequence[int]], way: Padding) -> int:
    """The tokens that go through the model, padding included."""
    prompts, completions = (mask.sum(dim=1) for mask in (batch.prompt_mask_BP, batch.completion_mask_BT))
    if way == NO_PADDING:
        return int(prompts.sum() + completions.sum())
    return sum(
        len(indices) * int(prompts[indices].max() + completions[indices].max()) for indices in map(list, divisions)
    )


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
