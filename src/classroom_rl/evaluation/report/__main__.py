"""Makes `python -m classroom_rl.evaluation.report` run evaluation/report/build.py."""

import sys

from classroom_rl.evaluation.report.build import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
