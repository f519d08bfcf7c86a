"""Both schedules on real engines: tiny models as teacher, student and judge on one server."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from tests.conftest import running_server

pytestmark = pytest.mark.full  # six engines, one server after the other


def play(world: Path, folder: Path, lessons: list[str], schedule: str) -> tuple[list[ConversationRecord], list[str]]:
    """Two requests at a time, and the journal's events in order."""
    folder.mkdir()
    rule = folder / "judge.txt"
    rule.write_text("{{ problem }} {{ conversation[-1].content }}")
    engine = "{max_length: 1024, max_num_seqs: 64, dtype: float32, enforce_eager: true, cpu_cores: '1'}"
    overrides = (
        f"generation.schedule={schedule}",
        f"generation.judges_rules_prompts_paths={{pedagogical_eval: {rule}}}",
        "generation.max_tokens_per_judge_attempt=16",
        f"judge_model.model_name_or_path={world / 'blank'}",
        f"judge_model.vllm={engine}",
    )
    with running_server(world, folder / "run", *overrides) as running, ThreadPoolExecutor(2) as threads:
        requests = [
            SampleRequest(
                problems=lessons[i : i + 4], answers=[""] * 4, request_id=f"r{i}", seed=1, step=0, fixed_seeds=True
            )
            for i in (0, 4)
        ]
        records = [
            record for response in threads.map(running.client.sample, requests) for record in response.conversations
        ]
        roles = running.client.health().roles
        assert {role: health.asleep for role, health in roles.items()} == {
            "teacher": False,
            "student": False,
            "judge": schedule == "phased",
        }
        later = running.client.sample(requests[0].model_copy(update={"request_id": "later"}))
        assert [record.state for record in later.conversations] == ["END"] * 4
    events = [
        event["event"]
        for event in read_journal(folder / "run" / JOURNAL_NAME)
        if not event.get("conversation", "").startswith("later")
    ]
    return records, [event for event in events if event in ("turn", "verdict", "rewards")]


def test_real_engines_take_turns_and_say_the_same(world: Path, tmp_path: Path, lessons: list[str]) -> None:
    phased, order = play(world, tmp_path / "phased", lessons, "phased")
    assert order == sorted(order, key=["turn", "verdict", "rewards"].index), "no verdict before the last turn"
    concurrent, _ = play(world, tmp_path / "concurrent", lessons, "concurrent")
    texts = [[turn.text for turn in record.turns] for record in phased]
    assert texts == [[turn.text for turn in record.turns] for record in concurrent]
    assert [record.prompt_ids for record in phased] == [record.prompt_ids for record in concurrent]
    assert [verdict.raw for record in phased for verdict in record.verdicts] != [], "the judge was asked"
