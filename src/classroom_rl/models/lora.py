"""LoRA adapters: their PEFT configuration, their size, and checks that an adapter folder fits a model."""

import hashlib
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
FOUR_BIT_BASE = "base_4bit_"
"""How the name begins of a run's folder with its base for QLoRA (models/four_bit.py)."""


class LoraOptions(Protocol):
    """The adapter options of the config keys `model.lora` and `teacher_model.lora`."""

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
        parameters: the number of trained parameters.
        inputs: the sum of the input widths of its A matrices over all layers.
    """

    modules: tuple[str, ...]
    rank: int
    parameters: int
    inputs: int


def adapter_shape(key: str, name: str, lora: LoraOptions) -> AdapterShape:
    """The shape of a model's adapter. The model is built on torch's meta device, without reading its weights.

    Args:
        key: the config key of the adapter, for messages.
        name: the model, a Hub name or a local folder.

    Raises:
        ConfigError: if the model has no modules with these names, or if they cannot have such an adapter.
    """
    modules = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules)
    result = _shape_or_reason(name, lora.rank, modules, lora.dropout)
    if isinstance(result, str):
        raise ConfigError(f"{key} does not fit {name}: {result}")
    return result


@cache
def _shape_or_reason(name: str, rank: int, target_modules: str | tuple[str, ...], dropout: float) -> AdapterShape | str:
    """The adapter's shape, or the reason why the model cannot have it. Cached, because building a model takes time."""
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
    embeddings_and_head = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    if any(isinstance(module, LoraLayer) for module in embeddings_and_head):
        return (
            "it names the embeddings or the output head. Log-probs are computed from the head's own matrix, and heads "
            "may be tied to embeddings, so neither can have an adapter: leave them out of target_modules."
        )
    layers = [(path, module) for path, module in adapted.named_modules() if isinstance(module, LoraLayer)]
    return AdapterShape(
        modules=tuple(sorted({path.rpartition(".")[2] for path, _ in layers})),
        rank=max(layer.r["default"] for _, layer in layers),
        parameters=sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad),
        inputs=sum(layer.in_features for _, layer in layers),
    )


def check_adapter(key: str, name: str, lora: LoraOptions) -> None:
    """Refuse a model that cannot be loaded, or that the adapter does not fit. Call this before DeepSpeed is set up:
    with ZeRO-3, transformers partitions every model that it builds.

    Args:
        key: the config key of the model.

    Raises:
        ConfigError: names the key, the model and the reason.
    """
    check_model(f"{key}.model_name_or_path", name)
    adapter_shape(f"{key}.lora", name, lora)


def four_bit_base(run_folder: Path, name: str, dtype: str) -> Path:
    """Where a run has the base of QLoRA that the engine serves and the adapter belongs to. The folder's name tells
    which model it was made of."""
    source = str(Path(name).resolve()) if Path(name).is_dir() else name
    return run_folder.resolve() / f"{FOUR_BIT_BASE}{hashlib.sha256(f'{source} {dtype}'.encode()).hexdigest()[:12]}"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def check_published(folder: Path, model: str, lora: LoraOptions | None) -> None:
    """Refuse published weights that an engine cannot serve.

    Args:
        model: the model that the engine has loaded, as configured.
        lora: the adapter's options; None if the engine serves full weights.

    Raises:
        DataError: for full weights instead of an adapter and vice versa, an adapter for another model, and an adapter
            of a higher rank.
    """
    if is_adapter(folder) is not (lora is not None):
        content, served = ("an adapter", "false") if lora is None else ("whole weights", "true")
        raise DataError(
            f"{folder} holds {content}, but this server was started with teacher_model.lora.enable={served}. Start "
            "server and trainer with the same configuration."
        )
    if lora is None:
        return
    adapter_config = read_adapter_config(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{folder} holds no {ADAPTER_WEIGHTS}, so it is no adapter that can be served.")
    base = str(adapter_config.get("base_model_name_or_path"))
    if not _is_same_model(base, model):
        raise DataError(
            f"{folder} holds an adapter for another base, {base}; the teacher here is {model}. Start server and "
            "trainer with the same teacher_model.model_name_or_path."
        )
    if not isinstance(adapter_config.get("r"), int) or adapter_config["r"] > lora.rank:
        raise DataError(
            f"{folder} holds an adapter of rank {adapter_config.get('r')}, but this server was started with "
            f"teacher_model.lora.rank={lora.rank}. Start server and trainer with the same configuration."
        )


def check_checkpoint(folder: Path, model: str, lora: LoraOptions | None) -> None:
    """Refuse to resume from a checkpoint that does not fit the configuration: loading it would silently skip weights.

    Raises:
        ConfigError: names both settings and says what to do.
    """
    fix = "Go on with the configuration that it was made with, or start anew with another logging.save_dir."
    if is_adapter(folder) is not (lora is not None):
        before, now = ("with", "without") if lora is None else ("without", "with")
        raise ConfigError(f"{folder} was made {before} LoRA, but this training is {now} it (lora.enable). {fix}")
    if lora is None:
        return
    adapter_config = read_adapter_config(folder)
    for name, key, configured in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if adapter_config.get(name) != configured:
            raise ConfigError(f"{folder} was made with lora.{key}={adapter_config.get(name)}, not {configured}. {fix}")
    base = str(adapter_config.get("base_model_name_or_path"))
    if not _is_same_model(base, model):
        raise ConfigError(f"{folder} holds an adapter for another base, {base}, not for {model}. {fix}")


def read_adapter_config(folder: Path) -> dict:
    """The adapter_config.json in a folder.

    Raises:
        DataError: if the file is damaged.
    """
    path = folder / ADAPTER_CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    return content


def _is_same_model(one: str, other: str) -> bool:
    """Whether two names refer to the same model; folders are compared by their resolved paths. A base of QLoRA moves
    with its run, and is known by the folder's name."""
    if Path(one).name.startswith(FOUR_BIT_BASE):
        return Path(one).name == Path(other).name
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return one == other


def merge_adapter(adapter: Path, base: str | None, into: Path) -> None:
    """Merge an adapter into its base model and write the result into a folder, with the base model's tokenizer.

    Args:
        base: a folder or Hub name; None means the base model that the adapter names.

    Raises:
        ConfigError: if the folder holds no adapter in safetensors, or the base model cannot be loaded.
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
