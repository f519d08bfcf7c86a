"""One server per machine: which process talks to which server, what each server stores, and that all load the
weights."""

import asyncio
import os
import re
import socket
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_machines
from classroom_rl.errors import ConfigError
from classroom_rl.launch.cli import main as launcher
from classroom_rl.rollout.engine import EngineHealth
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.server.app import server_subfolder
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.server.engine_sleep import EngineSleep, this_process
from classroom_rl.server.schemas import ProcessId
from classroom_rl.system.run_lock import claim
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.servers import AssignedServer, SharedGpus, assign_server
from classroom_rl.trainer.session import connect
from tests.conftest import free_port, running_server
from tests.support.configs import training
from tests.support.replay_server import Replay, health, served
from tests.trainer.test_several_processes import launch, metrics_of

TWO = ["http://127.0.0.1:8005", "http://127.0.0.1:8006"]


def servers_of(urls: list[str] | None, processes: int) -> list[AssignedServer]:
    generation = GenerationConfig(server_urls=urls)
    return [assign_server(generation, rank, processes) for rank in range(processes)]


@pytest.mark.parametrize(
    ("servers", "processes", "places"),
    [
        (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]),  # two machines with four GPUs each
        (2, 2, [0, 1]),
        (3, 3, [0, 1, 2]),
        (1, 4, [0, 0, 0, 0]),
        (2, 3, [0, 0, 1]),
        (4, 8, [0, 0, 1, 1, 2, 2, 3, 3]),  # two servers on each of two machines
    ],
)
def test_processes_are_dealt_out_in_order_and_one_speaks_for_each_server(servers, processes, places) -> None:
    urls = [f"http://127.0.0.1:{8005 + i}/" for i in range(servers)]
    assigned = servers_of(urls, processes)
    assert [server.index for server in assigned] == places
    assert [server.url for server in assigned] == [f"http://127.0.0.1:{8005 + index}" for index in places]
    assert [server.index for server in assigned if server.is_leader] == list(range(servers))


def test_without_addresses_there_is_the_one_server() -> None:
    assert servers_of(None, 2) == [
        AssignedServer(0, "http://127.0.0.1:8005", True),
        AssignedServer(0, "http://127.0.0.1:8005", False),
    ]


def test_with_more_servers_than_processes_the_first_process_leads_all(monkeypatch) -> None:
    assert [(server.index, server.is_leader) for server in servers_of([*TWO, TWO[0]], 2)] == [(0, True), (0, False)]
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="generation.server_urls is 10.0.0.2, which other machines can reach"):
        servers_of(["http://127.0.0.1:8005", "http://10.0.0.2:8005"], 1)


@pytest.mark.parametrize(
    ("more", "machines", "processes", "message"),
    [
        ((), 2, 2, None),
        ((), 1, 1, None),
        ((), 2, 1, "2 servers for 1 processes, so each process uses them all, but http://127.0.0.1:8005 means each"),
        (("generation.colocate=true",), 1, 2, None),
        (("generation.colocate=true",), 1, 1, "generation.colocate is true: only a server of its own takes turns"),
    ],
)
def test_what_the_launch_decides_about_more_servers_than_processes(more, machines, processes, message) -> None:
    config = training(f"generation.server_urls=[{','.join(TWO)}]", *more)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_machines(config, machines, processes)


def test_servers_that_use_a_gpu_of_the_trainer_are_no_more_than_its_processes(tmp_path, monkeypatch) -> None:
    engine = EngineHealth(model="m", engine="e", engine_version="", pids=[], gpus=["gpu-7"], can_sleep=True)
    clients = [
        SimpleNamespace(health=lambda roles=roles: health(tmp_path, roles=roles)) for roles in ({}, {"teacher": engine})
    ]
    state = SimpleNamespace(process_index=0, num_processes=1)
    client = BalancedServers(clients, training(), state, tmp_path)
    with_server = partial(SharedGpus.with_server, client, AssignedServer(0, TWO[0], True), None, tmp_path)
    assert with_server().placement == "cpu"
    monkeypatch.setattr("classroom_rl.trainer.servers.gpu_id", lambda _: "gpu-7")
    with pytest.raises(ConfigError, match="one of them uses a GPU of the trainer's"):
        with_server()


def test_a_server_elsewhere_needs_a_token(monkeypatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="generation.server_urls is 10.0.0.2, which other machines can reach"):
        servers_of(["http://127.0.0.1:8005", "http://10.0.0.2:8005"], 2)
    monkeypatch.setenv(TOKEN_VARIABLE, "t" * 32)
    assert servers_of(["http://127.0.0.1:8005", "http://10.0.0.2:8005"], 2)[1].url == "http://10.0.0.2:8005"


