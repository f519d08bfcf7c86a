"""Real parts, made once per session: a tiny model with random weights, and a server with two vLLM engines on it."""

import gc
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.processes import free_port
from classroom_rl.system.startup import short_openmp_wait
from tests.support.scripted_room import Room, guided, write_templates
from tests.support.turned_clock import run

ROOT = Path(__file__).resolve().parent.parent
GPU_SHARE = 0.1
"""What an engine of a test takes of a GPU, where there is one: two of a server and one more fit beside a trainer."""
ENGINE_ROOMS = ("models", "server", "trainer", "vllm")
"""The rooms whose tests start most of the engines and trainings."""
os.environ.update(short_openmp_wait())  # before a test loads torch: two halves of the suite share the cores
hypothesis.settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # it measures the machine
)
hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start engines or trainings, or need the session's server."""
    for item in items:
        if item.path.parent.name in ENGINE_ROOMS or "server" in getattr(item, "fixturenames", ()):
            item.add_marker("engines")


@pytest.hookimpl(tryfirst=True)  # before pytest says that it runs no coroutines
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on a clock that is turned."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run(pyfuncitem.obj(**arguments))
    return True


def pytest_runtest_teardown() -> None:
    """Undo what a training in bfloat16 changes for the whole process: on CPUs with bfloat16 units, later tests would
    compute float32 products from rounded operands."""
    if set_precision := getattr(sys.modules.get("torch"), "set_float32_matmul_precision", None):
        set_precision("highest")


def pytest_collection_finish() -> None:
    """Leave what the imported libraries hold out of all later garbage collections: it is never freed."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's world: lessons, corpus, tokenizer and untrained model."""
    from classroom_rl.environments.toy_language.build import build_world

    folder = tmp_path_factory.mktemp("quickstart") / "world"
    assert build_world(folder, seed=7), "it was not there, so it was written"
    return folder


@pytest.fixture(scope="session")
def tokenizer(world: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(world / "blank")


@pytest.fixture(scope="session")
def lessons(world: Path) -> list[str]:
    return [json.loads(line)["problem"] for line in (world / "lessons_train.jsonl").read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[[str], str]:
    return write_templates(tmp_path)


@pytest.fixture
def generation(prompts: Callable[[str], str]) -> GenerationConfig:
    return guided(prompts)


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, str]:
    """The rules of conversations that a judge over HTTP reads."""
    from tests.support.judged_room import write_rule

    return write_rule(tmp_path)


@pytest.fixture
def judged(generation: GenerationConfig, rules: dict[str, str]) -> GenerationConfig:
    from tests.support.judged_room import judged_by

    return judged_by(rules, generation)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model with random weights."""
    from classroom_rl.models.random_model import write_tiny_chat_model

    texts = ["Say a number from 1 to 50. Higher. Lower. What is it? Again, please."]
    texts += [f"{number}." for number in range(60)]
    return write_tiny_chat_model(tmp_path_factory.mktemp("tiny") / "model", texts, context=400)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def hf_engine(tiny_model: Path):
    from classroom_rl import HfEngine

    return HfEngine(tiny_model, device="cpu")


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gpus(count, mebibytes)` gives this machine fake GPUs."""
    from tests.support.fake_gpus import fake_gpus

    return fake_gpus(tmp_path, monkeypatch)


@pytest.fixture
def room(tokenizer, tmp_path: Path) -> Room:
    return Room(tokenizer, tmp_path / "run")


def on_this_machine(tolerance: float) -> float:
    """How far log-probs of engine and transformers may be apart, of which the latter are computed on the CPU: on a GPU
    vLLM's attention kernels multiply float32 as TF32, which has 10 bits of mantissa."""
    return 20 * tolerance if gpu_is_there() else tolerance


@dataclass
class RunningServer:
    """A `vllm_server.py` with real engines, and the overrides that a trainer needs to talk to it."""

    client: ClassroomClient
    port: int
    run_folder: Path
    overrides: list[str]


def quickstart_overrides(run_folder: Path, model: Path, world: Path, port: int) -> list[str]:
    """The quickstart's configuration with short turns and an untrained model."""
    return [
        "--config-name",
        "quickstart",
        f"logging.save_dir={run_folder}",
        f"generation.server_port={port}",
        "generation.max_turns=5",
        "generation.max_tokens_per_turn=12",
        f"teacher_model.model_name_or_path={model}",
        f"student_model.model_name_or_path={model}",
        f"dataset.train_datasets=[{{name_or_path: {world / 'lessons_train.jsonl'}}}]",
        "train.number_of_problems_per_batch=4",
        "train.num_samples_per_problem=4",
        "train.per_device_train_batch_size=8",
        "train.lr_scheduler_type=constant",  # tests stop at other steps
        "student_model.vllm.temperature=1",
    ]


@pytest.fixture(scope="session")
def server(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(world, tmp_path_factory.mktemp("run")) as running:
        yield running


@contextmanager
def running_server(
    world: Path, run_folder: Path, *more_overrides: str, port: int | None = None
) -> Iterator[RunningServer]:
    """A server of its own, on two engines with the untrained model."""
    port = port or free_port()
    overrides = [*quickstart_overrides(run_folder, world / "blank", world, port), *more_overrides]
    with server_with(overrides, run_folder, port) as running:
        yield running


@contextmanager
def server_with(overrides: list[str], run_folder: Path, port: int) -> Iterator[RunningServer]:
    """A server of its own, with these arguments."""
    run_folder.mkdir(parents=True, exist_ok=True)
    log = run_folder / f"server-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "vllm_server.py", *overrides],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    client = ClassroomClient(f"http://127.0.0.1:{port}", log=log)
    try:
        client.wait_until_up(600, alive=lambda: process.poll() is None)
        yield RunningServer(client, port, run_folder, overrides)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
