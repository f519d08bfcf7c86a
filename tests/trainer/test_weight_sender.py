"""Weights on their way from a trainer's memory to several servers, over real HTTP and gloo; engines are scripted."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import torch

from classroom_rl.errors import EngineFailure
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.weight_sender import WeightSender
from tests.conftest import free_port
from tests.engines.vllm.test_weight_stream import infos_of, weights_of
from tests.support.receiving_servers import receiving_servers
from tests.support.receiving_teacher import ReceivingTeacher

CPU = torch.device("cpu")
BUFFER_BYTES = 1000
DEADLINE_S = 20.0
GROUP = {
    "id": "g",
    "rank_offset": 1,
    "world_size": 2,
    "packed_buffer_size_bytes": 10,
    "master_address": "127.0.0.1",
    "master_port": 1,
}

Servers = tuple[list[ReceivingTeacher], list[ClassroomClient]]


@pytest.fixture
def servers(tokenizer, tmp_path: Path, generation) -> Iterator[Callable[..., Servers]]:
    with receiving_servers([free_port(), free_port()], tokenizer, tmp_path, generation, DEADLINE_S) as running:
        yield running


def send(sender: WeightSender, version: int) -> None:
    weights = weights_of(version)
    pieces = ({name: weight} for name, weight in weights.items())
    sender.send(PolicyVersion("run", version), infos_of(weights), pieces)


def assert_received(teachers: list[ReceivingTeacher], version: int) -> None:
    for teacher in teachers:
        assert teacher.policy == PolicyVersion("run", version)
        expected = weights_of(version)
        assert set(teacher.worker.received) == set(expected)
        for name, weight in expected.items():
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


def test_a_lost_server_is_left_out_of_the_group_and_is_in_it_again_when_it_is_back(servers: Servers) -> None:
    teachers, clients = servers
    sender = WeightSender(clients, CPU, DEADLINE_S, BUFFER_BYTES)
    for version, receivers in enumerate((clients, clients[:1], clients)):
        sender.send_to(receivers)
        send(sender, version)
        assert_received(teachers[: len(receivers)], version)
    assert [len(teacher.worker.groups) for teacher in teachers] == [4, 3]


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
    with receiving_servers([free_port()], tokenizer, tmp_path, generation, deadline_s) as (teachers, clients):
        sender = WeightSender(clients, CPU, 60, BUFFER_BYTES)
        send(sender, 1)

        def hanging() -> Iterator[dict[str, torch.Tensor]]:
            for name, weight in weights_of(2).items():
                if name == "d":
                    time.sleep(deadline_s + 2)
                yield {name: weight}

        started = time.monotonic()
        with pytest.raises(EngineFailure):  # the answer of the server, or the connection that it closed
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


NO_SENSE = [
    {"tensors": []},
    {"tensors": [{"name": "a", "dtype": "object", "shape": [1]}]},
    {"tensors": [{"name": "a", "dtype": "float32", "shape": [-1]}]},
    {"tensors": [{"name": "a", "dtype": "float32", "shape": [1], "more": 1}]},
    {"group": GROUP | {"rank_offset": 0}},
    {"group": GROUP | {"rank_offset": 2}},
    {"group": GROUP | {"packed_buffer_size_bytes": 2**40}},
    {"group": GROUP | {"master_port": None}},
    {"group": GROUP | {"nccl_unique_id_b64": "AAAA"}},
    {"version": -1},
    {"more": 1},
]


def test_requests_that_make_no_sense_are_refused(servers: Servers) -> None:
    teachers, clients = servers
    body = {"run_id": "run", "version": 1, "group": GROUP}
    body["tensors"] = [{"name": "a", "dtype": "float32", "shape": [1]}]
    for change in NO_SENSE:
        assert requests.post(f"{clients[0].url}/weights/receive", json=body | change).status_code == 422, change
    assert teachers[0].worker.groups == [""]
