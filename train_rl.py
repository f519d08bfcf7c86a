"""Trains the teacher with GRPO or PPO against a running server:
`accelerate launch train_rl.py --config-name X.yaml`."""

from config.checks import check_environment, check_train_rl
from config.load import program
from config.train_rl_model import TrainRLConfig
from config.values import PPO
from src.system.imports import large_imports


def more_of_dry_run(config: TrainRLConfig) -> None:
    from src.launch.before_start import check_prompts_fit, show_before_start
    from src.memory.report import show_trainer_budget
    from src.results.hub import check_push
    from src.training.run_length import report_length_before_training

    check_environment(config)
    show_before_start(config)
    check_prompts_fit(config)
    check_push(config.huggingface)
    report_length_before_training(config).show()
    show_trainer_budget(config)


@program(TrainRLConfig, "train_rl", check=check_train_rl, more_of_dry_run=more_of_dry_run)
def main(config: TrainRLConfig) -> None:
    from src.launch.before_start import check_prompts_fit, check_start
    from src.memory.report import check_trainer_start

    check_start(config, loads_models=False, reports=True)
    with large_imports():
        check_trainer_start(config)
        check_prompts_fit(config)
        if config.train.algorithm == PPO:
            from src.ppo.run import train
        else:
            from src.grpo.run import train
    train(config)


if __name__ == "__main__":
    main()
