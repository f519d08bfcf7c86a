"""The corrections of a run as targets for the teacher, and the supervised pass over them between two RL steps.

Every rank holds the whole set, in the same order; the main process writes the file. The cursor, which says what was
trained on already, is saved in each checkpoint, so that a resumed run makes the same passes.

The pass uses the training's own optimizer, at a learning rate of its own. It stops when the policy has moved too far on
tokens that it sampled itself, and leaves the schedule of the learning rate as it was.
"""

import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from classroom_rl.config.train_rl import CorrectionsConfig
from classroom_rl.config.values import CHANGED
from classroom_rl.results.corrections import (
    CORRECTIONS_NAME,
    Correction,
    decided,
    read_corrections,
    read_decisions,
    write_corrections,
)
from classroom_rl.rollout.rows import CORRECTION, context_of, sampled_tokens, unchanged_tokens
from classroom_rl.rollout.tokens import AuxSample
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.trainer.collective import on_main_process

logger = logging.getLogger(__name__)


CURSOR_NAME = "corrections.json"
_KEPT_SETS = 2
"""The file keeps this many times the capacity, so that a run that resumes finds what it had at its checkpoint."""


@dataclass(frozen=True)
class Cursor:
    """How far the set was trained on.

    Attributes:
        passes: the number of supervised passes.
        examples: the number of examples that they trained on.
        next_step: corrections of earlier steps were in a pass already.
    """

    passes: int = 0
    examples: int = 0
    next_step: int = 0


class CorrectionSet:
    """The corrections of a run.

    Args:
        capacity: the most corrections that wait for a pass.
        fingerprint: that of the tokenizer that the ids are of.
        encode: the ids of a corrected text and of the end of a message, for texts that people wrote.
        cursor_of: the file of a checkpoint's cursor, if the run resumes; None otherwise.
        resumed_step: the first step that is played now; corrections of this one and later ones come again.
    """

    def __init__(
        self,
        run_folder: Path,
        capacity: int,
        fingerprint: str,
        encode: Callable[[str], list[int]],
        cursor_of: Path | None = None,
        resumed_step: int = 0,
    ):
        self._run_folder = run_folder
        self._path = run_folder / CORRECTIONS_NAME
        self._capacity = capacity
        self._fingerprint = fingerprint
        self._encode = encode
        self.cursor = _read_cursor(cursor_of)
        self._known: list[Correction] = []
        if resumed_step > 0 and self._path.is_file():
            known, _ = read_corrections(self._path)
            self._known = [each for each in known if each.step < resumed_step]

    def add(self, accelerator: Accelerator, step: int, records: Sequence[Trajectory]) -> None:
        """Add the corrections of a batch, from all ranks, and write the file; all ranks call this together.

        Raises:
            StorageError: on every rank, if the file cannot be written.
        """
        own = [correction for record in records for correction in corrections_of(record)]
        found = gather_object(own)
        if not found:
            return
        earlier = [each for each in self._known if each.step < step]
        self._known = [*earlier, *found][-_KEPT_SETS * self._capacity :]
        on_main_process(accelerator, lambda: write_corrections(self._path, self._known, self._fingerprint))

    def waiting(self, accelerator: Accelerator) -> list[Correction]:
        """The corrections that came since the last pass, as people decided about them: the newest ones, as many as the
        capacity allows; all ranks call this together."""
        new = [each for each in self._known if each.step >= self.cursor.next_step]
        return self._as_decided(accelerator, new)[-self._capacity :]

    def earlier(self, accelerator: Accelerator, most: int, seed: int) -> list[Correction]:
        """At most so many of the kept corrections that were in a pass already, drawn by the seed, as people decided
        about them; all ranks call this together."""
        if not most:
            return []
        known = self._as_decided(accelerator, [each for each in self._known if each.step < self.cursor.next_step])
        return random.Random(f"{seed}|earlier").sample(known, min(most, len(known)))

    def _as_decided(self, accelerator: Accelerator, found: list[Correction]) -> list[Correction]:
        decisions = on_main_process(accelerator, lambda: read_decisions(self._run_folder))
        return decided(found, decisions, self._encode)

    @property
    def count(self) -> int:
        """The number of corrections that came since the last pass."""
        return min(self._capacity, sum(each.step >= self.cursor.next_step for each in self._known))

    def passed(self, step: int, examples: int) -> None:
        """Record that a pass trained on these many examples of the steps before `step`."""
        self.cursor = Cursor(self.cursor.passes + 1, self.cursor.examples + examples, step)

    def save_cursor(self, checkpoint: Path) -> None:
        """Write the cursor into a checkpoint."""
        (checkpoint / CURSOR_NAME).write_text(json.dumps(asdict(self.cursor)) + "\n", encoding="utf-8")


