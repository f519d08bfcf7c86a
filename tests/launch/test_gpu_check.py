"""Tests of `make gpu-check`: what it does without a GPU, what it skips, measures and reports, and a complete run on the
CPU with a tiny shape."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from classroom_rl.config.train_rl import TrainConfig
from classroom_rl.errors import ClassroomError, DeadlineExceeded
from classroom_rl.launch import gpu_check
from classroom_rl.launch.gpu_check import (
    FAILED,
    OK,
    SKIPPED,
    TRL_ALONE,
    GpuCheck,
    Machine,
    engine_share,
    find_machine,
    main,
    shape_figures,
)
from classroom_rl.memory.budget import GIB
from classroom_rl.memory.sources import read_shape
from classroom_rl.models.random_model import SHAPES, draw_weights, write_shape
from classroom_rl.system.gpu_memory import MemoryWatch, gpu_memory_used, process_memory
from classroom_rl.system.processes import Child, Interrupted, Signals
from tests.conftest import ROOT

LINE = {
    "time": 1000.0,
    "conversation/teacher_tokens": 30.0,
    "seconds/rollout": 8.0,
    "seconds/publish": 1.5,
    "seconds/train": 4.0,
}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fake nvidia-smi that lists one GPU with this many MiB, or none."""

    def put(memory: int | None) -> None:
        folder = tmp_path / "programs"
        folder.mkdir(exist_ok=True)
        line = f"0, Small GPU, {memory}, 3, 590.1, 9.0"
        answers = f'case "$*" in -L) echo "GPU 0: Small GPU";; *index*) echo "{line}";; *) echo 3;; esac'
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{answers if memory else 'exit 9'}\n")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return put


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as entered:
        yield entered


def check(
    folder: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float = 60.0
) -> GpuCheck:
    """A check on a fake GPU. All its programs are this shell script, and its world is not made."""
    monkeypatch.setattr(gpu_check, "build_world", lambda folder, seed: None)
    folder.mkdir(exist_ok=True)

    def child(self: GpuCheck, part: str, command: list[str]) -> Child:
        return Child(part, ["sh", "-c", script], signals, folder / f"{part}.log")

    monkeypatch.setattr(GpuCheck, "_child", child)
    return GpuCheck(Machine("a GPU", "cuda", 8 * GIB, lambda: 1), folder, signals, limit_s)


# Which GPU is measured ----------------------------------------------------------------------------------------------


