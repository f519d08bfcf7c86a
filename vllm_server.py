"""Serves the classroom: teacher, student and judge behind HTTP: `python vllm_server.py --config-name X.yaml`. Without
a model, the page on what a run left: `python vllm_server.py --view runs/quickstart`."""

import sys

from config.checks import check_environment, check_train_rl
from config.load import program
from config.train_rl_model import TrainRLConfig
from src.system.imports import large_imports


def more_of_dry_run(config: TrainRLConfig) -> None:
    from src.launch.before_start import check_prompts_fit, show_before_start
    from src.memory.report import show_server_budget
    from src.training.run_length import report_length_before_training

    check_environment(config)
    show_before_start(config)
    check_prompts_fit(config)
    report_length_before_training(config).show()
    show_server_budget(config)


@program(TrainRLConfig, "train_rl", check=check_train_rl, more_of_dry_run=more_of_dry_run)
def main(config: TrainRLConfig) -> None:
    from src.launch.before_start import check_start
    from src.memory.report import check_server_start
    from src.server.app import serve
    from src.training.run_length import log_length_before_training

    check_start(config, loads_models=True, reports=False)
    with large_imports():
        check_server_start(config)
    log_length_before_training(config)
    serve(config)


if __name__ == "__main__":
    if any(argument.partition("=")[0] == "--view" for argument in sys.argv):
        from src.server.view_only import view

        sys.exit(view(sys.argv[1:]))
    main()