def corrections_of(record: Trajectory) -> list[Correction]:
    """The corrections of one conversation, one for each of its rows of that kind."""
    return [_correction(record, branch) for branch in record.branches if branch.kind == CORRECTION]


def _correction(record: Trajectory, branch: AuxSample) -> Correction:
    turn = record.turns[branch.turn]
    review = turn.review if branch.draft < 0 else turn.drafts[branch.draft].review
    prompt, before = context_of(record, branch)
    ids, logprobs = sampled_tokens(record, branch)
    return Correction(
        conversation=record.id,
        step=record.step,
        turn=branch.turn,
        draft=branch.draft,
        policy=str(turn.policy),
        prompt_ids=[*prompt, *before],
        draft_ids=ids,
        draft_logprobs=logprobs,
        target_text=review.correction,
        target_ids=list(branch.ids),
        category=review.category,
        critique=review.critique,
        source=review.source,
        unchanged=unchanged_tokens(record, branch),
    )


def _read_cursor(checkpoint: Path | None) -> Cursor:
    """The cursor in a checkpoint; that of a new run without one, or in a checkpoint from before there were
    corrections."""
    path = None if checkpoint is None else checkpoint / CURSOR_NAME
    if path is None or not path.is_file():
        return Cursor()
    return Cursor(**json.loads(path.read_text(encoding="utf-8")))


