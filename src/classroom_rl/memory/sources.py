"""The inputs of a memory budget: a model's shape from its config.json, accelerate's settings, and the GPU's memory.

No weights are loaded, and no GPU is needed.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from classroom_rl.config.models import ModelConfig
from classroom_rl.memory.budget import CUDA_CONTEXT, GIB, Launch, ModelShape
from classroom_rl.models.pretrained import read_options, too_long_for, why_unreachable
from classroom_rl.rollout.scheduler import Phase
from classroom_rl.system.startup import container_limit


class NotEstimated(Exception):
    """A part of the budget cannot be estimated. The message says why."""


class NoConfiguration(NotEstimated):
    """A model's configuration cannot be loaded."""


def read_shape(name: str) -> ModelShape:
    """The shape of a model in a local folder or on the Hub. The number of parameters is exact: the model is built on
    torch's meta device, without memory. Raises a `NotEstimated` if its configuration cannot be loaded, or describes an
    unknown architecture."""
    result = _shape_or_reason(name)
    if isinstance(result, NotEstimated):
        raise result
    return result


def refuse_context(key: str, name: str, max_length: int) -> str | None:
    """Why a model cannot have a context of this length; None if it can, or if its configuration cannot be loaded."""
    from transformers import AutoConfig

    if isinstance(_shape_or_reason(name), NoConfiguration):
        return None
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **read_options(name))
    return too_long_for(key, name, config, max_length)


@cache
def _shape_or_reason(name: str) -> ModelShape | NotEstimated:
    """The shape, or the reason why it is unknown. The reason is returned, not raised, so that it is cached, too: a
    failure may take as long as a success."""
    try:
        return _read_shape(name)
    except NotEstimated as reason:
        return reason
    except AssertionError as reason:  # raised by torch for a padding token outside the vocabulary
        return NotEstimated(str(reason))


def _refuse_unavailable(name: str) -> None:
    """Refuse a model that cannot be loaded, before `_read_shape` imports transformers, which takes seconds. Raises a
    `NoConfiguration` if the folder does not exist, the name is invalid, or the model is not in the local cache and the
    Hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name.count("/") > 1 and not Path(name).is_dir():
        raise NoConfiguration(f"there is no folder {name}")
    try:
        available = Path(name).is_dir() or isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise NoConfiguration(f"{name} is no name on the Hub: {error}") from error
    if not available and why_unreachable():
        raise NoConfiguration(
            f"{why_unreachable()}, and {name} has not been fetched before: its size is not known, and so not what it "
            "needs of the memory"
        )


def _read_shape(name: str) -> ModelShape:
    _refuse_unavailable(name)
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **read_options(name))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise NoConfiguration(f"the configuration of {name} cannot be had: {str(error).splitlines()[0]}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise NotEstimated(f"{name} is quantised, and its weights take what its files take")
    text_config = config.get_text_config()
    missing = [field for field in ("num_key_value_heads", "intermediate_size") if not hasattr(text_config, field)]
    if missing or hasattr(text_config, "kv_lora_rank"):
        raise NotEstimated(
            f"the attention or MLP of {name} ({text_config.model_type}) is of another kind than reckoned here"
        )
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text_config.num_hidden_layers,
        hidden=text_config.hidden_size,
        mlp=_mlp_width(text_config),
        heads=text_config.num_attention_heads,
        kv_heads=text_config.num_key_value_heads,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads,
        vocabulary=text_config.vocab_size,
        windows=_windows(text_config),
        normed_heads=any(module_name.endswith("q_norm") for module_name, _ in model.named_modules()),
    )


def _mlp_width(text_config: Any) -> int:
    """The MLP width for one token; for a mixture of experts, the sum over its active experts."""
    experts = getattr(text_config, "num_experts_per_tok", None)
    if experts is None:
        return text_config.intermediate_size
    return experts * (getattr(text_config, "moe_intermediate_size", None) or text_config.intermediate_size)


def _windows(text_config: Any) -> tuple[int | None, ...]:
    """The attention window of each layer with a KV cache, in tokens; None means no limit."""
    layer_types = getattr(text_config, "layer_types", None) or ["full_attention"] * text_config.num_hidden_layers
    window = {"full_attention": None, "sliding_attention": getattr(text_config, "sliding_window", None)}
    return tuple(window[layer_type] for layer_type in layer_types if layer_type in window)


def launch_of_flags(flags: Sequence[str]) -> Launch:
    """How `accelerate launch` would start the trainer with these flags (such as `--config_file`). Raises a
    `NotEstimated` for any parallelism other than DeepSpeed's, DDP's and FSDP2's."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args([*flags, "train_rl.py"]))
    launch = Launch(processes=arguments.num_processes or 1, machines=arguments.num_machines or 1)
    if arguments.use_fsdp:
        return _with_fsdp(launch, str(arguments.fsdp_version), str(arguments.fsdp_offload_params))
    if not arguments.use_deepspeed:
        return launch
    devices = arguments.offload_optimizer_device, arguments.offload_param_device
    return _with_deepspeed(launch, arguments.zero_stage, devices, arguments.deepspeed_config_file)


