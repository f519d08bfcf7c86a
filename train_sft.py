"""Supervised fine-tuning on conversations: `python train_sft.py --config-name quickstart`."""

from classroom_rl.launch.sft import main

if __name__ == "__main__":
    main()
