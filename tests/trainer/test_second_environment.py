"""A second environment through the whole program: real server, engine and trainer."""

import json
from pathlib import Path

import pytest

from classroom_rl.results.rollout_files import read_records
from classroom_rl.rollout.trajectory import Trajectory
from tests.conftest import ROOT, RunningServer, free_port, server_with
from tests.trainer.test_several_processes import metrics_of, run_training

STEPS = 2


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory):
    folder, port = tmp_path_factory.mktemp("guessing"), free_port()
    numbers = [json.dumps({"problem": f"game {number}", "answer": str(number)}) for number in range(8)]
    (folder / "numbers.jsonl").write_text("\n".join(numbers), encoding="utf-8")
    overrides = [
        *("--config-dir", str(ROOT / "tests/support/guessing"), "--config-name", "guessing"),
        *(f"logging.save_dir={folder}", f"generation.server_port={port}"),
        *(f"teacher_model.model_name_or_path={world / 'blank'}", f"train.max_steps={STEPS}"),
    ]
    with server_with(overrides, folder, port) as server:
        run_training(None, overrides)
        yield server


def test_the_policy_s_role_is_the_only_one(trained: RunningServer) -> None:
    assert set(trained.client.health().roles) == {"teacher"}


def test_it_is_trained_on_what_was_said_and_scored_on_the_server(trained: RunningServer) -> None:
    steps = metrics_of(trained.run_folder)
    assert len(steps) == STEPS
    records = [
        record
        for path in sorted((trained.run_folder / "rollouts").glob("*.parquet"))
        for record in read_records(path, Trajectory)
    ]
    assert len(records) == STEPS * 128 and {turn.role for record in records for turn in record.turns} <= {
        "teacher",
        "program",
    }
    assert all(sum(record.mask) == sum(turn.tokens for turn in record.turns) for record in records)
    assert all(record.reward == record.rewards["found"] + 0.5 * record.rewards["in_range"] for record in records)
    mean = sum(record.rewards["in_range"] for record in records[:128]) / 128
    assert steps[0]["rewards/in_range/mean"] == pytest.approx(mean)
    kinds = {f"rewards/{name}/{figure}" for name in ("found", "in_range") for figure in ("mean", "std")}
    assert {name for name in steps[0] if name.startswith("rewards/")} == kinds
    assert max(step["mismatch/mean_abs_logprob_diff"] for step in steps) < 1e-4, "token in, token out"
    assert any(step["grad_norm"] > 0 for step in steps) or all(record.reward == 0 for record in records)


def test_its_rewards_can_be_asked_for(trained: RunningServer) -> None:
    [path, *_] = sorted((trained.run_folder / "rollouts").glob("*.parquet"))
    records = read_records(path, Trajectory)
    rewards = trained.client.rewards("in_range", [record.id for record in records])
    assert rewards == [record.rewards["in_range"] for record in records]


def test_the_page_shows_its_episodes(trained: RunningServer) -> None:
    get = trained.client._session.get
    page = get(f"{trained.client.url}/api/conversations", params={"where": "step-0"}, timeout=30).json()
    assert page["total"] == 128
    for path in ("/api/run", "/api/pulse", "/api/conversations?where=now"):
        answer = get(f"{trained.client.url}{path}", timeout=30)
        assert answer.status_code == 200, answer.text
    assert "no tutor to talk to" in get(f"{trained.client.url}/api/run", timeout=30).json()["chat"]["why"]
    query = {"where": "step-0", "id": page["columns"]["id"][0]}
    answer = get(f"{trained.client.url}/api/conversation", params=query, timeout=30)
    assert answer.status_code == 200, answer.text
    episode = answer.json()
    assert episode["turns"][0]["role"] == "teacher" and episode["verdicts"] == []
