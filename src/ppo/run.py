"""A whole PPO training."""

from config.train_rl_model import TrainRLConfig
from src.grpo.run import train_with
from src.ppo.trainer import ClassroomPPOTrainer


def train(config: TrainRLConfig) -> None:
    """Train the teacher and its critic with the running server. Resuming and errors are as for GRPO."""
    train_with(config, ClassroomPPOTrainer)
