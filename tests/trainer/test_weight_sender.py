"""Weights on their way from a trainer's memory to several servers, over real HTTP and gloo; engines are scripted."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import torch

from classroom_rl.engines.vllm.weight_stream import buffers_of, checksum, packed
from classroom_rl.errors import EngineFailure
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.weight_transfer import TensorInfo
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.weight_sender import WeightSender
from tests.support.receiving_servers import receiving_servers
from tests.support.receiving_teacher import ReceivingTeacher

CPU = torch.device("cpu")
BUFFER_BYTES = 1000
DEADLINE_S = 20.0

Servers = tuple[list[ReceivingTeacher], list[ClassroomClient]]


@pytest.fixture
def servers(tokenizer, tmp_path: Path, generation) -> Iterator[Callable[..., Servers]]:
    with receiving_servers(2, tokenizer, tmp_path, generation, DEADLINE_S) as running:
        yield running


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several types, one without elements, and one that is larger than a buffer."""
    torch.manual_seed(version)
    return {
        "a": torch.randn(5, 7),
        "b": torch.randn(3).bfloat16(),
        "c": torch.tensor(version),
        "d": torch.randn(20, 30).half().T,
        "e": torch.empty(0, 4),
        "f": torch.randn(101),
    }


def infos_of(weights: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [
        TensorInfo(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in weights.items()
    ]


def send(sender: WeightSender, version: int) -> None:
    weights = weights_of(version)
    pieces = ({name: each} for name, each in weights.items())
    sender.send(PolicyVersion("run", version), infos_of(weights), pieces)


def assert_received(teachers: list[ReceivingTeacher], version: int) -> None:
    for teacher in teachers:
        assert teacher.policy == PolicyVersion("run", version)
        wanted = weights_of(version)
        assert set(teacher.worker.received) == set(wanted)
        for name, weight in wanted.items():
            assert teacher.worker.received[name].dtype == weight.dtype and torch.equal(
                teacher.worker.received[name], weight
            ), name


def test_every_server_gets_every_version_in_one_group(servers: Servers) -> None:
    teachers, clients = servers
    sender = WeightSender(clients, CPU, DEADLINE_S, BUFFER_BYTES)
    for version in range(20):
        send(sender, version)
        assert_received(teachers, version)
    assert teachers[0].weights == teachers[1].weights and teachers[0].worker.groups == teachers[1].worker.groups
    assert len(teachers[0].worker.groups) == 2


def test_a_server_that_started_again_is_in_the_next_group(servers: Servers) -> None:
    teachers, clients = servers
    sender = WeightSender(clients, CPU, DEADLINE_S, BUFFER_BYTES)
    send(sender, 1)
    teachers[1].restart()
    send(sender, 2)
    assert_received(teachers, 2)
    first, second = (teacher.worker.groups for teacher in teachers)
    assert first[-1] == second[-1] != first[1]


@pytest.mark.parametrize("after", [1, 4, 6])
def test_a_server_that_dies_in_the_middle_ends_the_sending_and_the_next_one_works(servers: Servers, after: int) -> None:
    """The other server, which waits for the rest, notices it, too."""
    teachers, clients = servers
    sender = WeightSender(clients, CPU, DEADLINE_S, BUFFER_BYTES)
    send(sender, 1)
    teachers[0].worker.dies_after = after
    started = time.monotonic()
    with pytest.raises(EngineFailure):
        send(sender, 2)
    assert time.monotonic() - started < DEADLINE_S
    assert teachers[0].policy == PolicyVersion()
    for client in clients:
        client.wait_until_up(DEADLINE_S)
    for _ in range(3):  # the other server may only now notice that the first group is gone
        try:
            send(sender, 3)
            break
        except EngineFailure:
            time.sleep(0.5)
    assert_received(teachers, 3)


def test_a_sender_that_stops_sending_is_waited_for_until_the_deadline(tokenizer, tmp_path: Path, generation) -> None:
    deadline_s = 3.0
    with receiving_servers(1, tokenizer, tmp_path, generation, deadline_s) as (teachers, clients):
        sender = WeightSender(clients, CPU, 60, BUFFER_BYTES)
        send(sender, 1)

        def hanging() -> Iterator[dict[str, torch.Tensor]]:
            for name, each in weights_of(2).items():
                if name == "d":
                    time.sleep(deadline_s + 2)
                yield {name: each}

        started = time.monotonic()
        with pytest.raises(EngineFailure, match="too late"):
            sender.send(PolicyVersion("run", 2), infos_of(weights_of(2)), hanging())
        assert deadline_s < time.monotonic() - started < deadline_s + 10
        assert teachers[0].policy == PolicyVersion()
        send(sender, 3)
        assert_received(teachers, 3)


def test_weights_that_were_not_announced_are_not_sent(servers: Servers) -> None:
    """Receivers would take bytes of one tensor for another's."""
    _, clients = servers
    sender = WeightSender(clients, CPU, DEADLINE_S, BUFFER_BYTES)
    for wrong in ({"a": torch.randn(7, 5)}, {"b": torch.randn(5, 7)}, {"a": torch.randn(5, 7).double()}):
        with pytest.raises(ValueError, match="was announced"):
            sender.send(PolicyVersion("run", 1), infos_of(weights_of(1)), iter([wrong]))
    with pytest.raises(ValueError, match="which was not announced"):
        list(packed([weights_of(1)], infos_of(weights_of(1))[:-1], BUFFER_BYTES, CPU))


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": []},
        {"tensors": [{"name": "a", "dtype": "object", "shape": [1]}]},
        {"tensors": [{"name": "a", "dtype": "float32", "shape": [-1]}]},
        {"tensors": [{"name": "a", "dtype": "float32", "shape": [1], "more": 1}]},
        {"group": {"id": "g", "rank_offset": 0, "world_size": 2, "packed_buffer_size_bytes": 10}},
        {"version": -1},
        {"more": 1},
    ],
)
def test_requests_that_make_no_sense_are_refused(servers: Servers, change: dict) -> None:
    teachers, clients = servers
    group = {"id": "g", "rank_offset": 1, "world_size": 2, "packed_buffer_size_bytes": 10, "master_address": "x"}
    body = {"run_id": "run", "version": 1, "group": group}
    body["tensors"] = [{"name": "a", "dtype": "float32", "shape": [1]}]
    assert requests.post(f"{clients[0].url}/weights/receive", json=body | change).status_code == 422
    assert teachers[0].worker.groups == [""]


