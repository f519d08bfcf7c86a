"""Trains the teacher with GRPO against a running server: `accelerate launch train_rl.py --config-name X.yaml`."""

from config.checks import check_train_rl
from config.load import program
from config.train_rl_model import TrainRLConfig


@program(TrainRLConfig, "train_rl", check=check_train_rl)
def main(config: TrainRLConfig) -> None:
    from src.grpo.run import train

    train(config)


if __name__ == "__main__":
    main()
