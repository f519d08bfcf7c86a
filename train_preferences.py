"""Training on pairs of a better and a worse text: `python train_preferences.py --config-name quickstart`."""

from classroom_rl.launch.preferences import main

if __name__ == "__main__":
    main()
