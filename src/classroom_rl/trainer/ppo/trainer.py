"""A whole PPO training: the GRPO trainer's rollouts, publishing and checkpoints, with a critic."""

from pathlib import Path

from peft import PeftModel
from trl import GRPOConfig

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.rollout.environment import most_rows
from classroom_rl.trainer.collective import on_main_process
from classroom_rl.trainer.grpo.run import train_with
from classroom_rl.trainer.ppo.steps import StepPlanner
from classroom_rl.trainer.ppo.trl_hooks import PPOHooks
from classroom_rl.trainer.ppo.value_head import HEAD_FILE, add_value_head, head_weights, read_head, write_head
from classroom_rl.trainer.session import TrainingSession

CRITIC_FOLDER = "critic"


def critic_path(run_folder: Path, version: int) -> Path:
    """The file of the value head that belongs to a policy version."""
    return run_folder / CRITIC_FOLDER / f"v{version:06d}.safetensors"


class ClassroomPPOTrainer(PPOHooks):
    """Trains policy and critic on exactly the tokens that were sampled (PPO, Schulman et al. 2017).

    The critic is never published: it is in the checkpoints, and `critic/` in the run folder has the head of every
    version that a batch was sampled from.

    Args:
        session: as for GRPO. If it resumes, the critic is that of the checkpoint.
    """

    def __init__(self, session: TrainingSession, arguments: GRPOConfig):
        self.ppo = session.config.train.ppo
        self._run_folder = session.run_folder
        self.has_rows_beside = most_rows(session.config) is not None
        super().__init__(session, arguments)
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        self.value_head = add_value_head(model)
        if session.checkpoint is not None:
            read_head(self.value_head, Path(session.checkpoint) / HEAD_FILE)

    def planner_of(self, config: TrainRLConfig) -> StepPlanner:
        return StepPlanner(config)

    def before_batch(self) -> None:
        """Keep the critic that belongs to the policy which is about to be published."""
        self._write_head(critic_path(self._run_folder, self.state.global_step))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer, or only the adapter, and the critic beside them: into a checkpoint. What is
        published or released does not come from here. All ranks call this together."""
        super().save_model(output_dir, _internal_call)
        self._write_head(Path(output_dir or self.args.output_dir) / HEAD_FILE)

    def _write_head(self, path: Path) -> None:
        weights = head_weights(self.value_head)
        on_main_process(self.accelerator, lambda: write_head(weights, path))


def train(config: TrainRLConfig) -> None:
    """Train the teacher and its critic with the running server. Resuming and errors are as for GRPO."""
    train_with(config, ClassroomPPOTrainer)