def machines_of(environment: Mapping[str, str]) -> int:
    """The number of machines of a training, from the environment variables of one of its processes."""
    processes = int(environment.get("WORLD_SIZE", "1"))
    return processes // int(environment.get("LOCAL_WORLD_SIZE", processes))


def launch_of_environment(environment: Mapping[str, str] = os.environ) -> Launch:
    """How `accelerate launch` started this process; a single process if it was not used. Raises a `NotEstimated` for
    any parallelism other than DeepSpeed's, DDP's and FSDP2's."""
    launch = Launch(processes=int(environment.get("WORLD_SIZE", "1")), machines=machines_of(environment))
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        offload = environment.get("FSDP_OFFLOAD_PARAMS", "false")
        return _with_fsdp(launch, environment.get("FSDP_VERSION", "1"), offload)
    if environment.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return launch
    names = ("ZERO_STAGE", "OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE", "CONFIG_FILE")
    stage, *devices, file = (environment.get(f"ACCELERATE_DEEPSPEED_{name}") for name in names)
    return _with_deepspeed(launch, int(stage) if stage else None, devices, file)


def _with_fsdp(launch: Launch, version: str, offload: str) -> Launch:
    if version != "2":
        raise NotEstimated("accelerate would use FSDP1, which is not supported")
    if offload.lower() == "true":
        raise NotEstimated("FSDP2 would keep the weights in host memory, which is not reckoned here")
    return replace(launch, fsdp=True)


def _with_deepspeed(launch: Launch, stage: int | None, devices: Sequence[str | None], file: str | None) -> Launch:
    """`devices` are those to which optimizer states and weights are offloaded."""
    if file not in (None, "none"):  # it takes precedence over accelerate's settings
        settings = json.loads(Path(file).read_text(encoding="utf-8")).get("zero_optimization", {})
        stage = settings.get("stage")
        devices = [settings.get(name, {}).get("device") for name in ("offload_optimizer", "offload_param")]
    stage = 2 if stage is None else stage  # accelerate's default
    if stage not in (1, 2, 3):
        raise NotEstimated(f"DeepSpeed's ZeRO stage is {stage}; stages 1, 2 and 3 are reckoned here")
    optimizer_on_host, weights_on_host = (device not in (None, "none") for device in devices)
    return replace(launch, zero_stage=stage, optimizer_on_host=optimizer_on_host, weights_on_host=weights_on_host)


def machine_memory() -> int:
    """The host memory that programs can use, in bytes: the machine's, or the container's limit if that is lower."""
    memory = psutil.virtual_memory().total
    return min(memory, container_limit() or memory)


def gpu_is_there() -> bool:
    """Whether nvidia-smi lists a GPU on this machine and CUDA_VISIBLE_DEVICES does not hide all GPUs."""
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    return listing.returncode == 0 and "GPU " in listing.stdout


def memory_by_nvidia_smi() -> list[int]:
    """The memory in bytes of each visible GPU, read without CUDA; empty without a GPU. The order is that of nvidia-smi,
    which can differ from CUDA's."""
    if not gpu_is_there():
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for selection in ([f"--id={visible}"] if visible else [], []):  # all GPUs if nvidia-smi does not know the id
        listing = subprocess.run([*query, *selection], capture_output=True, text=True, check=False, timeout=60)
        if listing.returncode == 0:
            sizes = [int(line) * 2**20 for line in listing.stdout.split() if line.isdigit()]
            return sizes[: len(visible.split(","))] if visible else sizes
    return []


