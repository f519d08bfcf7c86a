"""The name that the package had in version 0.1: `src.…` forwards to `classroom_rl.…`."""

import sys
from pathlib import Path

if str(_HERE := Path(__file__).resolve().parent) not in sys.path:
    sys.path.append(str(_HERE))  # where the package is not installed

from classroom_rl.former_names import forward  # noqa: E402

forward()
