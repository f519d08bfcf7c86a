"""The program that measures a tutor on held-out problems.

python eval.py --config-name X.yaml [key=value …]        or, installed: classroom-eval --config-name X.yaml
"""

from classroom_rl.config.checks import check_environment
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import program


def more_of_dry_run(config: EvalConfig) -> None:
    from classroom_rl.launch.before_start import show_before_start
    from classroom_rl.memory.report import show_evaluation_shares

    if config.benchmark is not None:
        from classroom_rl.evaluation.published.run import check_benchmark_prompts

        check_benchmark_prompts(config)
        return
    show_evaluation_shares(config)
    if config.server_url is None:  # otherwise the server has its own prompts and rules
        check_environment(config)
        show_before_start(config)


@program(EvalConfig, "eval", check=check_eval, more_of_dry_run=more_of_dry_run)
def main(config: EvalConfig) -> None:
    from classroom_rl.evaluation.run import evaluate
    from classroom_rl.launch.before_start import check_start

    if config.benchmark is None:
        check_start(config, loads_models=config.server_url is None, reports=True)
    evaluate(config)


if __name__ == "__main__":
    main()
