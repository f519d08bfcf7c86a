"""One optimizer that uses Muon for the matrices of the layers and AdamW for all other parameters.

Muon updates a matrix by its orthogonalised momentum, so that all its directions learn equally fast. Training from
scratch then needs fewer steps.

torch.optim.Muon orthogonalises in bfloat16. Most CPUs have no fast matrix multiplication for that type, so on CPUs this
module uses float32 (`benchmarks/muon.py` measures the gain).

Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; for scaling its steps to
AdamW's: J. Liu et al., "Muon is scalable for LLM training", 2025, section 2.2.
"""

from collections.abc import Callable
from typing import Any, Optional
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import _muon

_IN_BFLOAT16 = _muon._zeropower_via_newtonschulz


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW with the same learning rate: Muon's steps are scaled to the size of AdamW's.

    `param_groups` are those of the two inner optimizers, so a learning-rate scheduler sets the rates of both.
    """

    def __init__(self, model: nn.Module, learning_rate: float):
        matrices, others = split_parameters(model)
        self._inner = (
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
        )
        super().__init__([group for inner in self._inner for group in inner.param_groups], {"lr": learning_rate})
        self.param_groups = [group for inner in self._inner for group in inner.param_groups]

    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        loss = None if closure is None else closure()
        with patch.object(_muon, _IN_BFLOAT16.__name__, orthogonalised):
            for inner in self._inner:
                inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [inner.state_dict() for inner in self._inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for inner, state in zip(self._inner, state_dict["inner"], strict=True):
            inner.load_state_dict(state)
        self.param_groups = [group for inner in self._inner for group in inner.param_groups]


def orthogonalised(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float) -> Tensor:
    """The gradient with all singular values moved near 1, by Newton–Schulz iteration. Takes the arguments of torch's
    own function, and calls that one for matrices that are not on a CPU."""
    if gradient.device.type != "cpu":
        return _IN_BFLOAT16(gradient, coefficients, steps, epsilon)
    linear, cubic, quintic = coefficients
    tall = gradient.size(0) > gradient.size(1)
    matrix = gradient.float().T if tall else gradient.float()
    matrix = matrix / matrix.norm().clamp(min=epsilon)
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), matrix, beta=linear)
    return matrix.T if tall else matrix


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable matrices for Muon, and all other trainable parameters, for AdamW.

    Embeddings and the output layer are matrices, too, but belong to AdamW: their rows are looked up one by one.
    """
    lookups = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    if model.get_output_embeddings() is not None:
        lookups.append(model.get_output_embeddings().weight)
    matrices, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_lookup = any(parameter is lookup for lookup in lookups)
            (others if is_lookup or parameter.ndim != 2 else matrices).append(parameter)
    return matrices, others
