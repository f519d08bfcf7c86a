"""The batch of a training step as tensors, and its division into micro-batches.

Shapes: B is the number of this process's samples, P the longest prompt and T the longest completion in tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import pad

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import BNPO
from classroom_rl.memory.trainer_job import longest_row
from classroom_rl.rollout.rows import TrainingRow

Padding = Literal["kept", "trimmed", "none"]
KEPT, TRIMMED, NO_PADDING = "kept", "trimmed", "none"
"""Micro-batches as wide as the batch, cut to their longest sample, or in one row without padding."""


@dataclass(frozen=True)
class Sample:
    """One row of a batch.

    Attributes:
        row: its tokens, masks and log-probs.
        advantages: one for each completion token; those of tokens that the policy did not sample do not count.
        learns: whether the tokens that the policy sampled are trained on. False in an episode that was left out; the
            corrections of such an episode are trained on all the same.
    """

    row: TrainingRow
    advantages: Sequence[float]
    learns: bool = True


@dataclass(frozen=True)
class Totals:
    """What the losses of a batch are divided by: numbers over all processes, at least 1.

    Attributes:
        rows: samples with a token that is trained on.
        tokens: sampled tokens that are trained on.
        targets: tokens of corrections.
        micro_batches: micro-batches with a token that is trained on.
        values: tokens before which the critic is trained.
    """

    rows: int
    tokens: int
    targets: int
    micro_batches: int
    values: int


@dataclass(frozen=True)
class Batch:
    """This process's part of a batch, or a micro-batch of it. Prompts are padded on the left, completions on the right.

    Attributes:
        prompt_ids_BP, prompt_mask_BP: the prompts, and where they are no padding.
        completion_ids_BT, completion_mask_BT: everything after the prompts, and where it is no padding.
        mask_BT: the tokens that the policy sampled, and that are trained on.
        target_BT: the tokens of corrections.
        advantages_BT: the advantage of every token.
        sampling_logps_BT: the engine's log-probs of the sampled tokens, NaN where it gave none.
        old_logps_BT: the policy's log-probs before the first step on the batch; None if the first step is the only one:
            then they are those of the step itself.
        ref_logps_BT: the log-probs of the reference model; None without one.
        strong_logps_BT: the log-probs of the strong tutor; None without one, or if distributions are compared.
        strong_indices_BT: where the strong tutor keeps its distribution of every wanted token; None otherwise.
        value_mask_BT, returns_BT, old_values_BT: PPO's: where the critic is trained, what it should say of the state
            before a token, and what it said before the first step.
    """

    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    completion_ids_BT: Tensor
    completion_mask_BT: Tensor
    mask_BT: Tensor
    target_BT: Tensor
    advantages_BT: Tensor
    sampling_logps_BT: Tensor
    old_logps_BT: Tensor | None = None
    ref_logps_BT: Tensor | None = None
    strong_logps_BT: Tensor | None = None
    strong_indices_BT: Tensor | None = None
    value_mask_BT: Tensor | None = None
    returns_BT: Tensor | None = None
    old_values_BT: Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], pad_id: int, device: torch.device) -> "Batch":
        """The tensors of samples, in their order."""
        rows = [sample.row for sample in samples]

        def tensor(values: Sequence[Sequence], dtype: torch.dtype, padding: float = 0, side: str = "right") -> Tensor:
            tensors = [torch.tensor(sequence, dtype=dtype) for sequence in values]
            return pad(tensors, padding_value=padding, padding_side=side).to(device)

        def logprobs(row: TrainingRow) -> list[float]:
            return [float("nan") if logprob is None else logprob for logprob in row.logprobs]

        masks = [sample.row.mask if sample.learns else [0] * len(sample.row.mask) for sample in samples]
        return cls(
            prompt_ids_BP=tensor([row.prompt_ids for row in rows], torch.long, pad_id, "left"),
            prompt_mask_BP=tensor([[1] * len(row.prompt_ids) for row in rows], torch.long, side="left"),
            completion_ids_BT=tensor([row.completion_ids for row in rows], torch.long, pad_id),
            completion_mask_BT=tensor([[1] * len(row.completion_ids) for row in rows], torch.long),
            mask_BT=tensor(masks, torch.bool),
            target_BT=tensor([row.target for row in rows], torch.bool),
            advantages_BT=tensor([sample.advantages for sample in samples], torch.float32),
            sampling_logps_BT=tensor([logprobs(row) for row in rows], torch.float32),
        )

    @property
    def wanted_BT(self) -> Tensor:
        """The tokens whose log-prob is trained on."""
        return self.mask_BT | self.target_BT

    def take(self, rows: Sequence[int]) -> "Batch":
        """The samples of these rows. Without any, the first one with nothing to train on: all processes have to
        compute together."""
        chosen = list(rows) or [0]
        tensors = {name: tensor[chosen] for name, tensor in self._tensors().items()}
        if not rows:
            tensors |= {
                name: torch.zeros_like(tensors[name])
                for name in ("mask_BT", "target_BT", "value_mask_BT")
                if name in tensors
            }
        return replace(self, **tensors)

    def _tensors(self) -> dict[str, Tensor]:
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}


def totals(micro_batches: Sequence[Batch], accelerator: Accelerator) -> Totals:
    """What the losses of a batch are divided by; all processes call this together."""
    per_micro_batch = [
        torch.stack(
            [
                micro.mask_BT.any(dim=1).sum(),
                micro.mask_BT.sum(),
                micro.target_BT.sum(),
                micro.mask_BT.any().long(),
                torch.zeros_like(micro.mask_BT).sum() if micro.value_mask_BT is None else micro.value_mask_BT.sum(),
            ]
        )
        for micro in micro_batches
    ]
    counts = torch.stack(per_micro_batch).sum(dim=0)
    return Totals(*accelerator.reduce(counts, reduction="sum").clamp(min=1).tolist())


def token_limit(config: TrainRLConfig, rows: int, device: torch.device) -> int | None:
    """The most tokens of a micro-batch; None if it is a number of rows: by default on CPUs, which larger ones do not
    make faster, and for the loss that takes its mean over a micro-batch.

    Args:
        rows: how many of the longest rows fit into memory.
    """
    train = config.train
    if train.max_tokens_per_micro_batch is not None or device.type == "cpu" or train.loss_type == BNPO:
        return train.max_tokens_per_micro_batch
    return rows * longest_row(config)


def micro_batches_by_rows(rows: int, limit: int) -> list[list[int]]:
    """The places of the samples of each micro-batch: at most `limit` in one."""
    return [list(range(start, min(start + limit, rows))) for start in range(0, rows, limit)]


def micro_batches_by_tokens(
    prompts: Sequence[int], completions: Sequence[int], limit: int, padding_free: bool = False
) -> list[list[int]]:
    """Divide samples into micro-batches of at most `limit` tokens, padding included; a sample that alone is longer gets
    a micro-batch of its own. Longest samples first, each into the first micro-batch with room for it.

    Prompts are padded on the left and completions on the right, so a micro-batch is as wide as its longest prompt and
    its longest completion together.

    Args:
        prompts, completions: the lengths of each sample's two parts, in tokens.
        padding_free: whether the samples of a micro-batch stand in one row, without padding.

    Returns:
        The places of the samples of each micro-batch: every sample once, the same division for the same lengths.
    """
    order = sorted(range(len(prompts)), key=lambda row: (-prompts[row] - completions[row], row))
    packs: list[list[int]] = []
    widths: list[tuple[int, int]] = []
    for row in order:
        for index, (prompt, completion) in enumerate(widths):
            if padding_free:
                height, wider = 1, (prompt + prompts[row], completion + completions[row])
            else:
                height, wider = len(packs[index]) + 1, (max(prompt, prompts[row]), max(completion, completions[row]))
            if height * sum(wider) <= limit:
                packs[index].append(row)
                widths[index] = wider
                break
        else:
            packs.append([row])
            widths.append((prompts[row], completions[row]))
    return packs


def split_to(packs: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The same samples in exactly `count` micro-batches: those with the most samples are halved, and when each has a
    single one, empty ones are added. All processes need equally many, because they compute together."""
    packs = [list(pack) for pack in packs]
    while len(packs) < count:
        fullest = max(packs, key=len)
        half = max(len(fullest) // 2, 1)
        packs.append(fullest[half:])
        del fullest[half:]
    return packs


def micro_batches(batch: Batch, max_rows: int, max_tokens: int | None, padding: Padding) -> list[list[int]]:
    """The places of the samples of each micro-batch, as many on every process; all processes call this together.

    Args:
        max_rows: the most samples of a micro-batch.
        max_tokens: the most tokens of one, padding included, in place of a number of samples.
        padding: what becomes of the padding of a micro-batch.
    """
    rows, width_P = batch.prompt_ids_BP.shape
    width_T = batch.completion_ids_BT.size(1)
    if max_tokens is None:
        packs = micro_batches_by_rows(rows, max_rows)
    elif padding != KEPT:
        lengths = (mask.sum(dim=1).tolist() for mask in (batch.prompt_mask_BP, batch.completion_mask_BT))
        packs = micro_batches_by_tokens(*lengths, max_tokens, padding == NO_PADDING)
    else:
        packs = micro_batches_by_tokens([width_P] * rows, [width_T] * rows, max_tokens)
    return split_to(packs, max(gather_object([len(packs)])))


def divide(batch: Batch, episodes: int, config: TrainRLConfig, padding: Padding) -> list[list[int]]:
    """The places of the samples of each micro-batch, as many on every process, some perhaps empty; all processes call
    this together. An episode may give several samples, or none (online DPO): there are as many micro-batches as its
    episodes would fill.

    Args:
        episodes: how many this process has of the batch.
    """
    samples = len(batch.prompt_ids_BP)
    count = math.ceil(min(episodes, samples) / config.train.per_device_train_batch_size)
    rows = math.ceil(samples / count)
    return micro_batches(batch, rows, token_limit(config, rows, batch.mask_BT.device), padding)