class PassTrainer(Protocol):
    """What a pass needs of a trainer."""

    accelerator: Accelerator
    temperature: float
    optimizer: Any
    lr_scheduler: Any

    def score(self, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probs of the completions of (prompt ids, completion ids), and their mask; both of shape (rows,
        tokens). An empty completion is padding."""

    def own_rows(self) -> tuple[list[tuple[list[int], list[int]]], list[list[int]]]:
        """Some rows of the last batch, and the mask of what the policy sampled in them."""

    def backward_and_step(self, loss: torch.Tensor) -> None:
        """One optimizer step on a loss that was averaged over ranks by its own normalizer."""

    def log_figure(self, name: str, value: float) -> None: ...


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Attributes:
        examples: the number of corrections trained on, over all epochs; each counts once in an epoch.
        steps: optimizer steps.
        first_loss, last_loss: the mean cross-entropy per token, in nats, of the first and the last step.
        kl: how far the policy moved on its own tokens, in nats per token.
        stopped: whether `max_kl` ended the pass early.
    """

    examples: int
    steps: int
    first_loss: float
    last_loss: float
    kl: float
    stopped: bool


def run_pass(
    trainer: PassTrainer, corrections: Sequence[Correction], options: CorrectionsConfig, batch: int, seed: int
) -> PassResult:
    """Train on all corrections, the same number of rows on every rank; all ranks call this together.

    Args:
        batch: the rows of each rank in one optimizer step.
    """
    accelerator = trainer.accelerator
    rows, mask = trainer.own_rows()
    before = _scored(trainer, rows, mask)
    losses: list[float] = []
    examples, kl, stopped = 0, 0.0, False
    with learning_rate(trainer, options.learning_rate):
        for share in _batches(corrections, options.epochs, batch * accelerator.num_processes, seed):
            losses.append(_train_on(trainer, share, batch, options.targets == CHANGED))
            examples += len(share)
            kl = _moved(trainer, before, rows, mask)
            if kl > options.max_kl:
                stopped = True
                break
    return PassResult(examples, len(losses), losses[0], losses[-1], kl, stopped)


def _batches(corrections: Sequence[Correction], epochs: int, size: int, seed: int) -> Iterator[list[Correction]]:
    for epoch in range(epochs):
        order = list(corrections)
        random.Random(f"{seed}|{epoch}").shuffle(order)
        for start in range(0, len(order), size):
            yield order[start : start + size]


def _train_on(trainer: PassTrainer, share: Sequence[Correction], batch: int, changed_only: bool) -> float:
    """One optimizer step; returns the mean cross-entropy per token. Each correction is on exactly one rank."""
    accelerator = trainer.accelerator
    own = share[accelerator.process_index :: accelerator.num_processes]
    padding = [([], [])] * (batch - len(own))
    logps, mask = trainer.score([*((each.prompt_ids, each.target_ids) for each in own), *padding])
    for place, each in enumerate(own):
        mask[place, : each.unchanged if changed_only else 0] = False
    tokens = accelerator.reduce(mask.sum(), reduction="sum").clamp(min=1)
    summed = -(logps * mask).sum()
    trainer.backward_and_step(summed * trainer.temperature * accelerator.num_processes / tokens)
    return (accelerator.reduce(summed.detach(), reduction="sum") / tokens).item()


@torch.no_grad()
def _scored(trainer: PassTrainer, rows: Sequence[tuple[list[int], list[int]]], mask: Sequence[list[int]]) -> Any:
    logps, _ = trainer.score(rows)
    sampled = torch.zeros_like(logps, dtype=torch.bool)
    for place, own in enumerate(mask):
        sampled[place, : len(own)] = torch.tensor(own, dtype=torch.bool)
    return logps[sampled]


def _moved(trainer: PassTrainer, before: torch.Tensor, rows: Any, mask: Any) -> float:
    """The k3 estimate of KL(before ‖ now) per token (Schulman, "Approximating KL divergence", 2020), over all ranks."""
    delta = _scored(trainer, rows, mask) - before
    sums = torch.stack([(torch.exp(delta) - 1 - delta).sum(), delta.new_tensor(float(delta.numel()))])
    total, count = trainer.accelerator.reduce(sums, reduction="sum")
    return (total / count.clamp(min=1)).item()


@contextmanager
def learning_rate(trainer: PassTrainer, rate: float | None) -> Iterator[None]:
    """Another learning rate for the optimizer; afterwards rate and schedule are as before. None changes neither."""
    groups = trainer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    state = schedule.state_dict() if schedule is not None else None
    try:
        for group in groups:
            group["lr"] = group["lr"] if rate is None else rate
        yield
    finally:
        if state is not None:
            schedule.load_state_dict(state)
        for group, before in zip(groups, rates, strict=True):
            group["lr"] = before


class CorrectionPasses(TrainerCallback):
    """Runs a pass every `interval` optimizer steps, at the end of a batch, if enough corrections wait.

    Args:
        corrections: the set of the run.
        batch: the rows of each rank in one optimizer step.
        steps_per_batch: the optimizer steps that share a batch.
    """

    def __init__(
        self,
        trainer: PassTrainer,
        corrections: CorrectionSet,
        options: CorrectionsConfig,
        batch: int,
        steps_per_batch: int,
        seed: int,
    ):
        self._trainer = trainer
        self._corrections = corrections
        self._options = options
        self._batch = batch
        self._interval = -(-options.interval // steps_per_batch) * steps_per_batch
        self._seed = seed

    @property
    def _rate(self) -> float:
        """The learning rate of a pass that runs now."""
        own = self._options.learning_rate
        return self._trainer.optimizer.param_groups[0]["lr"] if own is None else own

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Run a pass if one is due."""
        if state.global_step % self._interval:
            return
        found = self._corrections.waiting(self._trainer.accelerator)
        if len(found) < self._options.min_examples:
            logger.info(
                "no supervised pass: %d corrections wait, %d are needed", len(found), self._options.min_examples
            )
            return
        if self._rate == 0:
            logger.info("no supervised pass: %d corrections wait, but the learning rate has fallen to 0", len(found))
            return
        seed = self._seed + state.global_step
        again = round(self._options.replay * len(found))
        found += self._corrections.earlier(self._trainer.accelerator, again, seed)
        result = run_pass(self._trainer, found, self._options, self._batch, seed)
        self._corrections.passed(state.global_step, result.examples)
        figures = {
            "examples": result.examples,
            "loss": result.last_loss,
            "first_loss": result.first_loss,
            "kl": result.kl,
        }
        for name, value in figures.items():
            self._trainer.log_figure(f"corrections/pass_{name}", value)
        logger.info(
            "supervised pass %d: %d examples in %d steps, cross-entropy %.3f to %.3f nats per token, KL %.4f%s",
            self._corrections.cursor.passes,
            result.examples,
            result.steps,
            result.first_loss,
            result.last_loss,
            result.kl,
            f", stopped: above train.corrections.max_kl={self._options.max_kl:g}" if result.stopped else "",
        )
