"""`make gpu-check`: what it does without a GPU, what it skips, measures and reports, and a complete run on the CPU with
a tiny shape."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from classroom_rl.launch import gpu_check
from classroom_rl.launch.gpu_check import TRL_ALONE, GpuCheck, Machine, engine_share, find_machine, main
from classroom_rl.launch.gpu_check_results import FAILED, LARGEST_MISMATCH, OK, REPORT, SKIPPED, PartResult
from classroom_rl.memory.budget import GIB
from classroom_rl.models.random_model import SHAPES, write_shape
from classroom_rl.system.gpu_memory import process_memory
from classroom_rl.system.processes import Child, Interrupted, Signals
from tests.conftest import ROOT


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as entered:
        yield entered


def check(folder: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch, script: str, **scripts: str) -> GpuCheck:
    """A check on a fake GPU. Its programs are this shell script, or that of the part's name; its world is not made."""
    monkeypatch.setattr(gpu_check, "build_world", lambda folder, seed: None)
    folder.mkdir(exist_ok=True)

    def child(self: GpuCheck, part: str, command: list[str]) -> Child:
        return Child(part, ["sh", "-c", scripts.get(part, script)], signals, folder / f"{part}.log")

    monkeypatch.setattr(GpuCheck, "_child", child)
    return GpuCheck(Machine("a GPU", "cuda", 8 * GIB, lambda: 1), folder, signals, 60.0)


# Which GPU is measured ----------------------------------------------------------------------------------------------


