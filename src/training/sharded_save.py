"""Saving a model that is being trained, its weights split between processes or not, without ever holding a second one:
weights are gathered one by one and written shard by shard."""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from src.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from src.training.collective import Result, on_main_process
from src.training.context import TrainerContext

logger = logging.getLogger(__name__)
SHARD_BYTES = 1_000_000_000
_ADAPTER = "default"  # PEFT's name for the one that TRL trains

Weights = dict[str, torch.Tensor]
Save = Callable[[Path], None]


def weight_bytes(model: torch.nn.Module, only_trained: bool = False) -> int:
    """How many bytes the weights have, those held by other processes included; or only those that are trained."""
    counted = (each for each in model.parameters() if each.requires_grad or not only_trained)
    return sum(getattr(each, "ds_numel", each.numel()) * each.element_size() for each in counted)


def save_together(trainer: TrainerContext, write: Callable[[Save], None]) -> None:
    """Have the main process save the trained model, an adapter merged into it; all processes take part. The folder is
    like any that transformers saves, with smaller shards.

    Args:
        write: runs on the main process; it gets the function that saves model and tokenizer into a folder.

    Raises:
        ClassroomError: on every process, if `write` raised one.
    """
    model, tokenizer = trained_model(trainer), trainer.processing_class
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    pieces = gathered_weights(model, trainer.accelerator.is_main_process)

    def save(folder: Path) -> None:
        model.save_pretrained(folder, state_dict={})  # all but the weights
        write_shards(pieces, folder)
        tokenizer.save_pretrained(folder)

    use_together(trainer, pieces, lambda: write(save))


def save_adapter_together(trainer: TrainerContext, write: Callable[[Save], None]) -> None:
    """Have the main process save the adapter alone, as PEFT does: its weights and its configuration. All processes take
    part; `write` and errors are as for `save_together`."""
    model = trained_model(trainer)
    pieces = gathered_adapter(model, trainer.accelerator.is_main_process)

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor for piece in pieces for name, tensor in piece.items()}
        save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(_config_to_publish(model.peft_config[_ADAPTER]), encoding="utf-8")

    use_together(trainer, pieces, lambda: write(save))


def _config_to_publish(config: PeftConfig) -> str:
    """As PEFT writes it, but with sets in an order: equal adapters get equal files from every process."""
    fields = replace(config, inference_mode=True).to_dict().items()
    return json.dumps({key: sorted(value) if isinstance(value, set) else value for key, value in fields}, indent=2)


def trained_model(trainer: TrainerContext) -> PreTrainedModel | PeftModel:
    """The model under training, without what accelerate and DeepSpeed put around it."""
    return trainer.accelerator.unwrap_model(trainer.model_wrapped)


def use_together(trainer: TrainerContext, pieces: Iterator[Weights], use: Callable[[], Result]) -> Result:
    """Have the main process run `use`, which goes through the pieces, and give its result to all; all processes take
    part.

    Raises:
        ClassroomError: on every process, if `use` raised one.
    """

    def use_and_gather() -> Result:
        try:
            return use()
        finally:
            _exhaust(pieces)  # the other processes go through all of it, whatever went wrong in this one

    if not trainer.accelerator.is_main_process:
        _exhaust(pieces)
    return on_main_process(trainer.accelerator, use_and_gather)


def gathered_weights(model: PreTrainedModel, keep: bool) -> Iterator[Weights]:
    """The weights as they are published, a few at a time, on the CPU; all processes have to go through all of it.

    Names and shapes are those of the Hub's format: what transformers changed on loading is changed back. Tied weights
    come once. Usually a piece is one parameter. Where transformers makes several parameters from one tensor of the
    Hub's format, changing back needs them together, and the only piece is the whole model.

    An adapter is merged in: a weight W comes as W + scale × B·A, added in float32.

    Args:
        model: a model of transformers, with PEFT's layers in it or without.
        keep: whether this process wants the weights; the others get nothing, and hold one parameter at a time only.
    """
    from deepspeed import zero

    tensors = _saved_tensors(model)
    together = _are_converted_together(model)
    if keep and together:
        logger.warning("%s has to be gathered whole to be saved in the Hub's format.", type(model).__name__)
    piece: Weights = {}
    layers = {id(adapted_weight(layer)): layer for layer in adapted_layers(model)}
    for name, tensor in tensors.items():
        layer = layers.get(id(tensor))
        with zero.GatheredParameters([tensor, *(adapter_weights(layer) if layer else ())]):
            if keep:
                piece[name] = (_merged(tensor, layer) if layer else tensor).detach().to("cpu", copy=True)
        if keep and not together:
            yield revert_weight_conversion(model, piece)
            piece = {}
    if keep and together:
        yield revert_weight_conversion(model, piece)


