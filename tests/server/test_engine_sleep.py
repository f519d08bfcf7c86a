"""Server and trainer take turns on a GPU. Engines that record their calls replace vLLM; everything from the routes to
the optimizer's step is real."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
import uvicorn

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError, GpuFull
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.engine import EngineHealth
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.engine_sleep import is_alive, this_process
from classroom_rl.server.schemas import Health, ProcessId
from classroom_rl.trainer.servers import SharedGpus, assign_server, engines_have_to_sleep
from tests.conftest import free_port, quickstart_overrides
from tests.server.conftest import id_of
from tests.support.configs import training
from tests.support.replay_server import health
from tests.support.scripted_room import SCORES
from tests.support.waiting import wait_until

GPU = "5f1ce8a2-0000-0000-0000-000000000001"
BOTH = {"weights", "kv_cache"}


class RecordingEngine:
    """Stands where vLLM's AsyncLLM does; it fails if it is used asleep."""

    def __init__(self, name: str, tokenizer, events: list[str]):
        self.name, self.events = name, events
        self.model_config = SimpleNamespace(enable_sleep_mode=True, try_get_generation_config=dict)
        self.errored = False
        self.awake = set(BOTH)
        self.failure: Exception | None = None
        self.held = False  # no turn ends while it is
        self._tokenizer = tokenizer
        self.engine_core = self
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=1))

    def get_tokenizer(self):
        return self._tokenizer

    async def call_utility_all_async(self, utility: str, method: str, *_: object) -> list:
        assert (utility, method) == ("collective_rpc", "gpu")
        return [[GPU]]

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        if method == "exit_with_server":
            return [None]
        assert "weights" in self.awake, "weights were loaded into an engine that sleeps"
        self.events.append(f"{self.name}: {method}, awake: {', '.join(sorted(self.awake))}")
        return [None]

    async def reset_prefix_cache(self) -> bool:
        return True

    async def sleep(self, level: int) -> None:
        self.events.append(f"{self.name}: sleep {level}")
        self.awake.clear()

    async def wake_up(self, tags: list[str] | None) -> None:
        if self.failure is not None:
            raise self.failure
        self.events.append(f"{self.name}: wake {', '.join(tags or ['all'])}")
        self.awake |= set(tags or BOTH)

    async def generate(self, prompt: dict, params, request_id: str, lora_request: object = None):
        assert self.awake == BOTH, "a turn was sampled by an engine that sleeps"
        self.events.append("turns")
        await asyncio.sleep(0)
        while self.held:
            await asyncio.sleep(0.01)
        assert self.awake == BOTH, "an engine was put to sleep under a turn"
        reply = json.dumps(SCORES) if self.name == "judge" else "Good ."
        ids = [*self._tokenizer.encode(reply), params.stop_token_ids[0]][: params.max_tokens]
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
        end = {"finish_reason": "stop", "stop_reason": None}
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs, **end)])

    def shutdown(self) -> None:
        """Nothing runs."""


async def no_openai_routes(*_: object) -> None:
    """They are vLLM's own, and need a real engine of it."""


class Classroom:
    """A server with recording engines, listening."""

    def __init__(self, config: TrainRLConfig, engines: list[RecordingEngine], events: list[str]):
        from classroom_rl.server.app import create_app

        self.config, self.engines, self.events = config, engines, events
        self.folder = Path(config.logging.save_dir)
        self.client = ClassroomClient(f"http://127.0.0.1:{config.generation.server_port}", log=self.folder / "log")
        self.app = app = create_app(config, self.folder)
        port = config.generation.server_port
        options = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
        self._threads = ThreadPoolExecutor()
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        self.client.wait_until_up(60, alive=self._thread.is_alive)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(120)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def asleep(self) -> list[bool]:
        return [role.asleep for role in self.client.health().roles.values()]

    def hold(self, held: bool) -> None:
        for engine in self.engines:
            engine.held = held

    def sample(self, name: str) -> "Future[SampleResponse]":
        """One conversation, sampled on another thread."""
        request = SampleRequest(problems=[_LESSON], answers=[""], request_id=name, seed=1, step=0)
        return self.submit(self.client.sample, request)

    def submit(self, work: Callable, *arguments: object) -> "Future":
        """Have this done on another thread."""
        return self._threads.submit(work, *arguments)


