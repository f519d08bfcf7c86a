"""The program that serves a classroom: teacher, student and judge behind HTTP.

python vllm_server.py --config-name X.yaml        or, installed: classroom-server --config-name X.yaml
python vllm_server.py --view runs/quickstart      without a model: the web page about an earlier run
"""

import sys

from classroom_rl.config.checks import check_environment, check_train_rl
from classroom_rl.config.load import program
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.system.startup import large_imports


def more_of_dry_run(config: TrainRLConfig) -> None:
    from classroom_rl.launch.before_start import check_prompts_fit, show_before_start
    from classroom_rl.memory.report import report, show
    from classroom_rl.trainer.run_length import report_length_before_training

    check_environment(config)
    show_before_start(config)
    check_prompts_fit(config)
    report_length_before_training(config).show()
    show(report(config, None))


@program(TrainRLConfig, "train_rl", check=check_train_rl, more_of_dry_run=more_of_dry_run)
def _serve(config: TrainRLConfig) -> None:
    from classroom_rl.launch.before_start import check_start
    from classroom_rl.memory.report import check_budget
    from classroom_rl.server.app import serve
    from classroom_rl.trainer.run_length import log_length_before_training

    check_start(config, loads_models=True, reports=False)
    with large_imports():
        check_budget(config, None, with_engines=True)
    log_length_before_training(config)
    serve(config)


def main() -> None:
    """Serve a classroom, or with `--view` show the results of a run."""
    if any(argument.partition("=")[0] == "--view" for argument in sys.argv):
        from classroom_rl.server.view_only import view

        sys.exit(view(sys.argv[1:]))
    _serve()


if __name__ == "__main__":
    main()