def gathered_adapter(model: PeftModel, keep: bool) -> Iterator[Weights]:
    """The trained weights of an adapter under the names that PEFT saves them by, one at a time, on the CPU; all
    processes have to go through all of it, and `keep` says whether this one wants them."""
    from deepspeed import zero

    for name, tensor in model.named_parameters():
        if not tensor.requires_grad:
            continue
        with zero.GatheredParameters([tensor]):
            if keep:
                held = {name: tensor.detach().to("cpu", copy=True)}
                yield get_peft_model_state_dict(model, held, _ADAPTER, save_embedding_layers=False)


def adapted_layers(model: PreTrainedModel) -> list[LoraLayer]:
    """PEFT's layers in a model; none without an adapter."""
    return [each for each in model.modules() if isinstance(each, LoraLayer)]


def adapted_weight(layer: LoraLayer) -> torch.Tensor:
    """That of a linear layer, or the one of several experts' that PEFT's layer is about."""
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight


def adapter_weights(layer: LoraLayer) -> list[torch.Tensor]:
    """What such a layer trains."""
    return [each for name in layer.adapter_layer_names for each in getattr(layer, name).parameters()]


def _merged(weight: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    return (weight.float() + layer.get_delta_weight(_ADAPTER).float()).to(weight.dtype)


def _saved_tensors(model: PreTrainedModel) -> Weights:
    """Parameters and buffers by the names that they have without an adapter, in the model's order; of tied ones only
    that from which the others follow."""
    layers = adapted_layers(model)
    learned = {id(tensor) for layer in layers for tensor in adapter_weights(layer)}
    tensors = {
        name.replace(".base_layer", "") if layers else name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if id(tensor) not in learned
    }
    tied = set(model.all_tied_weights_keys)
    sources = {id(tensor) for name, tensor in tensors.items() if name not in tied}
    ignored = model._keys_to_ignore_on_save or ()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name not in ignored and not (name in tied and id(tensor) in sources)
    }


def _are_converted_together(model: PreTrainedModel) -> bool:
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # on loading from a folder none was needed; transformers then takes the class's own
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(len(conversion.target_patterns) > 1 for conversion in conversions)


def write_shards(pieces: Iterable[Weights], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write weights into safetensors files, each as soon as it holds `shard_bytes`; those of an earlier save go."""
    for path in (*folder.glob("*.safetensors"), folder / SAFE_WEIGHTS_INDEX_NAME):
        path.unlink(missing_ok=True)
    shards: list[list[str]] = []
    shard: Weights = {}
    total = held = 0

    def write_out() -> None:
        save_file(shard, _unfinished(folder, len(shards)), metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for piece in pieces:
        for name, tensor in piece.items():
            shard[name] = tensor.contiguous()
            held += tensor.nbytes
            total += tensor.nbytes
            if held >= shard_bytes:
                write_out()
                held = 0
    if shard:
        write_out()
    _give_names(folder, shards, total)


def _unfinished(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.unfinished"


def _give_names(folder: Path, shards: Sequence[Sequence[str]], total_bytes: int) -> None:
    """transformers' names, which tell how many files there are; several have an index."""
    if len(shards) == 1:
        _unfinished(folder, 0).rename(folder / SAFE_WEIGHTS_NAME)
        return
    index = {}
    for number, names in enumerate(shards):
        file = SAFE_WEIGHTS_NAME.replace(".", f"-{number + 1:05d}-of-{len(shards):05d}.")
        _unfinished(folder, number).rename(folder / file)
        index.update(dict.fromkeys(names, file))
    content = {"metadata": {"total_size": total_bytes}, "weight_map": index}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _exhaust(pieces: Iterator[Weights]) -> None:
    deque(pieces, maxlen=0)
