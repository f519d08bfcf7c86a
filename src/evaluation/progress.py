"""How far an evaluation is."""

import logging
import sys
import time
from typing import Optional

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class EvaluationProgress:
    """A bar in a terminal; elsewhere a line now and then.

    Args:
        total: how many of `unit` there are in all.
        label: what is done with them.
    """

    def __init__(self, total: int, label: str, unit: str):
        self._total, self._label, self._unit = total, label, unit
        self._done, self._last_line = 0, time.monotonic()
        self._bar: Optional[tqdm] = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=label, unit=f" {unit}", dynamic_ncols=True)

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._done == self._total or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            logger.info("%s: %d of %d %s", self._label, self._done, self._total, self._unit)
            self._last_line = time.monotonic()

    def close(self) -> None:
        """Nothing more comes."""
        if self._bar is not None:
            self._bar.close()
