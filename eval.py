"""Measures a tutor on held-out problems. `python eval.py --config-name X.yaml [key=value …]`"""

from config.eval_model import EvalConfig, check_eval
from config.load import program


def shares(config: EvalConfig) -> None:
    from src.memory_report import show_evaluation_shares

    show_evaluation_shares(config)


@program(EvalConfig, "eval", check=check_eval, more_of_dry_run=shares)
def main(config: EvalConfig) -> None:
    from src.evaluation.run import evaluate

    evaluate(config)


if __name__ == "__main__":
    main()
