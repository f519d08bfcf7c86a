"""Saves the trained model, split between processes by ZeRO-3 or FSDP2 or not, without a second copy in memory: weights
are gathered and written one by one."""

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
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from classroom_rl.models.four_bit import unpacked
from classroom_rl.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from classroom_rl.models.pretrained import save_tokenizer
from classroom_rl.models.weight_transfer import TensorInfo
from classroom_rl.trainer.collective import Result, on_main_process
from classroom_rl.trainer.weight_files import KeptFiles, SafetensorsWriter

logger = logging.getLogger(__name__)
SHARD_BYTES = 1_000_000_000
VALUE_HEAD = "value_head"
"""The name of a critic's module in the model. It belongs to checkpoints, and is in nothing that is published: no engine
could load it."""
_CPU = torch.device("cpu")
_ADAPTER = "default"  # PEFT's name for the one that TRL trains

Weights = dict[str, torch.Tensor]
Save = Callable[[Path], None]


def weight_bytes(model: torch.nn.Module, only_trained: bool = False) -> int:
    """The size of the weights in bytes, including partitions on other processes; with `only_trained`, of the trained
    ones only."""
    parameters = (parameter for parameter in model.parameters() if parameter.requires_grad or not only_trained)
    return sum(_size(parameter) for parameter in parameters)


def _size(weight: torch.Tensor) -> int:
    if hasattr(weight, "quant_state"):  # of 4 bits, and written as it is unpacked
        return weight.quant_state.shape.numel() * weight.quant_state.dtype.itemsize
    return getattr(weight, "ds_numel", weight.numel()) * weight.element_size()


def save_together(trainer: Trainer, write: Callable[[Save], None]) -> None:
    """Have the main process save the trained model, with an adapter merged in; all processes call this together. The
    folder has transformers' format, with smaller shards.

    Args:
        write: runs on the main process; its argument is a function that saves model and tokenizer into a folder.

    Raises:
        ClassroomError: on every process, if `write` raised one.
    """
    model, tokenizer = trained_model(trainer), trainer.processing_class
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    pieces = gathered_weights(model, trainer.accelerator.is_main_process)

    def save(folder: Path) -> None:
        model.save_pretrained(folder, state_dict={})  # all but the weights
        write_shards(pieces, folder)
        save_tokenizer(tokenizer, folder)

    use_together(trainer, pieces, lambda: write(save))


def save_weights_together(trainer: Trainer, write: Callable[[Save], None], kept: KeptFiles) -> None:
    """Have the main process save the trained model's weights alone, without configuration and tokenizer; all processes
    call this together. `write` and errors are as for `save_together`.

    Args:
        kept: overwrites the weights of an earlier save in place.
    """
    model = trained_model(trainer)
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    pieces = gathered_weights(model, trainer.accelerator.is_main_process)
    use_together(trainer, pieces, lambda: write(lambda folder: write_shards(pieces, folder, kept=kept)))


def save_adapter_together(trainer: Trainer, write: Callable[[Save], None]) -> None:
    """Have the main process save the adapter's weights and configuration in PEFT's format; all processes call this
    together. `write` and errors are as for `save_together`."""
    model = trained_model(trainer)
    pieces = gathered_adapter(model, trainer.accelerator.is_main_process)

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor for piece in pieces for name, tensor in piece.items()}
        save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(_config_to_publish(model.peft_config[_ADAPTER]), encoding="utf-8")

    use_together(trainer, pieces, lambda: write(save))


def _config_to_publish(config: PeftConfig) -> str:
    """PEFT's configuration file with sets sorted, so that every process writes the same file for the same adapter."""
    fields = replace(config, inference_mode=True).to_dict().items()
    return json.dumps({key: sorted(value) if isinstance(value, set) else value for key, value in fields}, indent=2)


def trained_model(trainer: Trainer) -> PreTrainedModel | PeftModel:
    """The model under training, without the wrappers of accelerate and DeepSpeed."""
    return trainer.accelerator.unwrap_model(trainer.model_wrapped)


def use_together(trainer: Trainer, pieces: Iterator[Weights], use: Callable[[], Result]) -> Result:
    """Have the main process run `use`, which iterates over the pieces, and broadcast its result; all processes call
    this together.

    Raises:
        ClassroomError: on every process, if `use` raised one.
    """

    def use_and_gather() -> Result:
        try:
            return use()
        finally:
            _exhaust(pieces)  # the other processes iterate over all pieces, even if this one failed

    if not trainer.accelerator.is_main_process:
        _exhaust(pieces)
    return on_main_process(trainer.accelerator, use_and_gather)


