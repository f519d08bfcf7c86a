"""Writes as JSON the memory that DeepSpeed holds for a small model. tests/memory/test_budget.py starts it
under `accelerate launch`:

… tests/support/deepspeed_memory.py MODEL_FOLDER OUTPUT_FILE PRECISION RANK_OF_AN_ADAPTER_OR_0 GRADIENTS_IN_FLOAT32
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from classroom_rl.config.models import LoraConfig
from classroom_rl.models.lora import peft_config
from classroom_rl.system.distributed import keep_deepspeed_from_compiling
from classroom_rl.trainer.model_loading import accumulate_in_float32


def main(model_folder: str, output: str, precision: str, rank: str, in_float32: str) -> None:
    keep_deepspeed_from_compiling()
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    if in_float32 == "True":
        accumulate_in_float32(accelerator)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    stage_3 = accelerator.state.deepspeed_plugin.zero_stage == 3
    if rank != "0":  # as TRL does
        adapter = peft_config(LoraConfig(rank=int(rank)))
        model = get_peft_model(model.to(torch.bfloat16), adapter, autocast_adapter_dtype=not stage_3)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(learning, lr=1e-3))
    zero = engine.optimizer
    ids = torch.zeros((1, 8), dtype=torch.long)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.parameters()]
    if stage_3:
        gradients = [zero.grad_partitions_flat_buffer]
    else:
        gradients = [gradient for group in zero.averaged_gradients.values() for gradient in group]
    engine.step()
    masters = zero.fp32_partitioned_groups_flat if stage_3 else zero.single_partition_of_fp32_groups
    weight_storages = {weight.untyped_storage().data_ptr() for weight in weights}
    masters = [tensor for tensor in masters if tensor.untyped_storage().data_ptr() not in weight_storages]
    states = [value for state in zero.optimizer.state.values() for value in state.values() if value.numel() > 1]
    by_kind = {"weights": weights, "masters": masters, "states": states, "gradients": gradients}
    if accelerator.is_main_process:
        sizes = {
            name: sum(tensor.numel() * tensor.element_size() for tensor in tensors) for name, tensors in by_kind.items()
        }
        Path(output).write_text(json.dumps(sizes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
