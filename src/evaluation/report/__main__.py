"""Makes `python -m src.evaluation.report` run src/evaluation/report/build.py."""

import sys

from src.evaluation.report.build import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
