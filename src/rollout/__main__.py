"""`python -m src.rollout`: plays rollouts of a model on a dataset."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
