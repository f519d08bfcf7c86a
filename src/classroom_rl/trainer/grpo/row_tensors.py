"""Tensors of rows beside conversations: their advantages, the targets of the cross-entropy, and its loss.

In all shapes, R is the number of a rank's rows (conversations first, then those beside them) and T the longest
completion in tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from classroom_rl.trainer.batch_builder import ConversationRows, RowBeside

PER_ROW_LOSSES = ("grpo", "sapo", "dr_grpo")
"""TRL's losses that divide by the number of rows; the others divide by the number of sampled tokens."""


@dataclass(frozen=True)
class BatchRows:
    """A rank's rows of one batch.

    Attributes:
        conversations: one entry for each conversation.
        beside: the rows beside them, padding included.
        owners: for each of those, the index of its conversation; None for padding.
    """

    conversations: list[ConversationRows]
    beside: list[RowBeside]
    owners: list[int | None]

    def advantages(self, outcome: torch.Tensor, length: int) -> torch.Tensor:
        """The advantage of every token, of shape (R, T).

        Args:
            outcome: the outcome advantage of each conversation, of shape (conversations,).
            length: T.
        """
        rows = []
        for advantage, own in zip(outcome, self.conversations, strict=True):
            credit = outcome.new_tensor(own.token_credit)
            base = advantage if own.has_outcome else torch.zeros_like(advantage)
            rows.append(base + torch.nn.functional.pad(credit, (0, length - len(credit))))
        for each, owner in zip(self.beside, self.owners, strict=True):
            has_outcome = each.has_outcome and owner is not None and self.conversations[owner].has_outcome
            base = outcome[owner] if has_outcome else outcome.new_zeros(())
            rows.append((base + each.credit).expand(length))
        return torch.stack(rows)

    def targets(self, length: int, device: torch.device) -> torch.Tensor:
        """1 for the tokens of corrections, of shape (R, T)."""
        targets = torch.zeros(len(self.conversations) + len(self.beside), length, device=device)
        for place, each in enumerate(self.beside, start=len(self.conversations)):
            own = each.row.target
            targets[place, : len(own)] = torch.tensor(own, dtype=targets.dtype)
        return targets


def cross_entropy(logps: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """The summed cross-entropy of the targets under the policy as it is sampled, in nats.

    The log-probs are of logits that were divided by the temperature, so their gradient is 1/temperature as large; it is
    multiplied back in.

    Args:
        logps: the log-prob of every completion token, of shape (R, T).
        targets: 1 for the tokens of corrections.
    """
    return -(logps * targets).sum() * temperature


def flatten(rows: Sequence[ConversationRows]) -> tuple[list[RowBeside], list[int]]:
    """The rows beside all conversations, and the index of the conversation of each."""
    pairs = [(each, index) for index, own in enumerate(rows) for each in own.beside]
    return [each for each, _ in pairs], [index for _, index in pairs]