def test_what_is_measured_is_what_is_used(gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(3, mebibytes=81559, first=4096)
    for visible, gib, used in ((None, 4, "0"), ("2,0", 79, "2")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine = find_machine(None)
        assert (machine.name, machine.memory // GIB) == ("NVIDIA H100, driver 590.1", gib)
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


def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--folder", str(tmp_path / "run")]) == 0
    assert "for machines with an NVIDIA GPU that works: nothing was done" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_shape_that_dry_run_says_cannot_fit_is_left_out_with_the_reason(
    gpus, world: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    gpus(1, mebibytes=6 * 1024)
    monkeypatch.setattr(gpu_check, "build_world", lambda folder, seed: shutil.copytree(world, folder))
    folder = tmp_path / "run"
    assert main(["--folder", str(folder), "--parts", "Qwen3-4B"]) == 0
    report = json.loads((folder / "gpu_check.json").read_text())
    assert report["machine"] == "NVIDIA H100, driver 590.1" and report["memory_gib"] == 6.0
    (part,) = report["parts"]
    assert part["status"] == SKIPPED and part["reason"].startswith("dry_run: The engine of the teacher needs ")
    assert "Qwen3-4B     skipped" in capsys.readouterr().out
    assert not list((folder / "Qwen3-4B-model").glob("*.safetensors")), (
        "no weights are drawn for a shape that does not fit"
    )


def test_a_folder_with_something_else_in_it_is_left_alone(gpus, tmp_path: Path, capsys) -> None:
    gpus(1, mebibytes=6 * 1024)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").touch()
    assert main(["--folder", str(tmp_path / "run"), "--parts", "tests"]) == 2
    assert "holds something else than an earlier check" in capsys.readouterr().err
    assert (tmp_path / "run/thesis.txt").exists()


def test_a_part_that_fails_is_told_with_the_end_of_its_log_and_the_others_are_tried(
    tmp_path: Path, signals, monkeypatch
) -> None:
    outcomes = check(tmp_path / "run", signals, monkeypatch, "echo CUDA is torn; exit 3").run(["tests", "quickstart"])
    assert [outcome.status for outcome in outcomes] == [FAILED, FAILED]
    assert all("ended with status 3" in outcome.reason and "CUDA is torn" in outcome.reason for outcome in outcomes)


@pytest.mark.parametrize(("failures", "exit_status", "status"), [(0, 0, OK), (2, 1, FAILED), (0, 2, FAILED)])
def test_the_tests_are_counted(failures, exit_status, status, tmp_path: Path, signals, monkeypatch) -> None:
    counts = f'name="pytest" errors="0" failures="{failures}" skipped="1" tests="9"'
    xml = f"<testsuites><testsuite {counts} time='1.5'></testsuite></testsuites>"
    script = f"cat > {tmp_path}/run/tests.xml <<'E'\n{xml}\nE\nexit {exit_status}"
    (outcome,) = check(tmp_path / "run", signals, monkeypatch, script).run(["tests"])
    assert outcome.status == status
    assert outcome.figures == {"passed": 8 - failures, "failed": failures, "skipped": 1}


def test_a_check_that_is_interrupted_leaves_the_parts_that_were_done(tmp_path: Path, signals, monkeypatch) -> None:
    checker = check(tmp_path / "run", signals, monkeypatch, "exit 3")

    def interrupted(self: GpuCheck, limit_s: float) -> None:
        raise Interrupted(2)

    monkeypatch.setattr(GpuCheck, "_quickstart", interrupted)
    with pytest.raises(Interrupted):
        checker.run(["tests", "quickstart"])
    (part,) = json.loads((tmp_path / "run" / REPORT).read_text())["parts"]
    assert (part["part"], part["status"]) == ("tests", FAILED)


def test_every_part_has_a_deadline_and_all_together_have_one(tmp_path: Path, signals, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "PARTS", {"tests": 0.5, "quickstart": 60.0})
    checker = check(tmp_path / "run", signals, monkeypatch, "echo still at it; sleep 600")
    deadline = gpu_check._deadline

    def deadline_of_the_last(child: Child, limit_s: float) -> Callable[[], None]:
        assert limit_s == 0.5
        checker._deadline = time.monotonic()  # that of all parts together
        return deadline(has_said(child, "still at it"), limit_s)

    monkeypatch.setattr(gpu_check, "_deadline", deadline_of_the_last)
    first, second = checker.run(["tests", "quickstart"])
    assert first.status == FAILED and "tests was not done within " in first.reason and "still at it" in first.reason
    assert second.status == SKIPPED and "the parts before it took all of the 60 s" in second.reason


def test_a_resumed_check_repeats_what_is_not_ok_and_keeps_the_rest(gpus, tmp_path: Path, monkeypatch, capsys) -> None:
    gpus(1, mebibytes=81559)
    tried: list[str] = []

    def try_part(self: GpuCheck, part: str) -> PartResult:
        tried.append(part)
        (self._folder / part).mkdir()
        return PartResult(part, FAILED if tried.count(part) == 1 and part == "quickstart" else OK, figures={"x": 1.0})

    monkeypatch.setattr(GpuCheck, "_try", try_part)
    monkeypatch.setattr(gpu_check, "build_world", lambda folder, seed: folder.mkdir())
    folder, parts = tmp_path / "run", ["--parts", "tests", "quickstart"]
    assert main(["--folder", str(folder), *parts]) == 1
    assert main(["--folder", str(folder), *parts, "Qwen3-4B", "--resume"]) == 0
    assert tried == ["tests", "quickstart", "quickstart", "Qwen3-4B"]
    results = json.loads((folder / REPORT).read_text())["parts"]
    assert [(part["part"], part["status"]) for part in results] == [(part, OK) for part in dict.fromkeys(tried)]
    assert main(["--folder", str(folder), "--parts", "tests"]) == 0, "without --resume it begins anew"
    assert tried[-1] == "tests"


def test_the_parts_fit_into_the_limit_and_the_tests_cover_what_they_should() -> None:
    assert sum(gpu_check.PARTS.values()) <= 60 * gpu_check.MINUTES
    gpu_test_files = {
        path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8")
    }
    assert gpu_test_files - {Path(__file__)} == {ROOT / name for name in gpu_check.GPU_TESTS}


# What is measured ---------------------------------------------------------------------------------------------------


def test_trl_alone_is_compared_with_this_projects_steps_if_there_are_any(
    world: Path, tmp_path: Path, signals, monkeypatch
) -> None:
    def lines(*moments: float) -> str:
        return "".join(json.dumps({"time": moment, "reward": 0.5}) + "\n" for moment in moments)

    folder = tmp_path / "run"
    steps = f"printf '%s' '{lines(10.0, 20.0)}' > {folder}/TRL-alone/steps.jsonl; sleep 600"
    checker = check(folder, signals, monkeypatch, "true", **{TRL_ALONE: steps})
    shutil.copytree(world, folder / "world")
    (result,) = checker.run([TRL_ALONE])
    assert (result.status, result.figures["step s"]) == (OK, 10.0) and "x this project's" not in result.figures
    assert not (folder / "Qwen3-0.6B-model").exists(), "gigabytes, on a GPU"

    shutil.rmtree(folder / TRL_ALONE)
    (folder / "Qwen3-0.6B").mkdir()
    (folder / "Qwen3-0.6B/metrics.jsonl").write_text(lines(1.0, 5.0, 50.0))
    (result,) = checker.run([TRL_ALONE])
    assert result.figures["x this project's"] == 2.5

    shutil.rmtree(folder / TRL_ALONE)
    failing = check(folder, signals, monkeypatch, "true", **{TRL_ALONE: "echo out of memory; exit 3"})
    (result,) = failing.run([TRL_ALONE])
    assert result.status == FAILED and "0 of 2 steps were made" in result.reason and "out of memory" in result.reason


def has_said(child: Child, words: str) -> Child:
    """The child, once that is in its log."""
    while words not in child.last_lines():
        assert child.poll() is None
        time.sleep(0.01)
    return child


@pytest.mark.parametrize(("name", "parameters"), [("Qwen3-0.6B", 596_049_920), ("Qwen3-4B", 4_022_468_096)])
def test_an_engines_share_holds_weights_and_conversations(name: str, parameters: int, world: Path, tmp_path) -> None:
    """Weights 2 bytes each, logits of 64 sequences, 16 conversations of 2048 tokens, 2.5 GiB besides, of 80 GiB."""
    write_shape(SHAPES[name], world / "blank", tmp_path / "m")
    shape = SHAPES[name]
    cached = 16 * 2048 * 2 * shape["num_key_value_heads"] * shape["head_dim"] * 2 * shape["num_hidden_layers"]
    needed = 2 * parameters + 64 * 151_936 * 4 + cached + 2.5 * GIB
    assert 0 <= engine_share(tmp_path / "m", 2048, 64, 80 * GIB) - needed / (80 * GIB) < 0.01


# All of it, on a CPU ------------------------------------------------------------------------------------------------


def distance(before: Path, after: Path) -> float:
    """The mean distance of two policies' log-probs, in nats per token, over what the first one says."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (before, after)]
    torch.manual_seed(0)
    prompts = torch.randint(5, 300, (8, 16))
    sequences = models[0].generate(
        prompts, do_sample=True, max_new_tokens=48, min_new_tokens=48, top_k=0, pad_token_id=0
    )
    tokens = sequences[:, 16:, None]
    with torch.no_grad():
        logps = [model(sequences).logits[:, 15:-1].log_softmax(-1).gather(2, tokens) for model in models]
    return float((logps[1] - logps[0]).abs().mean())


@pytest.mark.full
def test_the_steps_are_made_and_measured_on_a_cpu_with_a_tiny_shape(tmp_path: Path) -> None:
    """Server, trainer, weights and figures are the same as on a GPU; the memory is that of the processes."""
    arguments = ["--device", "cpu", "--parts", "tiny", "quickstart", "tiny-LoRA", "--folder", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, "-m", "classroom_rl.launch.gpu_check", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    parts = json.loads((tmp_path / "run/gpu_check.json").read_text())["parts"]
    assert [part["status"] for part in parts] == [OK, OK, OK]
    tiny, quickstart, _ = parts
    for part in parts:
        assert part["figures"]["teacher tokens/s"] > 0 and part["figures"]["train s"] > 0
    assert tiny["figures"]["training peak GiB"] > 0.5 and tiny["figures"]["training, by dry_run"] > 0
    assert quickstart["figures"]["peak GiB"] > 0.5 and quickstart["figures"]["mismatch"] < 1e-4
    before, after = sorted((tmp_path / "run/quickstart/policy").iterdir())
    assert distance(before, after) > 2 * LARGEST_MISMATCH, "an engine with old weights would be noticed"
    assert "teacher tokens/s" in result.stdout
    assert not list((tmp_path / "run/tiny-model").glob("*")), "gigabytes, on a GPU"
    assert process_memory() < GIB, "everything that was started has ended"
