"""A whole PPO training."""

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.trainer.grpo.run import train_with
from classroom_rl.trainer.ppo.trainer import ClassroomPPOTrainer


def train(config: TrainRLConfig) -> None:
    """Train the teacher and its critic with the running server. Resuming and errors are as for GRPO."""
    train_with(config, ClassroomPPOTrainer)
