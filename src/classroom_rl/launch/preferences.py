"""The program that trains a model on pairs of a better and a worse text.

python train_preferences.py --config-name quickstart
installed: classroom-preferences --config-name quickstart
"""

from classroom_rl.config.load import program
from classroom_rl.config.train_preferences import TrainPreferencesConfig, check_train_preferences
from classroom_rl.launch.sft import more_of_dry_run
from classroom_rl.system.startup import large_imports


@program(TrainPreferencesConfig, "train_preferences", check_train_preferences, more_of_dry_run)
def main(config: TrainPreferencesConfig) -> None:
    with large_imports():
        from classroom_rl.trainer.preferences import train
    train(config)


if __name__ == "__main__":
    main()
