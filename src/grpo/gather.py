"""Saving a model whose weights are split between processes (ZeRO-3), without ever holding all of it in one place."""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Trainer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from src.grpo.collective import on_main_process

logger = logging.getLogger(__name__)
SHARD_BYTES = 1_000_000_000

Weights = dict[str, torch.Tensor]
Save = Callable[[Path], None]


def is_split(model: torch.nn.Module) -> bool:
    """Whether DeepSpeed holds only a part of each weight in this process."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def save_together(trainer: Trainer, write: Callable[[Save], None]) -> None:
    """Have the main process save the trained model; all processes take part.

    Args:
        write: runs on the main process; it gets the function that saves model and tokenizer into a folder.

    Raises:
        ClassroomError: on every process, if `write` raised one.
    """
    accelerator, tokenizer = trainer.accelerator, trainer.processing_class
    model = accelerator.unwrap_model(trainer.model_wrapped)
    pieces = gathered_weights(model, accelerator.is_main_process) if is_split(model) else iter(())

    def save(folder: Path) -> None:
        if is_split(model):
            model.save_pretrained(folder, state_dict={})  # all but the weights
            write_shards(pieces, folder)
        else:
            model.save_pretrained(folder, state_dict=accelerator.get_state_dict(trainer.model_wrapped))
        tokenizer.save_pretrained(folder)

    def write_and_gather() -> None:
        try:
            write(save)
        finally:
            _exhaust(pieces)  # the other processes go through all of it, whatever went wrong in this one

    if not accelerator.is_main_process:
        _exhaust(pieces)
    on_main_process(accelerator, write_and_gather)


def gathered_weights(model: PreTrainedModel, keep: bool) -> Iterator[Weights]:
    """The weights as they are published, a few at a time, on the CPU; all processes have to go through all of it.

    Names and shapes are those of the Hub's format: what transformers changed on loading is changed back. Tied weights
    come once. Usually a piece is one parameter. Where transformers makes several parameters from one tensor of the
    Hub's format, changing back needs them together, and the only piece is the whole model.

    Args:
        keep: whether this process wants the weights; the others get nothing, and hold one parameter at a time only.
    """
    from deepspeed import zero

    tensors = _saved_tensors(model)
    together = _are_converted_together(model)
    if keep and together:
        logger.warning("%s has to be gathered whole to be saved in the Hub's format.", type(model).__name__)
    piece: Weights = {}
    for name, tensor in tensors.items():
        with zero.GatheredParameters([tensor]):
            if keep:
                piece[name] = tensor.detach().to("cpu", copy=True)
        if keep and not together:
            yield revert_weight_conversion(model, piece)
            piece = {}
    if keep and together:
        yield revert_weight_conversion(model, piece)


def _saved_tensors(model: PreTrainedModel) -> Weights:
    """Parameters and buffers by name, in the model's order; of tied ones only that from which the others follow."""
    tensors = model.state_dict(keep_vars=True)
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
    """Write weights into safetensors files with an index, each file as soon as it holds `shard_bytes`. Those of an
    earlier save go."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    index: dict[str, str] = {}
    shard: Weights = {}
    total = held = 0

    def write_out() -> None:
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
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
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _exhaust(pieces: Iterator[Weights]) -> None:
    deque(pieces, maxlen=0)