def like_gpus() -> list[int]:
    """The memory in bytes of each visible GPU that has at least nine tenths of the largest one's: engines are not
    placed on a small one beside it. CUDA counts the fastest first."""
    sizes = memory_by_nvidia_smi()
    return [size for size in sizes if size >= 0.9 * max(sizes)]


def gpu_memory(planned_gib: float | None) -> tuple[int | None, str]:
    """The memory of one GPU in bytes (None if unknown) and the source of that number: the planned GPU, or this
    machine's smallest one."""
    if planned_gib is not None:
        return int(planned_gib * GIB), "train.gpu_memory_gib"
    import torch

    if not torch.cuda.is_available():
        sizes = memory_by_nvidia_smi()
        if sizes:
            return min(sizes), "by nvidia-smi; this torch does not see the GPU"
        return None, "there is no GPU here, and train.gpu_memory_gib is null"
    gpus = [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]
    smallest = min(gpus, key=lambda gpu: gpu.total_memory)
    return smallest.total_memory, smallest.name


_ROUNDING = 1e-9  # shares such as 0.3 + 0.3 + 0.4 must not exceed 1 by a rounding error


def awake_together(roles: Sequence[str], phases: Sequence[Phase]) -> dict[str, list[str]]:
    """Groups of engines that are awake at the same time, by name: one for each phase, or all engines without phases."""
    if not phases:
        return {"engines": list(roles)}
    groups = {f"engines of the {phase.name}": [role for role in roles if role in phase.roles] for phase in phases}
    return {name: group for name, group in groups.items() if group}


def share_of(roles: Mapping[str, ModelConfig], group: Sequence[str]) -> float:
    """The total share of a GPU that these engines take, as far as it is configured or planned."""
    return sum(roles[role].vllm.gpu_memory_utilization or 0 for role in group)


def named_shares(roles: Mapping[str, ModelConfig], group: Sequence[str]) -> str:
    """The config keys and values of these engines' shares, written as a sum."""
    shares = {role: roles[role].vllm.gpu_memory_utilization for role in group}
    return " + ".join(
        f"{role}_model.vllm.gpu_memory_utilization={share:g}" for role, share in shares.items() if share is not None
    )


def what_is_crowded(roles: Mapping[str, ModelConfig], phases: Sequence[Phase], gpu_bytes: int | None) -> list[str]:
    """One message for each group of engines that cannot be awake together on a GPU that they share.

    Args:
        roles: the models by role; an engine without `vllm.gpus` uses the first GPU.
        gpu_bytes: the GPU's memory. If it is known, the engines' CUDA contexts count in addition to their shares.
    """
    messages: dict[str, None] = {}
    for gpu in sorted({gpu for model in roles.values() for gpu in model.vllm.gpus or (0,)}):
        models_on_gpu = {role: model for role, model in roles.items() if gpu in (model.vllm.gpus or (0,))}
        messages |= dict.fromkeys(_crowded_groups(models_on_gpu, phases, gpu_bytes))
    return list(messages)


def _crowded_groups(roles: Mapping[str, ModelConfig], phases: Sequence[Phase], gpu_bytes: int | None) -> Iterator[str]:
    contexts = 0.0 if gpu_bytes is None else len(roles) * CUDA_CONTEXT / gpu_bytes
    for name, group in awake_together(list(roles), phases).items():
        share = share_of(roles, group)
        if share + contexts <= 1 + _ROUNDING:
            continue
        context_note = f", and their CUDA contexts {contexts:.3f} more" if contexts else ""
        suggestion = "" if phases or len(group) < 3 else ", or set generation.schedule=phased"
        yield (
            f"The {name} share one GPU, but ask for {share:g} of it{context_note}: {named_shares(roles, group)}. vLLM "
            "refuses the engine that finds less than its share. Leave the keys out, so that the shares are planned, or "
            f"lower them until a few hundredths of the GPU are left{suggestion}."
        )
