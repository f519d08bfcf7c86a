"""The program that trains the teacher with GRPO, PPO or online DPO against a running server.

accelerate launch train_rl.py --config-name X.yaml        or, installed: classroom-train --config-name X.yaml
"""

import os

from classroom_rl.config.checks import check_environment, check_train_rl
from classroom_rl.config.load import program
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.system.processes import end_with_accelerate
from classroom_rl.system.startup import large_imports


def more_of_dry_run(config: TrainRLConfig) -> None:
    from classroom_rl.launch.before_start import check_prompts_fit, show_before_start
    from classroom_rl.memory.report import report, show
    from classroom_rl.memory.sources import launch_of_environment
    from classroom_rl.models.precision import check_precision
    from classroom_rl.results.hub import check_push
    from classroom_rl.trainer.run_length import report_length_before_training

    check_environment(config)
    show_before_start(config)
    check_prompts_fit(config)
    check_push(config.huggingface)
    report_length_before_training(config).show()
    check_precision(config.train.dtype, os.environ)
    show(report(config, launch_of_environment))


@program(TrainRLConfig, "train_rl", check=check_train_rl, more_of_dry_run=more_of_dry_run)
def main(config: TrainRLConfig) -> None:
    from classroom_rl.launch.before_start import check_prompts_fit, check_start
    from classroom_rl.memory.report import check_budget
    from classroom_rl.memory.sources import launch_of_environment

    end_with_accelerate()
    check_start(config, loads_models=False, reports=True)
    with large_imports():
        check_budget(config, launch_of_environment, with_engines=False)  # the server has checked its engines
        check_prompts_fit(config)
        from classroom_rl.trainer.run import train
    train(config)


if __name__ == "__main__":
    main()
