"""Changes to transformers' `Trainer` for every training; its two private methods that are overridden are in this
module.

They were checked against the version in `CHECKED_AGAINST`. A test fails if a signature changes.
"""

import logging
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from classroom_rl.trainer.checkpoints import UNFINISHED, complete_checkpoint, remove_unfinished
from classroom_rl.trainer.collective import on_main_process
from classroom_rl.trainer.contents import Contents
from classroom_rl.trainer.resume import write_config
from classroom_rl.trainer.sharded_save import save_adapter_together, save_together

logger = logging.getLogger(__name__)

CHECKED_AGAINST = {"transformers": "5.19.0"}
SIGNATURES = {
    "_get_output_dir": ("trial",),
    "_save_checkpoint": ("model", "trial"),
}
"""The parameters of the overridden methods."""


class ResumedTrainer(Trainer):
    """Resumes with the configured learning rates, schedule and save steps, and makes no step beyond the last one.
    transformers takes learning rates and save steps from the checkpoint, even if the configuration changed, and makes
    one more step if the checkpoint is that of the last one."""

    def train(self, resume_from_checkpoint: str | None = None, **named: Any) -> Any:
        """Train, or only load a checkpoint in which no step is missing."""
        if resume_from_checkpoint is not None:
            self.add_callback(_GoOnAsConfigured(self))
        try:
            return super().train(resume_from_checkpoint, **named)
        except _NoStepIsMissing:
            self.callback_handler.on_train_end(self.args, self.state, self.control)

    def rate_of(self, group: dict[str, Any]) -> float:
        """The configured learning rate of a group of the optimizer's parameters."""
        return self.args.learning_rate


class _NoStepIsMissing(Exception):
    """The checkpoint that was loaded is that of the last step."""


class _GoOnAsConfigured(TrainerCallback):
    """Sets learning rates, schedule and save steps to the configured ones, once a checkpoint has been loaded."""

    def __init__(self, trainer: ResumedTrainer):
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        if state.global_step >= state.max_steps:
            raise _NoStepIsMissing
        state.compute_steps(args, state.max_steps)
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # DeepSpeed's own is wrapped
        if not isinstance(scheduler, LambdaLR):
            logger.warning("the scheduler of DeepSpeed's configuration goes on with the checkpoint's learning rate")
            return
        scheduler.base_lrs = [trainer.rate_of(group) for group in scheduler.optimizer.param_groups]
        scheduler.last_epoch -= 1
        scheduler.step()  # to where it was, from the configured rates
        for optimizer in (scheduler.optimizer, trainer.optimizer):  # DeepSpeed wraps one in the other
            for group, rate, current_rate in zip(
                optimizer.param_groups, scheduler.base_lrs, scheduler.get_last_lr(), strict=True
            ):
                group["lr"], group["initial_lr"] = current_rate, rate


class AtomicCheckpoints(Trainer):
    """Writes a checkpoint under another name until it is complete, so that no run resumes from a partial one.

    Attributes:
        run_config: the configuration, which is saved in each checkpoint.
        contents: fingerprints of what its files held when the training began, saved beside it.
        has_adapter: whether an adapter is trained instead of the model's own weights.
        best_step: the step whose checkpoint is never deleted; None if there is none.
    """

    run_config: Any
    contents: Contents
    has_adapter: bool
    best_step: int | None = None
    _saving_checkpoint = False

    def save_progress(self) -> None:
        """Save a checkpoint of the steps so far, unless there is one already; all ranks call this together."""
        checkpoint = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.global_step > 0 and not checkpoint.exists():
            self._save_checkpoint(self.model_wrapped, None)

    def save_model(self, output_dir: str | None = None, *_: Any, **__: Any) -> None:
        """Save model and tokenizer, or only the adapter if one is trained; all ranks call this together."""
        save_trained = save_adapter_together if self.has_adapter else save_together
        save_trained(self, lambda save: save(Path(output_dir or self.args.output_dir)))

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED) if self._saving_checkpoint else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint under another name, and rename it when it is complete; a failure leaves no files behind."""
        folder, keep = Path(self.args.output_dir), self.args.save_total_limit
        on_main_process(self.accelerator, lambda: remove_unfinished(folder))
        self._saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            on_main_process(self.accelerator, lambda: self._complete_checkpoint(folder, keep))
        except BaseException:
            if self.accelerator.is_main_process:
                remove_unfinished(folder)
            raise
        finally:
            self._saving_checkpoint = False

    def _complete_checkpoint(self, folder: Path, keep: int) -> None:
        step = self.state.global_step
        self.write_checkpoint_files(folder / UNFINISHED / f"{PREFIX_CHECKPOINT_DIR}-{step}")
        complete_checkpoint(folder, step, keep, self.best_step)

    def write_checkpoint_files(self, folder: Path) -> None:
        """Add this project's own files to a checkpoint that is being written; the main process calls it."""
        write_config(folder, self.run_config, self.contents)
