"""Changes to transformers' `Trainer` for every algorithm; all overrides of its private methods are in this module.

They were checked against the version in `CHECKED_AGAINST`. A test fails if a signature changes.
"""

import logging
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
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
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "save_model": ("output_dir", "_internal_call"),
    "_run_epoch": (
        *("model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"),
        *("ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
        "steps_trained_in_current_epoch",
    ),
}
"""The parameters of the overridden methods."""


class ResumedTrainer(Trainer):
    """Resumes with the configured learning rate, schedule and save steps, and makes no step beyond the last one.
    transformers takes learning rate and save steps from the checkpoint, even if the configuration changed, and makes
    one more step if the checkpoint is that of the last one."""

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self.state.compute_steps(self.args, self.state.max_steps)
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # DeepSpeed's own is wrapped
        if not isinstance(scheduler, LambdaLR):
            logger.warning("the scheduler of DeepSpeed's configuration goes on with the checkpoint's learning rate")
            return
        rates = [self.rate_of(group) for group in scheduler.optimizer.param_groups]
        shares = [share(scheduler.last_epoch) for share in scheduler.lr_lambdas]
        now = [rate * share for rate, share in zip(rates, shares, strict=True)]
        scheduler.base_lrs, scheduler._last_lr = rates, now
        for optimizer in (scheduler.optimizer, self.optimizer):  # DeepSpeed wraps one in the other
            for group, rate, rate_now in zip(optimizer.param_groups, rates, now, strict=True):
                group["lr"], group["initial_lr"] = rate_now, rate

    def rate_of(self, group: dict[str, Any]) -> float:
        """The configured learning rate of a group of the optimizer's parameters."""
        return self.args.learning_rate


class AtomicCheckpoints(Trainer):
    """Writes a checkpoint under another name until it is complete, so that no run resumes from a partial one.

    Attributes:
        run_config: the configuration, which is saved in each checkpoint.
        contents: fingerprints of what its files held when the training began, saved beside it.
        has_adapter: whether an adapter is trained instead of the model's own weights.
    """

    run_config: Any
    contents: Contents
    has_adapter: bool
    _saving_checkpoint = False

    def save_progress(self) -> None:
        """Save a checkpoint of the steps so far, unless there is one already; all ranks call this together."""
        checkpoint = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.global_step > 0 and not checkpoint.exists():
            self._save_checkpoint(self.model_wrapped, None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
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
        complete_checkpoint(folder, step, keep)

    def write_checkpoint_files(self, folder: Path) -> None:
        """Add this project's own files to a checkpoint that is being written; the main process calls it."""
        write_config(folder, self.run_config, self.contents)
