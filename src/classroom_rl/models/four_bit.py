"""QLoRA (Dettmers et al., arXiv 2305.14314): an adapter is trained over a base with linear layers rounded to 4 bits.
vLLM reads no such weights, so its engine serves the rounded base in 16 bits: both compute with equal weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.errors import ConfigError
from classroom_rl.models.policy_folder import write_whole
from classroom_rl.models.pretrained import load_tokenizer, read_options, save_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel


def quantisation(name: str, dtype: str) -> "BitsAndBytesConfig":
    """How a model is loaded in 4 bits: as NF4, with block scales in 8 bits. Arithmetic is in `dtype`, in which
    embeddings, head, norms and biases stay.

    Raises:
        ConfigError: if the model's files are quantised already.
    """
    from transformers import AutoConfig, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **read_options(name))
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"teacher_model.load_in_4bit is true, but {name} is quantised already: name the model that it was made of."
        )
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def check_quantised(model: "PreTrainedModel", name: str) -> None:
    """Refuse a loaded model if most of its layers' weights are not in 4 bits, as with a mixture of experts.

    Raises:
        ConfigError: names the model and the share.
    """
    from transformers.pytorch_utils import Conv1D

    # Embeddings and head always stay unpacked, so they do not count.
    embedding_ids = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    weights = [weight for weight in model.parameters() if id(weight) not in embedding_ids]
    packed = sum(weight.quant_state.shape.numel() for weight in weights if hasattr(weight, "quant_state"))
    full = sum(weight.numel() for weight in weights if not hasattr(weight, "quant_state"))
    transposed = any(getattr(module, "source_cls", None) is Conv1D for module in model.modules())
    if packed < full or transposed:
        kind = "layers that bitsandbytes transposes" if transposed else "weights that are not of linear layers"
        raise ConfigError(
            f"teacher_model.load_in_4bit is true, but {name} consists of {kind}: {packed / (packed + full):.0%} of "
            "its layers' weights would be as wanted. Set it to false."
        )


def keep_packed(model: "PreTrainedModel") -> None:
    """Keep bitsandbytes from rounding the packed weights' scales to bfloat16: on CPUs with AVX512-BF16 it does so in
    place, when a layer first computes outside of training, and fails for narrow layers."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def unpacked(weight: "torch.Tensor") -> "torch.Tensor":
    """A weight of 4 bits in the type that it is computed with; any other as it is."""
    if not hasattr(weight, "quant_state"):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def write_base(folder: Path, name: str, dtype: str) -> None:
    """Round a model to 4 bits on the CPU and write it in `dtype`, with its tokenizer, unless the folder is there.

    Raises:
        ConfigError: as `quantisation` and `check_quantised` do.
        StorageError: if the disk is full.
    """
    if folder.is_dir():
        return
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype=getattr(torch, dtype),
        quantization_config=quantisation(name, dtype),
        device_map={"": "cpu"},
        trust_remote_code=False,
        use_safetensors=True,
    )
    check_quantised(model, name)
    model = model.dequantize()

    def save(target: Path) -> None:
        model.save_pretrained(target)
        save_tokenizer(load_tokenizer("teacher_model.model_name_or_path", name), target)

    write_whole(folder, save, needed=sum(parameter.nbytes for parameter in model.parameters()))
