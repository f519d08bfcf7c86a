"""A callback that plots a training while it runs: as files in the run folder, and as images in trackers."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import METRICS_NAME, load_run


class PlotCallback(TrainerCallback):
    """Draws the plots with every checkpoint and at the end, on the main process.

    Args:
        trainer: the trainer whose trackers get the plots.
    """

    def __init__(self, run_folder: Path, trainer: Trainer):
        self._run_folder = run_folder
        self._trainer = trainer
        self._drawn_at = -1

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._draw(args.report_to, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._draw([name for name in args.report_to if name != "trackio"], state)  # trackio's run has ended by now

    def _draw(self, trackers: Collection[str], state: TrainerState) -> None:
        drawn = state.global_step == self._drawn_at or not (self._run_folder / METRICS_NAME).exists()
        if state.is_world_process_zero and not drawn:
            self._drawn_at = state.global_step
            self._show(write_plots(load_run(self._run_folder)), trackers, state)

    def _show(self, paths: list[Path], trackers: Collection[str], state: TrainerState) -> None:
        from matplotlib.image import imread

        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                for path in paths:
                    image = imread(path)
                    callback.tb_writer.add_image(f"plots/{path.stem}", image, state.global_step, dataformats="HWC")
        if "wandb" in trackers:
            import wandb

            images = {f"plots/{path.stem}": wandb.Image(str(path)) for path in paths}
            wandb.log({**images, "train/global_step": state.global_step})
        if "trackio" in trackers:
            import trackio

            trackio.log({f"plots/{path.stem}": trackio.Image(str(path)) for path in paths}, step=state.global_step)
