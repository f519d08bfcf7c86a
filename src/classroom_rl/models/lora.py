"""LoRA adapters: their PEFT configuration, their size, and checks that an adapter folder fits a model."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.models.pretrained import check_model, read_options

if TYPE_CHECKING:
    import peft

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


class LoraOptions(Protocol):
    """The adapter's options in `model.lora` and `teacher_model.lora`."""

    rank: int
    alpha: int
    target_modules: list[str] | str
    dropout: float
    bias: str


def peft_config(lora: LoraOptions) -> "peft.LoraConfig":
    """The PEFT configuration of an adapter for a causal language model."""
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        lora_dropout=lora.dropout,
        bias=lora.bias,
        task_type="CAUSAL_LM",
    )


@dataclass(frozen=True)
class AdapterShape:
    """The size of a model's adapter.

    Attributes:
        modules: the adapted modules, by the last part of their names.
        rank: the largest rank of its matrices. PEFT gives fused matrices a higher rank than the configured one.
        parameters: number of trained parameters.
        inputs: the summed input widths of its matrices A over all layers.
    """

    modules: tuple[str, ...]
    rank: int
    parameters: int
    inputs: int


def adapter_shape(key: str, name: str, lora: LoraOptions) -> AdapterShape:
    """The shape of a model's adapter. The model is built on torch's meta device; its weights are not read.

    Args:
        key: the config key of the adapter, for messages.
        name: the model, a Hub name or a local folder.

    Raises:
        ConfigError: if the model has no modules of these names, or if they cannot have such an adapter.
    """
    modules = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules)
    found = _shape_or_reason(name, lora.rank, modules, lora.dropout)
    if isinstance(found, str):
        raise ConfigError(f"{key} does not fit {name}: {found}")
    return found


@cache
def _shape_or_reason(name: str, rank: int, target_modules: str | tuple[str, ...], dropout: float) -> AdapterShape | str:
    import torch
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **read_options(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    try:
        adapted = get_peft_model(
            model, PeftLoraConfig(r=rank, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
        )
    except ValueError as error:
        return str(error)
    ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    if any(isinstance(end, LoraLayer) for end in ends):
        return (
            "it names the embeddings or the output head. Log-probs are computed from the head's own matrix, and heads "
            "may be tied to embeddings, so neither can have an adapter: leave them out of target_modules."
        )
    layers = [(path, module) for path, module in adapted.named_modules() if isinstance(module, LoraLayer)]
    return AdapterShape(
        modules=tuple(sorted({path.rpartition(".")[2] for path, _ in layers})),
        rank=max(layer.r["default"] for _, layer in layers),
        parameters=sum(each.numel() for each in adapted.parameters() if each.requires_grad),
        inputs=sum(layer.in_features for _, layer in layers),
    )


def check_adapter(key: str, name: str, lora: LoraOptions) -> None:
    """Refuse a model that cannot be loaded, or that the adapter does not fit. Call this before DeepSpeed is set up:
    with ZeRO-3, transformers partitions every model that it builds.

    Args:
        key: the config key of the model.

    Raises:
        ConfigError: naming key, model and reason.
    """
    check_model(f"{key}.model_name_or_path", name)
    adapter_shape(f"{key}.lora", name, lora)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def check_published(folder: Path, model: str, lora: LoraOptions | None) -> None:
    """Refuse published weights that an engine cannot serve.

    Args:
        model: the model that the engine has loaded, as configured.
        lora: the adapter's options; None if the engine serves whole weights.

    Raises:
        DataError: for whole weights in place of an adapter and vice versa, an adapter for another model, and an adapter
            of a higher rank.
    """
    if is_adapter(folder) is not (lora is not None):
        held, served = ("an adapter", "false") if lora is None else ("whole weights", "true")
        raise DataError(
            f"{folder} holds {held}, but this server was started with teacher_model.lora.enable={served}. Start server "
            "and trainer with the same configuration."
        )
    if lora is None:
        return
    found = read_adapter_config(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{folder} holds no {ADAPTER_WEIGHTS}, so it is no adapter that can be served.")
    base = str(found.get("base_model_name_or_path"))
    if not _is_same_model(base, model):
        raise DataError(
            f"{folder} holds an adapter for another base, {base}; the teacher here is {model}. Start server and "
            "trainer with the same teacher_model.model_name_or_path."
        )
    if not isinstance(found.get("r"), int) or found["r"] > lora.rank:
        raise DataError(
            f"{folder} holds an adapter of rank {found.get('r')}, but this server was started with "
            f"teacher_model.lora.rank={lora.rank}. Start server and trainer with the same configuration."
        )


def check_checkpoint(folder: Path, model: str, lora: LoraOptions | None) -> None:
    """Refuse to resume from a checkpoint that does not fit the configuration: loading it would silently skip weights.

    Raises:
        ConfigError: with both settings, and what to do.
    """
    fix = "Go on with the configuration that it was made with, or start anew with another logging.save_dir."
    if is_adapter(folder) is not (lora is not None):
        made, wanted = ("with", "without") if lora is None else ("without", "with")
        raise ConfigError(f"{folder} was made {made} LoRA, but this training is {wanted} it (lora.enable). {fix}")
    if lora is None:
        return
    found = read_adapter_config(folder)
    for name, key, wanted in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if found.get(name) != wanted:
            raise ConfigError(f"{folder} was made with lora.{key}={found.get(name)}, not {wanted}. {fix}")
    base = str(found.get("base_model_name_or_path"))
    if not _is_same_model(base, model):
        raise ConfigError(f"{folder} holds an adapter for another base, {base}, not for {model}. {fix}")


def read_adapter_config(folder: Path) -> dict:
    """The adapter_config.json in a folder.

    Raises:
        DataError: if it is damaged.
    """
    path = folder / ADAPTER_CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    return found


def _is_same_model(one: str, other: str) -> bool:
    """Whether two names mean the same model; folders are compared by their resolved paths."""
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return one == other


def merge_adapter(adapter: Path, base: str | None, into: Path) -> None:
    """Merge an adapter into its base and write the model into a folder, with the base's tokenizer.

    Args:
        base: a folder or Hub name; None means the base that the adapter names.

    Raises:
        ConfigError: if the folder holds no adapter in safetensors, or the base cannot be loaded.
    """
    if not (is_adapter(adapter) and (adapter / ADAPTER_WEIGHTS).is_file()):
        raise ConfigError(
            f"{adapter} holds no LoRA adapter: it needs {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as PEFT's "
            "save_pretrained writes them. A whole model is named by model_name_or_path."
        )
    import peft
    from transformers import AutoModelForCausalLM

    from classroom_rl.models.pretrained import check_model, load_tokenizer, save_tokenizer

    base = base or str(read_adapter_config(adapter).get("base_model_name_or_path"))
    check_model("the adapter's base", base)
    save_tokenizer(load_tokenizer("the adapter's base", base), into)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True, trust_remote_code=False)
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.save_pretrained(into, safe_serialization=True)