def described_weights(model: PreTrainedModel) -> list[TensorInfo]:
    """What `gathered_weights` will yield, in its order. Nothing is gathered."""
    shapes = {
        name: torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
        for name, tensor in _saved_tensors(model).items()
    }
    pieces = [shapes] if _are_converted_together(model) else [{name: shape} for name, shape in shapes.items()]
    published = (item for piece in pieces for item in revert_weight_conversion(model, piece).items())
    return [
        TensorInfo(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in published
    ]


def gathered_weights(model: PreTrainedModel, keep: bool, device: torch.device = _CPU) -> Iterator[Weights]:
    """Yields the weights to publish in pieces; all processes must iterate over all of them.

    Names and shapes are those of the Hub's format: conversions that transformers made on loading are reverted. Tied
    weights come once. The tensors of a piece are valid until the next piece is asked for. A piece is usually one
    parameter. If transformers makes several parameters from one tensor of the Hub's format, reverting needs them
    together, and the whole model is the only piece.

    An adapter is merged in: a weight W comes as W + scale × B·A, added in float32. A weight of 4 bits comes unpacked.

    Args:
        model: a model of transformers, with PEFT's layers in it or without.
        keep: whether this process needs the weights; the others yield nothing, and hold one parameter at a time.
        device: where they are to be; where the parameters are, nothing is copied.
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
            if keep or isinstance(tensor, DTensor):  # FSDP's are merged and gathered by all processes together
                weight = whole(_merged(unpacked(tensor), layer) if layer else unpacked(tensor))
            if keep:
                piece[name] = weight.detach().to(device, copy=together)
            if keep and not together:
                yield revert_weight_conversion(model, piece)
                piece = {}
    if keep and together:
        yield revert_weight_conversion(model, piece)


def gathered_adapter(model: PeftModel, keep: bool) -> Iterator[Weights]:
    """Yields the trained weights of an adapter one at a time, on the CPU, with the names of PEFT's files. All processes
    must iterate over all of them; `keep` says whether this one needs them."""
    from deepspeed import zero

    for name, tensor in model.named_parameters():
        if not tensor.requires_grad or _is_of_critic(name):
            continue
        with zero.GatheredParameters([tensor]):
            weight = whole(tensor)
            if keep:
                piece = {name: weight.detach().to("cpu", copy=True)}
                yield get_peft_model_state_dict(model, piece, _ADAPTER, save_embedding_layers=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that FSDP2 has split between processes, gathered; any other as it is. All processes call this
    together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_of_critic(name: str) -> bool:
    return VALUE_HEAD in name.split(".")


def adapted_layers(model: PreTrainedModel) -> list[LoraLayer]:
    """The model's layers with an adapter; empty without one."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def adapted_weight(layer: LoraLayer) -> torch.Tensor:
    """The model's own weight under an adapter layer: that of a linear layer, or one of several experts'."""
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight


def adapter_weights(layer: LoraLayer) -> list[torch.Tensor]:
    """The weights that an adapter layer trains."""
    return [parameter for name in layer.adapter_layer_names for parameter in getattr(layer, name).parameters()]


def _merged(weight: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    return (weight.float() + layer.get_delta_weight(_ADAPTER).float()).to(weight.dtype)


def _saved_tensors(model: PreTrainedModel) -> Weights:
    """Parameters and buffers by their names without an adapter, in the model's order; of tied ones only the source."""
    layers = adapted_layers(model)
    learned = {id(tensor) for layer in layers for tensor in adapter_weights(layer)}
    tensors = {
        name.replace(".base_layer", "") if layers else name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if id(tensor) not in learned and not _is_of_critic(name)
    }
    packed = tuple(f"{name}." for name, tensor in tensors.items() if hasattr(tensor, "quant_state"))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(packed)}  # without their scales
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
    if conversions is None:  # loading needed none; transformers then uses those of the model's class
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(len(conversion.target_patterns) > 1 for conversion in conversions)


def write_shards(
    pieces: Iterable[Weights], folder: Path, shard_bytes: int = SHARD_BYTES, kept: KeptFiles | None = None
) -> None:
    """Write weights into safetensors files of about `shard_bytes`; files of an earlier save are removed, or overwritten
    in place with `kept`."""
    (folder / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
    earlier = sorted(folder.glob("*.safetensors"))
    for number, path in enumerate(earlier):
        path.unlink() if kept is None else path.rename(_unfinished(folder, number))
    shards: list[SafetensorsWriter] = []
    for piece in pieces:
        for name, tensor in piece.items():
            if not shards or shards[-1].bytes >= shard_bytes or not shards[-1].has_room_for(tensor):
                if shards:
                    shards[-1].close()
                shards.append(SafetensorsWriter(_unfinished(folder, len(shards)), kept))
            shards[-1].add(name, tensor)
    if shards:
        shards[-1].close()
    for number in range(len(shards), len(earlier)):
        _unfinished(folder, number).unlink(missing_ok=True)
    _give_names(folder, [shard.names for shard in shards], sum(shard.bytes for shard in shards))


def _unfinished(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.unfinished"


def _give_names(folder: Path, shards: Sequence[Sequence[str]], total_bytes: int) -> None:
    """Rename the shards as transformers does, with the number of files in each name, and write an index for several."""
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