def test_buffers_hold_all_tensors_in_order_where_their_types_may_begin() -> None:
    infos = infos_of(weights_of(0))
    for most in (1, 100, 1000, 10**6):
        plans = list(buffers_of(infos, most))
        assert [each for plan in plans for each in plan.tensors] == infos
        assert all(start % 8 == 0 for plan in plans for start in plan.starts)
        assert all(plan.size <= most or len(plan.tensors) == 1 for plan in plans)


def test_a_checksum_depends_on_every_byte_and_its_place() -> None:
    """It is what GPUs compute; here on the CPU, over more than one block."""
    torch.manual_seed(0)
    buffer = torch.randint(0, 256, (9_000_003,), dtype=torch.uint8)
    sums = {checksum(buffer).item()}
    for place in (0, 7, 8, 4_000_000, 8_999_999, 9_000_002):
        for bit in (1, 128):
            changed = buffer.clone()
            changed[place] ^= bit
            sums.add(checksum(changed).item())
    for one, other in ((0, 8), (15, 8_400_015)):  # the same bit of two words: signs of two weights
        changed = buffer.clone()
        changed[[one, other]] ^= 128
        sums.add(checksum(changed).item())
    swapped = buffer.clone()
    swapped[:8], swapped[8:16] = buffer[8:16], buffer[:8]
    assert len(sums | {checksum(swapped).item()}) == 1 + 12 + 2 + 1
    assert checksum(buffer.clone()) == checksum(buffer)
