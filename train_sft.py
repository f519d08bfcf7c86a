"""Supervised fine-tuning on conversations: `python train_sft.py --config-name quickstart`."""

from config.load import program
from config.train_sft_model import TrainSFTConfig, check_train_sft
from src.system.imports import large_imports


def more_of_dry_run(config: TrainSFTConfig) -> None:
    from src.results.hub import check_push

    check_push(config.huggingface)


@program(TrainSFTConfig, "train_sft", check_train_sft, more_of_dry_run)
def main(config: TrainSFTConfig) -> None:
    with large_imports():
        from src.sft.run import train
    train(config)


if __name__ == "__main__":
    main()
