"""Measures a tutor on held-out problems: `python eval.py --config-name X.yaml [key=value …]`."""

from classroom_rl.launch.evaluate import main

if __name__ == "__main__":
    main()
