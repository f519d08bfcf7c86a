"""The critic: a head on the policy's trunk, inside the model, so that data parallelism and ZeRO see it."""

from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from classroom_rl.config.values import LINEAR, MLP, ValueHeadKind
from classroom_rl.errors import ConfigError
from classroom_rl.trainer.sharded_save import VALUE_HEAD, whole

HEAD_FILE = "value_head.safetensors"
"""The head's file in a checkpoint."""


class ValueHead(nn.Module):
    """A scalar value of each state, computed in float32 from the trunk's last hidden state. It begins at 0 everywhere.

    `linear` is V = w·h + b, `mlp` is V = w·ReLU(W h + c) + b with twice the trunk's width in between, as in trlX
    (`make_head` of trlx/utils/modeling.py). All is 0 at first but W, which is random, and the same in every process.

    Attributes:
        offset: what is added to every value. It is not trained: the weights learn the difference from it.
        from_fixed_trunk: whether the gradient ends at the trunk.
    """

    def __init__(self, width: int, device: torch.device, kind: ValueHeadKind = LINEAR):
        super().__init__()
        self.kind, inputs = kind, width
        if kind == MLP:
            inputs = 2 * width
            drawn = torch.randn(inputs, width, generator=torch.Generator().manual_seed(0)) / width**0.5
            self.inner_weight = nn.Parameter(drawn.to(device))
            self.inner_bias = nn.Parameter(torch.zeros(inputs, device=device, dtype=torch.float32))
        self.weight = nn.Parameter(torch.zeros(1, inputs, device=device, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=torch.float32))
        self.register_buffer("offset", torch.zeros(1, device=device, dtype=torch.float32))
        self.from_fixed_trunk = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of shape (rows, tokens) of hidden states of shape (rows, tokens, width)."""
        hidden = hidden.detach() if self.from_fixed_trunk else hidden
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            if self.kind == MLP:  # ZeRO may hold the weights in half precision
                inner = nn.functional.linear(hidden, self.inner_weight.float(), self.inner_bias.float())
                hidden = nn.functional.relu(inner)
            bias = self.bias.float() + self.offset.float()
            return nn.functional.linear(hidden, self.weight.float(), bias).squeeze(-1)


@dataclass
class ScoredOutput(FusedCausalLMOutput):
    """The output of TRL's fused head, the value of the state after each token, of shape (rows, tokens), and what the
    head was used for besides (`distributions.py`)."""

    state_values: Tensor | None = None
    hook_output: Any = None


def add_value_head(model: PreTrainedModel, kind: ValueHeadKind) -> ValueHead:
    """Put a head into a causal language model that has TRL's fused head.

    The head is part of the model's own forward pass: its values are in the output, where DistributedDataParallel looks
    for what the loss depends on. A hook on the whole model would not do: PEFT calls its `forward` directly.
    """
    head = ValueHead(model.config.get_text_config().hidden_size, model.get_input_embeddings().weight.device, kind)
    model.add_module(VALUE_HEAD, head)
    hidden: list[Tensor] = []
    forward = model.forward

    def keep_hidden(_module: nn.Module, _arguments: tuple, output: object) -> None:
        hidden[:] = [output.last_hidden_state]

    @wraps(forward)
    def with_values(*arguments: object, **named: object) -> object:
        output = forward(*arguments, **named)
        last, hidden[:] = list(hidden), []
        if not isinstance(output, FusedCausalLMOutput):
            return output
        return ScoredOutput(**output, state_values=head(*last))

    model.base_model.register_forward_hook(keep_hidden)
    model.forward = with_values
    return head


def head_weights(head: ValueHead) -> dict[str, Tensor]:
    """The head's weights and its offset in float32, on the CPU; all processes call this together."""
    from deepspeed import zero

    with zero.GatheredParameters(list(head.parameters())):
        return {name: whole(tensor).float().to("cpu", copy=True) for name, tensor in head.state_dict().items()}


def write_head(weights: dict[str, Tensor], path: Path) -> None:
    """Write a head's weights into a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    save_file(weights, unfinished)
    unfinished.replace(path)


def kind_of(path: Path) -> ValueHeadKind:
    """The kind of the head whose weights are in a file."""
    return MLP if "inner_weight" in load_file(path) else LINEAR


def read_head(head: ValueHead, path: Path) -> None:
    """Set a head to the weights in a file.

    Raises:
        ConfigError: if they are those of a head of the other kind.
    """
    if kind_of(path) != head.kind:
        raise ConfigError(
            f"{path} is a critic with train.ppo.head={kind_of(path)}, and train.ppo.head is {head.kind} now: set it "
            "back, or give a new run another folder, logging.save_dir=…"
        )
    state = head.state_dict()
    for name, weight in load_file(path).items():
        state[name].copy_(weight)
