"""The program that fine-tunes a model on conversations.

python train_sft.py --config-name quickstart        or, installed: classroom-sft --config-name quickstart
"""

from classroom_rl.config.load import program
from classroom_rl.config.train_sft import TrainSFTConfig, check_train_sft
from classroom_rl.system.startup import large_imports


def more_of_dry_run(config: TrainSFTConfig) -> None:
    from classroom_rl.results.hub import check_push

    check_push(config.huggingface)


@program(TrainSFTConfig, "train_sft", check_train_sft, more_of_dry_run)
def main(config: TrainSFTConfig) -> None:
    with large_imports():
        from classroom_rl.trainer.sft.run import train
    train(config)


if __name__ == "__main__":
    main()
