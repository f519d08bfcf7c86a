"""Trains the teacher with GRPO or PPO against a running server:
`accelerate launch train_rl.py --config-name X.yaml`."""

from classroom_rl.launch.train import main

if __name__ == "__main__":
    main()
