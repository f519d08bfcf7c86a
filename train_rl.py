"""Trains the teacher with GRPO against a running server: `accelerate launch train_rl.py --config-name X.yaml`."""

from config.checks import check_train_rl
from config.load import program
from config.train_rl_model import TrainRLConfig


def budget(config: TrainRLConfig) -> None:
    from src.memory_report import show_trainer_budget

    show_trainer_budget(config)


@program(TrainRLConfig, "train_rl", check=check_train_rl, more_of_dry_run=budget)
def main(config: TrainRLConfig) -> None:
    from src.grpo.run import train

    train(config)


if __name__ == "__main__":
    main()
