"""How engines start and end: several at once, each with its own environment and processes, and none is left over."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest

import classroom_rl.engines.vllm.engine_base
import classroom_rl.server.open_models
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.values import PHASED
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.engines.vllm.engine_base import EngineProcess
from classroom_rl.engines.vllm.engine_start import start_engine
from classroom_rl.errors import EngineFailure
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.rollout.environment import LoadedModels
from classroom_rl.server.open_models import _start_engines
from classroom_rl.system.startup import OPENMP_VARIABLES, SHORT_WAIT
from tests.conftest import RunningServer

CORES = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND")
NAMES = (*CORES, *OPENMP_VARIABLES)
TEACHER = ModelConfig("teacher", VllmConfig(cpu_kvcache_gib=1, cpu_cores="0"))
STUDENT = ModelConfig("student", VllmConfig(cpu_kvcache_gib=3))
DEADLINE_S = 60


def _report(answers: Connection) -> None:
    answers.send({name: os.environ.get(name) for name in NAMES})
    answers.recv()  # until it is ended


@pytest.fixture
def processes() -> Iterator[list]:
    started = []
    yield started
    for process in started:
        process.terminate()
        process.join(DEADLINE_S)


def loading(processes: list, both: threading.Barrier):
    """In place of vLLM: starts a process late, which tells its environment; ends when both engines' processes run."""

    def load() -> SimpleNamespace:
        time.sleep(0.3)
        parent_end, child_end = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_report, args=(child_end,), daemon=True)
        process.start()
        processes.append(process)
        both.wait(DEADLINE_S)
        assert parent_end.poll(DEADLINE_S)
        return SimpleNamespace(pid=process.pid, environment=parent_end.recv(), pipe=parent_end)

    return load


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "active"}])
def test_engines_that_start_at_once_have_their_own_environments_and_processes(
    processes: list, monkeypatch, given: dict[str, str]
) -> None:
    for name in OPENMP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"OMP_NUM_THREADS": "7"} | given).items():
        monkeypatch.setenv(name, value)
    waits = {name: (given or SHORT_WAIT).get(name) for name in OPENMP_VARIABLES}
    before, barrier = {name: os.environ.get(name) for name in NAMES}, threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(start_engine, model, loading(processes, barrier)) for model in (TEACHER, STUDENT)]
        (teacher, of_teacher), (student, of_student) = [start.result(DEADLINE_S) for start in starts]
    assert of_teacher == [teacher.pid] and of_student == [student.pid]
    assert teacher.environment == dict(zip(CORES, ("1", "0", "1", "{0}", "true"), strict=True)) | waits
    assert student.environment == dict(zip(CORES, ("3", None, "7", None, None), strict=True)) | waits
    assert {name: os.environ.get(name) for name in NAMES} == before


@pytest.mark.parametrize(("given", "wanted"), [(None, "0"), ("1", "1")])
def test_no_turn_waits_for_kernels_that_are_compiled_first(monkeypatch, given: str | None, wanted: str) -> None:
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.setenv(name, "to be restored")
    os.environ.pop(name)
    if given is not None:
        monkeypatch.setenv(name, given)
    assert start_engine(TEACHER, lambda: os.environ[name])[0] == wanted


@pytest.mark.parametrize(("set_before", "method"), [(None, "spawn"), ("fork", "fork")])
def test_engines_spawn_their_processes_unless_told_otherwise(set_before, method, monkeypatch):
    """vLLM forks on GPUs, but its CPU build never does. So the test asks before vLLM knows its platform."""
    from vllm.utils.system_utils import get_mp_context

    class Engine(EngineProcess):
        @staticmethod
        def _load(*_):
            raise ValueError(get_mp_context().get_start_method())

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", set_before or "")
    if set_before is None:
        monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    with pytest.raises(EngineFailure, match=f"could not load m: {method}$"):
        asyncio.run(Engine.start(ModelConfig("m"), 1, GenerationConfig()))


def test_an_engine_that_fails_before_it_has_a_process_leaves_the_environment_as_it_was() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    before = {name: os.environ.get(name) for name in NAMES}
    with pytest.raises(ValueError, match="no such model"):
        start_engine(TEACHER, fail)
    assert {name: os.environ.get(name) for name in NAMES} == before
    assert start_engine(STUDENT, lambda: "needs no process") == ("needs no process", [])


class _Starts:
    """In place of `VllmEngine.start`: counts the starts under way; the student's fails once the teacher is there."""

    def __init__(self, student_fails: bool = False):
        self.running = self.most = 0
        self.shut_down: list[str] = []
        self.cancelled: list[str] = []
        self._student_fails, self._teacher_is_there = student_fails, asyncio.Event()

    async def __call__(self, model: ModelConfig, _seed: int, _generation: GenerationConfig) -> SimpleNamespace:
        name = model.model_name_or_path
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if name == "judge":
                await asyncio.sleep(DEADLINE_S)
            await asyncio.sleep(0.05)
            if name == "student" and self._student_fails:
                await self._teacher_is_there.wait()
                raise EngineFailure("vLLM could not load student: no room")
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.running -= 1
        asyncio.get_running_loop().call_soon(self._teacher_is_there.set)
        health = SimpleNamespace(gpus=[], can_sleep=False)
        return SimpleNamespace(
            name=name, shutdown=lambda: self.shut_down.append(name), health=lambda: health, sleep=_asleep
        )


