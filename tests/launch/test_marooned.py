"""`make marooned` in small: every stage with the real programs, and what it leaves for people to look at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from classroom_rl.viewer.list_index import find_conversation_sets
from tests.conftest import ROOT, free_port

SMALL = [
    "sft.train.max_steps=2",
    "train.max_steps=2",
    "train.corrections.interval=1",
    "train.corrections.min_examples=1",
    "generation.max_turns=2",
]


@pytest.mark.engines
def test_it_makes_trains_and_measures_a_sailor_and_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "classroom_rl.launch.marooned", f"logging.save_dir={folder}", *SMALL]
    command.append(f"generation.server_port={free_port()}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert figures["valid"]["before"]["n"] == figures["valid"]["after"]["n"] == 96
    assert figures["decisions"]["after"]["mean"] == 2
    learning = json.loads((folder / "learning.json").read_text(encoding="utf-8"))
    assert learning["figures"]["held_out"] == {"sampled": figures["reward"]["change"]}
    assert "On held-out lessons" in done.stdout.partition("[6/6]")[2]
    assert all(str(place) in done.stdout for place in (folder / "summary.json", folder / "plots"))
    assert {path.name for path in (folder / "plots").glob("*.png")} >= {"supervision.png", "marooned.png"}
    assert list(find_conversation_sets(folder).evaluations) == ["before", "after"], "the page shows them"
    seen = (folder / "summary.json").read_text(encoding="utf-8")
    games = {path: path.stat().st_mtime_ns for path in (folder / "eval").glob("*/*.parquet")}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert {path: path.stat().st_mtime_ns for path in games} == games, "what was measured is not measured again"
    assert (folder / "summary.json").read_text(encoding="utf-8") == seen
