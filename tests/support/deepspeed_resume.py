"""Trains with each optimizer on DeepSpeed, once without a break and once resumed from a checkpoint, and prints the
differences as JSON. tests/trainer/test_optimizers.py starts it under torchrun:

… tests/support/deepspeed_resume.py MODEL_FOLDER ZERO_STAGE FOLDER_FOR_CHECKPOINTS OPTIMIZER …
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from classroom_rl.models.checkpoint_safety import refuse_unsafe_checkpoint
from classroom_rl.system.distributed import keep_deepspeed_from_compiling

_STEPS, _SAVED_AFTER = 4, 2


def engine_for(
    model_folder: str, stage: int, optimizer: str, arguments: TrainingArguments
) -> deepspeed.DeepSpeedEngine:
    """A model in bfloat16 on DeepSpeed, with the optimizer that transformers makes for it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.bfloat16)
    arguments.optim = optimizer
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    initialized = deepspeed.initialize(model=model, optimizer=kind(model.parameters(), **options), config=settings)
    return initialized[0]


def step(engine: deepspeed.DeepSpeedEngine, number: int) -> None:
    """One optimizer step on a batch of this process and this number."""
    torch.manual_seed(1000 * number + torch.distributed.get_rank())
    ids = torch.randint(0, 500, (1, 16))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def masters(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    """This process's part of the float32 weights."""
    zero = engine.optimizer
    parts = zero.fp32_partitioned_groups_flat if hasattr(zero, "fp32_partitioned_groups_flat") else None
    return torch.cat([part.detach().clone().flatten() for part in parts or zero.single_partition_of_fp32_groups])


def try_optimizer(model_folder: str, stage: int, folder: Path, optimizer: str, arguments: TrainingArguments) -> dict:
    """The distance between the weights of a resumed training and of one without a break."""
    unbroken = engine_for(model_folder, stage, optimizer, arguments)
    initial = masters(unbroken)
    for number in range(_STEPS):
        if number == _SAVED_AFTER:
            unbroken.save_checkpoint(str(folder / optimizer), tag="saved")
        step(unbroken, number)
    states = [value for state in unbroken.optimizer.optimizer.state.values() for value in state.values()]
    large = [value for value in states if isinstance(value, torch.Tensor) and value.numel() > 256]
    resumed = engine_for(model_folder, stage, optimizer, arguments)
    fresh = engine_for(model_folder, stage, optimizer, arguments)
    refuse_unsafe_checkpoint(folder / optimizer)
    resumed.load_checkpoint(str(folder / optimizer), tag="saved")
    # For comparison: resumed with the weights, but without the optimizer states.
    fresh.load_checkpoint(str(folder / optimizer), tag="saved", load_optimizer_states=False)
    for number in range(_SAVED_AFTER, _STEPS):
        step(resumed, number)
        step(fresh, number)
    return {
        "moved": (masters(unbroken) - initial).abs().max().item(),
        "apart": (masters(unbroken) - masters(resumed)).abs().max().item(),
        "apart without states": (masters(unbroken) - masters(fresh)).abs().max().item(),
        "bytes per parameter": sum(value.numel() * value.element_size() for value in large) / initial.numel(),
    }


def main(model_folder: str, stage: str, folder: str, *optimizers: str) -> None:
    keep_deepspeed_from_compiling()
    torch.distributed.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo")
    arguments = TrainingArguments(output_dir=folder, use_cpu=True, learning_rate=1e-2, report_to=[])
    for optimizer in optimizers:
        result = try_optimizer(model_folder, int(stage), Path(folder), optimizer, arguments)
        if torch.distributed.get_rank() == 0:
            print("found " + json.dumps({"optimizer": optimizer, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