async def _asleep(_timeout_s: float) -> None:
    pass


def start_all(monkeypatch, starts: _Starts, roles: dict[str, ModelConfig], gpu: bool, schedule: str) -> list[str]:
    monkeypatch.setattr(VllmEngine, "start", starts)
    monkeypatch.setattr(classroom_rl.server.open_models, "gpu_is_there", lambda: gpu)
    engines = asyncio.run(_start_engines(roles, GenerationConfig(schedule=schedule), 1))
    return [f"{role}: {engine.name}" for role, engine in engines.items()]


@pytest.mark.parametrize(
    ("gpu", "schedule", "at_once"), [(False, "concurrent", 2), (True, "concurrent", 1), (False, PHASED, 1)]
)
def test_engines_start_at_once_only_without_a_gpu_and_without_phases(monkeypatch, gpu, schedule, at_once) -> None:
    starts = _Starts()
    engines = start_all(monkeypatch, starts, {"teacher": TEACHER, "student": STUDENT}, gpu, schedule)
    assert engines == ["teacher: teacher", "student: student"]
    assert starts.most == at_once and not starts.shut_down


@pytest.mark.parametrize("gpu", [False, True])
def test_if_one_engine_fails_the_others_end(monkeypatch, gpu: bool) -> None:
    starts = _Starts(student_fails=True)
    roles = {"teacher": TEACHER, "student": STUDENT, "judge": ModelConfig("judge")}
    with pytest.raises(EngineFailure, match="could not load student: no room"):
        start_all(monkeypatch, starts, roles, gpu, "concurrent")
    assert starts.shut_down == ["teacher"]
    assert starts.cancelled == ([] if gpu else ["judge"])  # on GPUs the judge's turn had not come


def test_a_start_that_is_cancelled_ends_the_engine_once_it_is_loaded(monkeypatch) -> None:
    loaded, ended = threading.Event(), []

    def start(*_: object) -> tuple[SimpleNamespace, list[int]]:
        assert loaded.wait(DEADLINE_S)
        return SimpleNamespace(shutdown=lambda: ended.append("engine")), []

    async def scenario() -> None:
        starting = asyncio.create_task(VllmEngine.start(TEACHER, 1, GenerationConfig()))
        await asyncio.sleep(0.1)
        starting.cancel()
        asyncio.get_running_loop().call_later(0.2, loaded.set)
        with pytest.raises(asyncio.CancelledError):
            await starting

    monkeypatch.setattr(classroom_rl.engines.vllm.engine_base, "start_engine", start)
    asyncio.run(scenario())
    assert ended == ["engine"]


@pytest.mark.skipif(gpu_is_there(), reason="on GPUs engines start one after the other")
def test_the_server_starts_real_engines_at_once(server: RunningServer) -> None:
    log = (server.run_folder / f"server-{server.port}.log").read_text(encoding="utf-8")
    assert 0 < log.index("loading the teacher") < log.index("is loaded") > log.index("loading the student")
    roles = server.client.health().roles
    (teacher,), (student,) = roles["teacher"].pids, roles["student"].pids
    assert teacher != student
    if len(psutil.Process().cpu_affinity()) > 1:  # the quickstart gives each of them a core
        assert [psutil.Process(pid).cpu_affinity() for pid in (teacher, student)] == [[0], [1]]


@pytest.mark.full
@pytest.mark.skipif(gpu_is_there(), reason="on GPUs engines start one after the other")
def test_a_real_engine_ends_if_the_one_beside_it_has_no_room(world) -> None:
    def model(gib: int) -> ModelConfig:
        return ModelConfig(
            str(world / "blank"), VllmConfig(max_length=256, cpu_kvcache_gib=gib, cpu_cores="0", dtype="float32")
        )

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineFailure, match="vLLM could not load"):
        asyncio.run(_start_engines({"teacher": model(1), "student": model(10**6)}, GenerationConfig(), 1))
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if "VLLM" in " ".join(child.cmdline())]


def test_engines_end_at_once_and_the_ledgers_are_closed_after() -> None:
    barrier, closed = threading.Barrier(2), []

    class Models(LoadedModels):
        engines = {role: SimpleNamespace(shutdown=lambda: barrier.wait(DEADLINE_S)) for role in ("teacher", "student")}
        apis = {"judge": SimpleNamespace(ledger=SimpleNamespace(close=lambda: closed.append(barrier.broken)))}

    Models().shutdown()
    assert closed == [False]
