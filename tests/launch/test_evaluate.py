"""The program that measures a tutor."""

import re

from tests.support.programs import run_program


def test_a_dry_run_shows_the_shares_of_the_engines() -> None:
    result = run_program("eval.py", "--config-name", "quickstart", "server_url=null", "dry_run=true")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^# engines: [\d.]+ of a GPU \(teacher_model\.vllm\.gpu_memory_utilization=", result.stdout, re.M)
