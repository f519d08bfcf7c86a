"""A run folder has one program of a kind."""

import subprocess
import sys
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.errors import ConfigError
from classroom_rl.system.run_lock import claim

HOLDER = (
    "import sys; from pathlib import Path; from classroom_rl.system.run_lock import claim; "
    "f = claim('x', Path(sys.argv[1])); {}"
)


def test_a_run_folder_has_one_program_of_a_kind_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    wait = "print('has it', flush=True); import time; time.sleep(600)"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(wait), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "has it\n"
    with pytest.raises(ConfigError, match=rf"Process {holder.pid} works in .* as x already"):
        claim("x", tmp_path)
    claim("y", tmp_path).close()
    holder.kill()
    holder.communicate()
    claim("x", tmp_path).close()
