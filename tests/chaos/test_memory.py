"""What the server holds of finished conversations is bounded; the files on the disk answer for the others."""

import asyncio
from pathlib import Path

import pytest

import classroom_rl.rollout.runner
from classroom_rl.config.values import LARGEST_BATCH
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.viewer.list_index import ListQuery
from classroom_rl.viewer.reader import RunReader
from tests.support.scripted_room import Room

SIZE, BATCHES, REMEMBERED = 4, 12, 8


def request(step: int) -> SampleRequest:
    return SampleRequest(
        problems=["fractions"] * SIZE, answers=["1/2"] * SIZE, request_id=f"r{step}", seed=1, step=step
    )


def test_rewards_of_the_last_conversations_are_in_memory_and_all_others_in_the_journal(
    room: Room, generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classroom_rl.rollout.runner, "REMEMBERED", REMEMBERED)
    service = room.open(generation, keep=2)
    rewards, reward_counts = {}, []
    for step in range(BATCHES):
        for record in asyncio.run(service.sample(request(step))).conversations:
            rewards[record.id] = record.reward
        reward_counts.append(len(service.runner.rewards))
    assert reward_counts[2:] == [REMEMBERED] * (BATCHES - 2), "no more is held after more batches"
    assert list(service.runner.rewards) == list(rewards)[-REMEMBERED:]
    assert {record_id: service.reward("pedagogical", record_id) for record_id in rewards} == rewards


def test_a_whole_batch_stays_in_memory_while_the_next_one_is_played() -> None:
    assert 2 * LARGEST_BATCH <= classroom_rl.rollout.runner.REMEMBERED <= 4 * LARGEST_BATCH


def test_looking_at_what_is_played_now_keeps_no_rows_of_earlier_steps(room: Room, generation, tmp_path: Path) -> None:
    service, reader = room.open(generation), RunReader(room.folder)
    for step in range(BATCHES):
        records = asyncio.run(service.sample(request(step))).conversations
        assert [row.id for row in reader.playing()] == [record.id for record in records]
        write_rollouts(room.folder, step, 0, records)
        assert reader.page(ListQuery(where="now")).total == 0, "the step is in its file"
        assert reader.index.ids(reader.sets().files(f"step-{step}")) == {record.id for record in records}
    assert not reader.index._rows and not reader.index._problems
