"""What a model learns to play from, and the files that a training starts from."""

import json
from collections import Counter
from pathlib import Path

import pytest

from classroom_rl.environments.marooned.messages import INVALID, REPAIRABLE, VALID, parse_message
from classroom_rl.environments.marooned.world import make_corpus


def test_a_corpus_is_half_spoiled_in_every_way() -> None:
    rows = make_corpus("tiny", games=20, per_game=20, seed=3)
    assert rows == make_corpus("tiny", games=20, per_game=20, seed=3)
    grades = Counter(parse_message(row["messages"][-1]["content"]).grade for row in rows)
    total = sum(grades.values())
    assert total > 300
    assert 0.5 < grades[VALID] / total < 0.8, "an impossible action is written in the exact grammar"
    assert grades[REPAIRABLE] > 0.08 * total and grades[INVALID] > 0.1 * total
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in rows)


def test_a_world_is_whole_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from classroom_rl.environments.marooned import world

    for name, value in {"GAMES": 6, "PER_GAME": 4, "TRAINED": 7, "HELD_OUT": 3}.items():
        monkeypatch.setattr(world, name, value)
    out = tmp_path / "world"
    assert world.build_world(out, 1) and not world.build_world(out, 1)
    islands = {name: (out / f"{name}.jsonl").read_text().splitlines() for name in ("islands_train", "islands_heldout")}
    assert (len(islands["islands_train"]), len(islands["islands_heldout"])) == (7, 3)
    assert not set(islands["islands_train"]) & set(islands["islands_heldout"])
    assert (out / "blank" / "model.safetensors").is_file()
    stamp = json.loads((out / "world.json").read_text())
    assert stamp["seed"] == 1
    (out / "world.json").write_text(json.dumps(stamp | {"sources": "other rules"}))
    assert world.build_world(out, 1), "made by other code"
    assert world.build_world(out, 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FileExistsError, match="holds something else"):
        world.build_world(tmp_path / "other", 1)