def test_the_same_local_address_means_each_machines_own(monkeypatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assigned = servers_of(["http://127.0.0.1:8005"] * 2, 4)
    assert [(server.index, server.is_leader) for server in assigned] == [(0, True), (0, False), (1, True), (1, False)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["generation.server_urls=[]"], "generation.server_urls is empty"),
        (["generation.server_urls=[machine:8005]"], "is 'machine:8005'; it must begin with http"),
        (["generation.server_index=1"], "generation.server_index is 1; it must be from 0 to 0"),
        ([f"generation.server_urls=[{','.join(TWO)}]", "generation.server_index=2"], "must be from 0 to 1"),
    ],
)
def test_addresses_and_places_are_checked(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        training(*overrides)


def test_a_server_in_another_place_than_its_address_is_refused(tmp_path) -> None:
    with served(Replay(health(tmp_path), [], lambda _: None)) as port:
        url = f"http://127.0.0.1:{port}"
        config = training(f"logging.save_dir={tmp_path}")
        assert connect(config, AssignedServer(0, url, True)).url == url
        with pytest.raises(ConfigError, match="is number 0 of this run, but number 1 in generation.server_urls"):
            connect(config, AssignedServer(1, url, True))


def test_the_launcher_tells_each_machines_server_its_place(capsys) -> None:
    arguments = ["--config-name", "quickstart", "dry_run=true", f"generation.server_urls=[{','.join(TWO)}]"]
    machines = ["--config_file", "config/deepspeed/zero2_2CPU.yaml", "--num_machines", "2", "--main_process_ip", "x"]
    assert launcher([*arguments, *machines, "--machine_rank", "1"]) == 0
    server, trainer = capsys.readouterr().out.strip().splitlines()[-2:]
    assert server.endswith("generation.server_index=1") and "server_index" not in trainer
    assert launcher([*arguments, "--config_file", "config/deepspeed/zero2_2CPU.yaml"]) == 0
    assert "generation.server_index=" not in capsys.readouterr().out.split("classroom_rl.launch.server")[1]


def test_servers_work_side_by_side_in_a_run_folder(tmp_path) -> None:
    with (
        claim("vllm_server", tmp_path / server_subfolder(0)),
        claim("vllm_server", tmp_path / server_subfolder(1)),
        pytest.raises(ConfigError, match=f"Process {os.getpid()} works in"),
    ):
        claim("vllm_server", tmp_path / server_subfolder(1))


def test_a_server_watches_the_borrowers_on_its_own_machine(monkeypatch) -> None:
    """A process elsewhere cannot be looked at and counts as running: it must not keep engines asleep for ever."""
    monkeypatch.setattr("classroom_rl.server.engine_sleep._SECONDS_BETWEEN_TRAINER_CHECKS", 0.01)
    gone = this_process().model_copy(update={"started": 0.0})
    elsewhere = ProcessId(host=f"not-{socket.gethostname()}", pid=1, started=0.0)

    class Engine:
        awake = True

        async def sleep(self, timeout_s: float) -> None:
            self.awake = False

        async def wake_up(self) -> None:
            self.awake = True

    async def awake_again(*borrowers: ProcessId) -> bool:
        engine_sleep = EngineSleep({"teacher": (engine := Engine())}, 1.0)
        await engine_sleep.sleep(borrowers)
        for _ in range(50):
            await asyncio.sleep(0.01)
        engine_sleep.close()
        return engine.awake

    assert asyncio.run(awake_again(gone, elsewhere))
    assert not asyncio.run(awake_again(this_process(), elsewhere)) and not asyncio.run(awake_again(elsewhere))


@pytest.mark.full
def test_two_processes_train_with_a_server_each(world: Path, tmp_path: Path) -> None:
    """Three groups of four: the second one is split between the processes, and so between the servers."""
    ports = [free_port(), free_port()]
    urls = f"generation.server_urls=[{','.join(f'http://127.0.0.1:{port}' for port in ports)}]"
    run_folder = tmp_path / "run"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_server(world, run_folder, urls, f"generation.server_index={i}", port=port))
            for i, port in enumerate(ports)
        ]
        sizes = ["train.number_of_problems_per_batch=3", "train.per_device_train_batch_size=2", "train.max_steps=2"]
        result = launch("zero3_2CPU", [*servers[0].overrides, *sizes])
        assert result.returncode == 0, result.stderr[-4000:]
        healths = [server.client.health() for server in servers]
        assert [server_health.server_index for server_health in healths] == [0, 1]
        assert healths[0].policy == healths[1].policy and healths[0].policy.version == 2
        assert {server_health.run_folder for server_health in healths} == {str(run_folder)}
    assert [line["step"] for line in metrics_of(run_folder)] == [1, 2]
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.002 for line in metrics_of(run_folder))
    journals = [list(read_journal(run_folder / part / JOURNAL_NAME)) for part in (".", "server1")]
    records = []
    for rank, journal in enumerate(journals):
        batches = [event["request"] for event in journal if event["event"] == "batch"]
        assert [re.search(r"step(\d+)-rank(\d)of2", request_id).groups() for request_id in batches] == [
            (f"{step:06d}", str(rank)) for step in (0, 1)
        ], "each process's conversations were played by its own server"
        versions = [event["version"]["version"] for event in journal if event["event"] == "weights"]
        assert versions == [0, 1, 2], "each version was published once to each server"
        records.append([event["record"] for event in journal if event["event"] == "conversation"])
    for step in (0, 1):
        of_step = [[record for record in server_records if record["step"] == step] for server_records in records]
        first, second = ({record["problem_id"] for record in server_records} for server_records in of_step)
        shared = first & second
        assert len(first | second) == 3 and len(shared) == 1
        group = [record for server_records in of_step for record in server_records if record["problem_id"] in shared]
        assert len(group) == 4 and len({(record["type"], record["student_name"]) for record in group}) == 1
        schedules = {tuple(turn["persona"] for turn in record["turns"])[:3] for record in group}
        assert len(schedules) == 1, "one schedule of errors for the group, whichever server played"
