"""Started by tests/test_memory_budget.py under `accelerate launch`: what DeepSpeed holds of a small model, as JSON.

… tests/deepspeed_memory.py MODEL_FOLDER OUTPUT_FILE
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from transformers import AutoConfig, AutoModelForCausalLM

from src.distributed import keep_deepspeed_from_compiling


def main(model_folder: str, output: str, precision: str) -> None:
    keep_deepspeed_from_compiling()
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    zero = engine.optimizer
    stage_3 = accelerator.state.deepspeed_plugin.zero_stage == 3
    ids = torch.zeros((1, 8), dtype=torch.long)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    weights = [getattr(each, "ds_tensor", each) for each in engine.parameters()]
    if stage_3:
        gradients = [zero.grad_partitions_flat_buffer]
    else:
        gradients = [each for group in zero.averaged_gradients.values() for each in group]
    engine.step()
    masters = zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups
    own = {each.untyped_storage().data_ptr() for each in weights}
    masters = [each for each in masters if each.untyped_storage().data_ptr() not in own]
    states = [value for state in zero.optimizer.state.values() for value in state.values() if value.numel() > 1]
    held = {"weights": weights, "masters": masters, "states": states, "gradients": gradients}
    if accelerator.is_main_process:
        sizes = {name: sum(each.numel() * each.element_size() for each in tensors) for name, tensors in held.items()}
        Path(output).write_text(json.dumps(sizes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
