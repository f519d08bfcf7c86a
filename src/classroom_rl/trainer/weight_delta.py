"""How far the trained parameters moved from the initial model, compared one at a time."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Optional

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from transformers import Trainer

from classroom_rl.errors import ConfigError
from classroom_rl.models.four_bit import unpacked
from classroom_rl.models.pretrained import weight_files
from classroom_rl.results.learning import Movement
from classroom_rl.trainer.sharded_save import (
    Weights,
    adapted_layers,
    adapted_weight,
    adapter_weights,
    gathered_weights,
    trained_model,
    use_together,
    whole,
)

logger = logging.getLogger(__name__)


def parameter_movement(trainer: Trainer, start: str) -> Optional[Movement]:
    """The distance of the trained model from the model that the training began with, also after a resume. All processes
    call this together; no second model is loaded.

    For an adapter (LoRA), it is the norm of what the adapter adds to the weights of its layers, as a share of the norm
    of those weights.

    Args:
        start: folder or Hub name of the model that the training began with.

    Returns:
        None if that model cannot be read any more; the log has the reason.
    """
    model = trained_model(trainer)
    adapted = adapted_layers(model)
    if adapted:
        return _of_adapter(adapted)
    pieces = gathered_weights(model, trainer.accelerator.is_main_process)
    try:
        return use_together(trainer, pieces, lambda: _compare(pieces, start))
    except ConfigError as error:
        logger.warning("how far the parameters moved is not known: %s", error)
        return None


def _compare(pieces: Iterator[Weights], start: str) -> Movement:
    """Compare the gathered weights with those of the start.

    Raises:
        ConfigError: if the start cannot be read, or holds none of the weights.
    """
    moved = before = 0.0
    compared = total = 0
    try:
        with ExitStack() as stack:
            shards = [stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(start)]
            files_by_name = {name: file for file in shards for name in file.keys()}  # noqa: SIM118
            for name, current in ((name, tensor) for piece in pieces for name, tensor in piece.items()):
                total += current.numel()
                initial = files_by_name[name].get_tensor(name) if name in files_by_name else None
                if initial is None or initial.shape != current.shape:
                    continue
                compared += current.numel()
                moved += _square(current.float() - initial.float())
                before += _square(initial)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{start} cannot be read: {error}") from error
    if not before:
        raise ConfigError(f"{start} holds none of the weights that were trained")
    return Movement((moved / before) ** 0.5, compared, total)


def _of_adapter(layers: Sequence[LoraLayer]) -> Movement:
    """The movement of a model with an adapter, which adds nothing at the beginning of a training."""
    from deepspeed import zero

    moved = before = 0.0
    trained = 0
    for layer in layers:
        weight, learned = adapted_weight(layer), adapter_weights(layer)
        with torch.no_grad(), zero.GatheredParameters([weight, *learned]):
            trained += sum(parameter.numel() for parameter in learned)
            moved += sum(_square(layer.get_delta_weight(name)) for name in layer.active_adapters)
            before += _square(unpacked(weight))
    return Movement((moved / before) ** 0.5, trained, trained)


def _square(tensor: torch.Tensor) -> float:
    return whole(tensor.detach()).float().square().sum(dtype=torch.float64).item()
