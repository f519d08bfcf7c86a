"""`make marooned` in small: every stage with the real programs, and what it leaves for people to look at."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from classroom_rl.environments.marooned import world
from classroom_rl.launch import marooned
from classroom_rl.launch.server_process import SupervisedServer
from classroom_rl.viewer.list_index import find_conversation_sets
from tests.conftest import free_port

SMALL = [
    "sft.train.max_steps=2",
    "train.max_steps=2",
    "train.corrections.interval=1",
    "train.corrections.min_examples=1",
    "generation.max_turns=2",
]


@pytest.fixture
def one_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server of the first start serves later ones, too."""
    servers: list[SupervisedServer] = []

    def start(*arguments) -> nullcontext[SupervisedServer]:
        if not servers:
            servers.append(SupervisedServer(*arguments))
        return nullcontext(servers[0])

    monkeypatch.setattr(marooned, "SupervisedServer", start)
    yield
    for server in servers:
        server.process.stop()


@pytest.mark.engines
def test_it_makes_trains_and_measures_a_sailor_and_goes_on_where_it_was(
    one_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A small world is there already; tests/environments/marooned/test_world.py makes one."""
    folder = tmp_path / "run"
    for name, value in {"GAMES": 30, "HELD_OUT": 6}.items():
        monkeypatch.setattr(world, name, value)
    world.build_world(folder / "world", seed=42)
    overrides = [f"logging.save_dir={folder}", *SMALL, f"generation.server_port={free_port()}"]
    assert marooned.main(overrides) == 0, capfd.readouterr()
    output = capfd.readouterr().out
    figures = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert figures["valid"]["before"]["n"] == figures["valid"]["after"]["n"] == 12
    assert figures["decisions"]["after"]["mean"] == 2
    learning = json.loads((folder / "learning.json").read_text(encoding="utf-8"))
    assert learning["figures"]["held_out"] == {"sampled": figures["reward"]["change"]}
    assert "On held-out lessons" in output.partition("[6/6]")[2]
    assert all(str(path) in output for path in (folder / "summary.json", folder / "plots"))
    assert {path.name for path in (folder / "plots").glob("*.png")} >= {"supervision.png", "marooned.png"}
    assert list(find_conversation_sets(folder).evaluations) == ["before", "after"], "the page shows them"
    summary_text = (folder / "summary.json").read_text(encoding="utf-8")
    games = {path: path.stat().st_mtime_ns for path in (folder / "eval").glob("*/*.parquet")}
    assert marooned.main(overrides) == 0, capfd.readouterr()
    assert {path: path.stat().st_mtime_ns for path in games} == games, "what was measured is not measured again"
    assert (folder / "summary.json").read_text(encoding="utf-8") == summary_text
