"""A door: `python -m src.rejudge` is src/evaluation/rejudge.py."""

import sys

from src.evaluation.rejudge import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