def test_what_is_measured_is_what_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = "2, Large GPU, 81559, 3, 590.1, 9.0", "0, Small GPU, 4096, 3, 590.1, 9.0"
    answers = f'case "$*" in *--id=2*) echo "{large}" ;; *) echo "{small}" ;; esac'
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answers}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for visible, name, used in ((None, "Small GPU", "0"), ("2,0", "Large GPU", "2")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine = find_machine(None)
        assert machine.name == f"{name}, driver 590.1"
        assert machine.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": used}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_machine(None) is None


def test_all_that_is_started_uses_the_gpu_that_is_measured(tmp_path: Path, signals) -> None:
    machine = Machine("a GPU", "cuda", 8 * GIB, lambda: 1, {"CUDA_VISIBLE_DEVICES": "2"})
    with GpuCheck(machine, tmp_path, signals, 60.0)._child(
        "part", ["sh", "-c", "echo on $CUDA_VISIBLE_DEVICES"]
    ) as child:
        assert child.wait() == 0
    assert "on 2" in (tmp_path / "part.log").read_text()


# What is done where ------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_does_nothing(nvidia_smi, tmp_path: Path, capsys) -> None:
    nvidia_smi(None)
    assert main(["--folder", str(tmp_path / "run")]) == 0
    assert "for machines with an NVIDIA GPU that works: nothing was done" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_shape_that_dry_run_says_cannot_fit_is_left_out_with_the_reason(
    nvidia_smi, world: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    nvidia_smi(6 * 1024)
    monkeypatch.setattr(gpu_check, "build_world", lambda folder, seed: shutil.copytree(world, folder))
    folder = tmp_path / "run"
    assert main(["--folder", str(folder), "--parts", "Qwen3-4B"]) == 0
    written = json.loads((folder / "gpu_check.json").read_text())
    assert written["machine"] == "Small GPU, driver 590.1" and written["memory_gib"] == 6.0
    (part,) = written["parts"]
    assert part["status"] == SKIPPED and part["reason"].startswith("dry_run: The engine of the teacher needs ")
    assert "Qwen3-4B     skipped" in capsys.readouterr().out
    assert not list((folder / "Qwen3-4B-model").glob("*.safetensors")), (
        "no weights are drawn for a shape that does not fit"
    )


def test_a_folder_with_something_else_in_it_is_left_alone(nvidia_smi, tmp_path: Path, capsys) -> None:
    nvidia_smi(6 * 1024)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").touch()
    assert main(["--folder", str(tmp_path / "run"), "--parts", "tests"]) == 2
    assert "holds something else than an earlier check" in capsys.readouterr().err
    assert (tmp_path / "run/thesis.txt").exists()


def test_a_part_that_fails_is_told_with_the_end_of_its_log_and_the_others_are_tried(
    nvidia_smi, tmp_path: Path, signals, monkeypatch
) -> None:
    outcomes = check(tmp_path / "run", signals, monkeypatch, "echo CUDA is torn; exit 3").run(["tests", "quickstart"])
    assert [each.status for each in outcomes] == [FAILED, FAILED]
    assert all("ended with status 3" in each.reason and "CUDA is torn" in each.reason for each in outcomes)


@pytest.mark.parametrize(("failures", "exit_status", "status"), [(0, 0, OK), (2, 1, FAILED), (0, 2, FAILED)])
def test_the_tests_are_counted(failures, exit_status, status, tmp_path: Path, signals, monkeypatch) -> None:
    counts = f'name="pytest" errors="1" failures="{failures}" skipped="1" tests="9"'.replace('"1" f', '"0" f')
    xml = f"<testsuites><testsuite {counts} time='1.5'></testsuite></testsuites>"
    script = f"cat > {tmp_path}/run/tests.xml <<'E'\n{xml}\nE\nexit {exit_status}"
    (outcome,) = check(tmp_path / "run", signals, monkeypatch, script).run(["tests"])
    assert outcome.status == status
    assert outcome.figures == {"passed": 8 - failures, "failed": failures, "skipped": 1}


def test_a_check_that_is_interrupted_leaves_the_parts_that_were_done(tmp_path: Path, signals, monkeypatch) -> None:
    checked = check(tmp_path / "run", signals, monkeypatch, "exit 3")

    def interrupted(self: GpuCheck, limit_s: float) -> None:
        raise Interrupted(2)

    monkeypatch.setattr(GpuCheck, "_quickstart", interrupted)
    with pytest.raises(Interrupted):
        checked.run(["tests", "quickstart"])
    (part,) = json.loads((tmp_path / "run" / gpu_check.REPORT).read_text())["parts"]
    assert (part["part"], part["status"]) == ("tests", FAILED)


def test_every_part_has_a_deadline_and_all_together_have_one(tmp_path: Path, signals, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "PARTS", {"tests": 0.5, "quickstart": 60.0})
    tried = check(tmp_path / "run", signals, monkeypatch, "echo still at it; sleep 600")
    deadline = gpu_check._deadline

    def deadline_of_the_last(child: Child, limit_s: float) -> Callable[[], None]:
        assert limit_s == 0.5
        tried._deadline = time.monotonic()  # that of all parts together
        return deadline(has_said(child, "still at it"), limit_s)

    monkeypatch.setattr(gpu_check, "_deadline", deadline_of_the_last)
    first, second = tried.run(["tests", "quickstart"])
    assert first.status == FAILED and "tests was not done within " in first.reason and "still at it" in first.reason
    assert second.status == SKIPPED and "the parts before it took all of the 60 s" in second.reason


def test_the_parts_fit_into_twenty_minutes_and_the_tests_cover_what_they_should() -> None:
    assert sum(gpu_check.PARTS.values()) <= gpu_check.LIMIT_S == 1200
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8")}
    assert marked - {Path(__file__)} == {ROOT / name for name in gpu_check.GPU_TESTS}


# What is measured ---------------------------------------------------------------------------------------------------


def test_a_steps_figures_by_hand() -> None:
    watch = MemoryWatch(lambda: 0)
    # rollout from 988 to 996, training from 996 to 1000
    looks = {980.0: 9, 989.0: 4, 995.0: 3, 997.0: 5, 999.0: 2, 1001.0: 8}
    watch._samples = [(moment, used * GIB) for moment, used in looks.items()]
    moments = {"rollout": 6 * GIB, "backward pass": 7 * GIB, "optimizer step": 5 * GIB}
    train = TrainConfig(number_of_problems_per_batch=4, num_samples_per_problem=2)
    figures = {
        "teacher tokens/s": 30.0,
        "rollout s": 8.0,
        "publish s": 1.5,
        "train s": 4.0,
        "rollout peak GiB": 4.0,
        "rollout, by dry_run": 6.0,
        "training peak GiB": 5.0,
        "training, by dry_run": 7.0,
    }
    assert shape_figures([LINE], train, watch, moments) == figures
    before = [LINE | {"time": moment, "seconds/rollout": 1.0} for moment in (950.0, 970.0, 986.0)]
    assert shape_figures([*before, LINE], train, watch, moments) == figures | {"step s": 16.0}


def test_trl_alone_is_compared_with_this_projects_steps_if_there_are_any(
    world: Path, tmp_path: Path, signals, monkeypatch
) -> None:
    def lines(*moments: float) -> str:
        return "".join(json.dumps({"time": moment, "reward": 0.5}) + "\n" for moment in moments)

    folder = tmp_path / "run"
    steps = f"printf '%s' '{lines(10.0, 20.0)}' > {folder}/TRL-alone/steps.jsonl; sleep 600"
    checked = check(folder, signals, monkeypatch, "")
    programs = {TRL_ALONE: steps}

    def child(self: GpuCheck, part: str, command: list[str]) -> Child:
        return Child(part, ["sh", "-c", programs.get(part, "true")], signals, folder / f"{part}.log")

    monkeypatch.setattr(GpuCheck, "_child", child)
    shutil.copytree(world, folder / "world")
    (alone,) = checked.run([TRL_ALONE])
    assert (alone.status, alone.figures["step s"]) == (OK, 10.0) and "x this project's" not in alone.figures
    assert not (folder / "Qwen3-0.6B-model").exists(), "gigabytes, on a GPU"

    shutil.rmtree(folder / TRL_ALONE)
    (folder / "Qwen3-0.6B").mkdir()
    (folder / "Qwen3-0.6B/metrics.jsonl").write_text(lines(1.0, 5.0, 50.0))
    (alone,) = checked.run([TRL_ALONE])
    assert alone.figures["x this project's"] == 2.5

    shutil.rmtree(folder / TRL_ALONE)
    programs[TRL_ALONE] = "echo out of memory; exit 3"
    (alone,) = checked.run([TRL_ALONE])
    assert alone.status == FAILED and "0 of 2 steps were made" in alone.reason and "out of memory" in alone.reason


def test_the_watch_looks_again_and_again_and_a_stretch_without_a_look_has_the_one_before() -> None:
    readings = iter([1, 7, 3, *[2] * 10_000])
    with MemoryWatch(lambda: next(readings), every_s=0.001) as watch:
        while watch.peak() < 7:
            time.sleep(0.001)
    assert watch.peak() == 7
    watch._samples = [(1.0, 5), (2.0, 4), (9.0, 6)]
    assert (watch.peak(3.0, 8.0), watch.peak(0.0, 0.5), watch.peak(8.0)) == (4, 0, 6)


def test_a_look_that_fails_is_no_peak_of_nothing(nvidia_smi, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(None)
    with MemoryWatch(lambda: gpu_memory_used(0)) as watch:
        pass
    with pytest.raises(ClassroomError, match="nvidia-smi does not say how much memory is in use"):
        watch.peak()
    nvidia_smi(1024)
    assert gpu_memory_used(0) == 3 << 20
    monkeypatch.setattr("subprocess.run", _stalls)
    with MemoryWatch(lambda: gpu_memory_used(0)) as watch:
        pass
    with pytest.raises(ClassroomError, match="timed out after 30 seconds"):
        watch.peak()


def test_any_error_of_a_sample_reaches_the_one_who_asks_for_the_peak() -> None:
    with MemoryWatch(lambda: 1 // 0) as watch:
        pass
    with pytest.raises(ZeroDivisionError):
        watch.peak()


def has_said(child: Child, words: str) -> Child:
    """The child, once that is in its log."""
    while words not in child.last_lines():
        assert child.poll() is None
        time.sleep(0.01)
    return child


def _stalls(command: list[str], timeout: float, **_: object) -> None:
    raise subprocess.TimeoutExpired(command, timeout)


def test_a_child_past_its_deadline_is_named_with_its_log(tmp_path: Path, signals) -> None:
    told = pytest.raises(DeadlineExceeded, match="the step was not done within 1 s(?s:.*)loading")
    with Child("the step", ["sh", "-c", "echo loading; sleep 600"], signals, tmp_path / "log") as child, told:
        child.wait(gpu_check._deadline(has_said(child, "loading"), 1.0))


# Models with random weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), [("Qwen3-0.6B", 596_049_920), ("Qwen3-4B", 4_022_468_096)])
def test_shapes_have_the_parameters_of_the_real_models(name: str, parameters: int, world: Path, tmp_path: Path) -> None:
    write_shape(SHAPES[name], world / "blank", tmp_path / "m")
    shape = read_shape(str(tmp_path / "m"))
    assert (shape.parameters, shape.vocabulary) == (parameters, 151_936)
    # weights 2 bytes each, logits of 64 sequences, 16 conversations of 2048 tokens, 2.5 GiB besides, of 80 GiB
    cached = 16 * 2048 * 2 * shape.kv_heads * shape.head_dim * 2 * shape.layers
    needed = 2 * parameters + 64 * 151_936 * 4 + cached + 2.5 * GIB
    assert 0 <= engine_share(tmp_path / "m", 2048, 64, 80 * GIB) - needed / (80 * GIB) < 0.01


def test_a_models_tokens_all_have_a_text_and_texts_are_encoded_as_before(world: Path, tmp_path: Path, lessons) -> None:
    write_shape(SHAPES["tiny"], world / "blank", tmp_path / "m")
    draw_weights(tmp_path / "m", "cpu")
    made, own = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "m", world / "blank"))
    assert len(made) == SHAPES["tiny"].vocabulary > len(own)
    for text in (*lessons[:5], "<|im_start|>assistant\nGood . <end_of_conversation><|im_end|>", "žluťoučký kůň"):
        assert made(text).input_ids == own(text).input_ids
    assert made.eos_token_id == own.eos_token_id and made.chat_template == own.chat_template
    every = [made.decode([token]) for token in range(len(own), len(made))]
    assert len(set(every)) == len(every) and all(len(text) == 4 for text in every)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.dtype == torch.bfloat16 and model.get_input_embeddings().weight.float().std() > 0.01


# All of it, on a CPU ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_steps_are_made_and_measured_on_a_cpu_with_a_tiny_shape(tmp_path: Path) -> None:
    """Server, trainer, weights and figures are the same as on a GPU; the memory is that of the processes."""
    arguments = ["--device", "cpu", "--parts", "tiny", "quickstart", "--folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "classroom_rl.launch.gpu_check", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tiny, quickstart = json.loads((tmp_path / "run/gpu_check.json").read_text())["parts"]
    assert (tiny["status"], quickstart["status"]) == (OK, OK)
    for part in (tiny, quickstart):
        assert part["figures"]["teacher tokens/s"] > 0 and part["figures"]["train s"] > 0
    assert tiny["figures"]["training peak GiB"] > 0.5 and tiny["figures"]["training, by dry_run"] > 0
    assert quickstart["figures"]["peak GiB"] > 0.5
    assert "teacher tokens/s" in done.stdout
    assert not list((tmp_path / "run/tiny-model").glob("*")), "gigabytes, on a GPU"
    assert process_memory() < GIB, "everything that was started has ended"
