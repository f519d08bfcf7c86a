"""Serves the classroom: teacher, student and judge behind HTTP: `python vllm_server.py --config-name X.yaml`."""

from config.checks import check_train_rl
from config.load import program
from config.train_rl_model import TrainRLConfig


def budget(config: TrainRLConfig) -> None:
    from src.memory_report import show_server_budget

    show_server_budget(config)


@program(TrainRLConfig, "train_rl", check=check_train_rl, more_of_dry_run=budget)
def main(config: TrainRLConfig) -> None:
    from src.app import serve

    serve(config)


if __name__ == "__main__":
    main()