_LESSON = "Say where you were."
Opened = Callable[..., Classroom]


@pytest.fixture
def open_classroom(world: Path, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens a server with recording engines, by overrides of the quickstart's configuration."""
    classrooms: list[Classroom] = []

    def open_with(*overrides: str, roles: tuple[str, ...] = ("teacher", "student")) -> Classroom:
        events: list[str] = []
        engines = [RecordingEngine(name, tokenizer, events) for name in roles]
        pending = list(engines)
        monkeypatch.setattr("classroom_rl.engines.vllm.engine.load_engine", lambda *_, runner: pending.pop(0))
        monkeypatch.setattr("classroom_rl.server.app.add_openai_routes", no_openai_routes)
        arguments = quickstart_overrides(tmp_path, world / "blank", world, free_port())
        config = training(*arguments, *overrides)
        classrooms.append(Classroom(config, engines, events))
        return classrooms[-1]

    yield open_with
    for classroom in classrooms:
        classroom.close()


def in_order(events: list[str]) -> list[str]:
    """The events with repetitions of one taken together."""
    return [event for event, _ in groupby(events)]


# The order of a whole training --------------------------------------------------------------------------------------

AWAKE_FOR_WEIGHTS = [
    "the trainer makes room",
    "teacher: wake weights",
    "teacher: load_policy, awake: weights",
    "teacher: wake kv_cache",
    "the trainer makes room",
    "student: wake all",
]
ASLEEP = ["teacher: sleep 1", "student: sleep 1"]


def test_engines_sleep_through_every_step_and_wake_for_every_rollout(open_classroom, monkeypatch):
    from classroom_rl.trainer import run

    classroom = open_classroom("generation.colocate=true", "train.max_steps=2")
    events = classroom.events

    class Steps(run.GRPOMetricsCallback):
        def on_optimizer_step(self, *arguments, **named):
            assert all(classroom.asleep())
            events.append("step")

    load_policy = run.load_policy

    def load_beside_sleepers(*arguments):
        assert all(classroom.asleep()), "the trainer's model was loaded beside engines that were awake"
        return load_policy(*arguments)

    monkeypatch.setattr(run, "GRPOMetricsCallback", Steps)
    monkeypatch.setattr(run, "load_policy", load_beside_sleepers)
    monkeypatch.setattr(
        "classroom_rl.trainer.servers.clear_device_cache",
        lambda garbage_collection: events.append("the trainer makes room"),
    )
    run.train(classroom.config)
    rollout = [*AWAKE_FOR_WEIGHTS, "turns", *ASLEEP, "step"]
    assert in_order(events) == [*ASLEEP, *rollout, *rollout, *AWAKE_FOR_WEIGHTS]
    assert classroom.client.health().policy.version == 2
    assert not any(classroom.asleep())
    classroom.sample("after-the-training").result(120)


def test_without_a_shared_gpu_nobody_sleeps(open_classroom):
    from classroom_rl.trainer.run import train

    classroom = open_classroom("train.max_steps=1")
    train(classroom.config)
    load_policy = "teacher: load_policy, awake: kv_cache, weights"
    assert in_order(classroom.events) == [load_policy, "turns", load_policy]


# Several ranks ------------------------------------------------------------------------------------------------------


def one_rank(rank: int, port: int, server_url: str, folder: str) -> None:
    """One of two ranks that sample their slices; the second one is done long after the first."""
    import os

    from accelerate import PartialState

    from classroom_rl.rollout.problem import Problem
    from classroom_rl.trainer.sample_batch import BatchPlayer

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    state = PartialState(cpu=True, backend="gloo")
    client = ClassroomClient(server_url)
    sample = client.sample
    client.sample = lambda request: (sample(request), time.sleep(2.0 * rank))[0]
    batch = ["train.number_of_problems_per_batch=1", "train.num_samples_per_problem=4"]
    session = SimpleNamespace(
        config=training(*batch, "judge_model.max_failed_share=1"),
        problems=[Problem.of(_LESSON, "")],
        client=client,
        gpus=SharedGpus(client, assign_server(GenerationConfig(), rank, 2), True, Path(folder)),
        run_folder=Path(folder),
        run_id="run",
    )
    session.gpus.sleep_engines()
    BatchPlayer(session).play(PolicyVersion(), 0, 1, state)
    (Path(folder) / f"rank{rank}").write_text(str(client.health().roles["teacher"].asleep))
    state.wait_for_everyone()
    state.destroy_process_group()


def test_one_rank_of_two_puts_the_server_to_sleep_when_both_are_done(open_classroom):
    classroom = open_classroom()
    arguments = (free_port(), classroom.client.url, str(classroom.folder))
    torch.multiprocessing.spawn(one_rank, arguments, nprocs=2)
    expected = [*ASLEEP, "teacher: wake all", "student: wake all", "turns", *ASLEEP]
    # once both ranks have ended, the server wakes the engines again, perhaps before this process looks
    assert in_order(classroom.events)[: len(expected)] == expected
    assert [(classroom.folder / f"rank{rank}").read_text() for rank in (0, 1)] == ["True", "True"]


# The server on its own ----------------------------------------------------------------------------------------------


def test_sleep_and_waking_may_be_asked_for_twice(open_classroom):
    client = (classroom := open_classroom()).client
    for _ in range(2):
        assert client.sleep([this_process()]).asleep == {"teacher": True, "student": True}
    for _ in range(2):
        assert client.wake_up().asleep == {"teacher": False, "student": False}
    assert classroom.events == [*ASLEEP, "teacher: wake all", "student: wake all"]


def test_a_request_waits_while_the_trainer_has_the_gpu(open_classroom):
    classroom = open_classroom()
    classroom.client.sleep([this_process()])
    evaluation = classroom.sample("evaluation")
    time.sleep(2.5)  # more than one look at the borrower
    assert not evaluation.done() and "turns" not in classroom.events
    classroom.client.wake_up()
    evaluation.result(120)


def test_a_server_whose_trainer_died_answers_again(open_classroom, trainer):
    classroom = open_classroom()
    classroom.client.sleep([id_of(trainer)])
    evaluation = classroom.sample("evaluation")
    time.sleep(1.5)
    assert not evaluation.done()
    trainer.kill()  # and nobody waits for it: it is left as a zombie
    evaluation.result(120)
    assert not any(classroom.asleep())


def held_talk(classroom: Classroom) -> "Future[SampleResponse]":
    """A conversation whose turn is in an engine that lets none end."""
    classroom.hold(True)
    talk = classroom.sample("talk")
    wait_until(lambda: "turns" in classroom.events)
    return talk


def test_sleep_waits_for_turns_in_flight_and_gives_up_in_the_end(open_classroom):
    classroom = open_classroom("generation.load_weights_timeout_s=0.3")
    talk = held_talk(classroom)
    body = {"borrowers": [this_process().model_dump()]}
    response = requests.post(f"{classroom.client.url}/sleep", json=body, timeout=120)
    assert response.status_code == 504 and "1 turns were still being sampled after 0.3 s" in response.text
    assert not any(classroom.asleep())
    classroom.hold(False)
    talk.result(60)


def test_sleep_lets_turns_in_flight_end(open_classroom):
    classroom = open_classroom()
    talk = held_talk(classroom)
    asleep = classroom.submit(classroom.client.sleep, [this_process()])
    gates = [engine.gate for engine in classroom.app.state.service.environment.roles.engines.values()]
    wait_until(lambda: not any(gate._open.is_set() for gate in gates))
    classroom.hold(False)
    asleep.result(120)  # the engine asserts that no turn is in it
    assert not talk.done() and all(classroom.asleep())
    classroom.client.wake_up()
    talk.result(60)


def test_an_engine_that_cannot_wake_says_what_to_do_and_may_be_woken_later(open_classroom):
    classroom = open_classroom()
    classroom.client.sleep([this_process()])
    classroom.engines[1].failure = Exception("Call to wake_up method failed: CUDA Error: out of memory")
    with pytest.raises(GpuFull, match=r"CUDA Error: out of memory.* Lower vllm.gpu_memory_utilization"):
        classroom.client.wake_up()
    assert classroom.asleep() == [False, True]
    classroom.engines[1].failure = None
    classroom.client.wake_up()
    assert classroom.asleep() == [False, False]


# Phases -------------------------------------------------------------------------------------------------------------

THREE = ("teacher", "student", "judge")


def phased(world: Path, folder: Path) -> list[str]:
    rule = folder / "judge.txt"
    rule.write_text("{{ problem }} {{ conversation[-1].content }}")
    return [
        "generation.schedule=phased",
        f"judge_model.model_name_or_path={world / 'blank'}",
        "judge_model.vllm.max_length=1024",
        f"generation.judges_rules_prompts_paths={{pedagogical_eval: {rule}}}",
        "train.max_steps=1",
    ]


AS_EACH_IS_LOADED = ["teacher: sleep 1", "student: sleep 1", "judge: sleep 1"]
DIALOGUE_WAKES = ["teacher: wake all", "student: wake all"]
JUDGING = ["turns", *ASLEEP, "judge: wake all", "turns", "judge: sleep 1", *DIALOGUE_WAKES]


def test_with_phases_engines_sleep_as_they_are_loaded_and_between_phases(open_classroom, world, tmp_path):
    """Each recording engine asserts that it is awake while a turn is sampled from it."""
    classroom = open_classroom(*phased(world, tmp_path), roles=THREE)
    wait_until(lambda: not any(classroom.asleep()[:2]))
    assert in_order(classroom.events) == [*AS_EACH_IS_LOADED, *DIALOGUE_WAKES]
    assert classroom.asleep() == [False, False, True]
    classroom.events.clear()
    classroom.sample("one").result(120)
    wait_until(lambda: in_order(classroom.events) == JUDGING)
    classroom.events.clear()
    for request in [classroom.sample(f"many{number}") for number in range(16)]:
        request.result(60)
    wait_until(lambda: classroom.asleep() == [False, False, True])
    judged = classroom.events.count("judge: wake all")
    assert 1 <= judged <= 16 and classroom.events.count("teacher: wake all") == judged


def test_phases_and_a_trainer_on_the_same_gpu(open_classroom, world, tmp_path):
    from classroom_rl.trainer.run import train

    classroom = open_classroom(*phased(world, tmp_path), "generation.colocate=true", roles=THREE)
    classroom.events.clear()
    train(classroom.config)
    weights = ["teacher: wake weights", "teacher: load_policy, awake: weights", "teacher: wake kv_cache"]
    awake = [*weights, "student: wake all"]
    assert in_order(classroom.events) == [*ASLEEP, *awake, *JUDGING, *ASLEEP, *awake]
    assert classroom.asleep() == [False, False, True] and classroom.client.health().policy.version == 1


# Who takes turns ----------------------------------------------------------------------------------------------------


def health_on(gpus: list[str], can_sleep: bool) -> Health:
    role = EngineHealth(model="m", engine="vllm", engine_version="", pids=[], gpus=gpus, can_sleep=can_sleep)
    return health("", roles={"teacher": role})


@pytest.mark.parametrize(
    ("colocate", "server", "own", "wanted"),
    [
        (None, health_on([GPU], True), [GPU], True),
        (None, health_on([GPU, "other"], True), ["third", "other"], True),
        (None, health_on([GPU], True), ["other"], False),
        (None, health_on([GPU], False), [GPU], False),  # the server was started with colocate=false
        (None, health_on([], False), [None], False),  # no GPU at all
        (False, health_on([GPU], True), [GPU], False),
        (True, health_on([GPU], True), ["other"], True),
        (True, health_on([], False), [None], True),  # on a CPU only the turns wait
    ],
)
def test_turns_are_taken_where_a_gpu_is_shared(colocate, server, own, wanted):
    assert engines_have_to_sleep(colocate, server, own) is wanted


def test_turns_with_a_server_that_cannot_sleep_are_refused():
    with pytest.raises(ConfigError, match="started with generation.colocate=false"):
        engines_have_to_sleep(True, health_on([GPU], False), [GPU])


def test_a_process_is_told_from_a_later_one_with_its_number():
    process = this_process()
    assert is_alive(process)
    assert not is_alive(process.model_copy(update={"started": process.started - 60}))
    assert not is_alive(process.model_copy(update={"pid": 2**22 + 1}))
    assert is_alive(ProcessId(host="another-machine", pid=2**22 + 1, started=0.0))
