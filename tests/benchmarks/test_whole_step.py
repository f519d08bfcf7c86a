"""The benchmark of a whole step: both programs train with one configuration, and the report compares their rounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rounds import CONVERSATIONS, PROJECT, Round, Rounds, overrides_of
from benchmarks.step_bound import _replayed
from benchmarks.whole_step import BOUND, DEEPSPEED, TRL_ALONE, report
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.models.pretrained import load_tokenizer


def test_a_steps_time_is_that_between_two_ends() -> None:
    lines = [{"time": at, "reward": 0.5, "messages": 500} for at in (100.0, 104.0, 107.0, 117.0)]
    assert Round.of(lines) == Round(4.0, 0.5, 500)


def test_the_report_compares_rounds_by_step_and_by_message() -> None:
    rounds = {
        PROJECT: [Round(4.0, 0.5, 400), Round(5.0, 0.5, 500)],
        BOUND: [Round(2.0, 0.5, 400), Round(4.0, 0.5, 500)],
        TRL_ALONE: [Round(8.0, 0.5, 200), Round(15.0, 0.5, 500)],
    }
    assert "this project takes 1.62 x the time of its bound" in report(rounds)
    assert "TRL alone takes 2.50 x the time of a step, 3.50 x per message" in report(rounds)
    assert "DeepSpeed" not in report(rounds)
    with_it = rounds | {DEEPSPEED: [Round(5.0, 0.5, 400), Round(7.5, 0.5, 500)]}
    assert "with DeepSpeed it takes 1.38 x the time of a step" in report(with_it)


def test_both_shapes_have_batches_of_the_size_that_is_counted(tmp_path: Path) -> None:
    (tmp_path / "sft" / "model").mkdir(parents=True)
    quickstart = overrides_of("quickstart", tmp_path)
    for overrides in (quickstart, ["--config-name", "small_tutor"]):
        train = load(TrainRLConfig, "train_rl", overrides, check_train_rl).train
        assert train.number_of_problems_per_batch * train.num_samples_per_problem == CONVERSATIONS
    with pytest.raises(SystemExit, match="make quickstart-models"):
        overrides_of("quickstart", tmp_path / "nowhere")


def test_the_small_tutor_is_measured_with_the_arithmetic_that_its_command_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.rounds.find_model", lambda: "a/model")
    monkeypatch.setattr("classroom_rl.launch.small_tutor.gpu_is_there", lambda: False)
    for fast, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("classroom_rl.launch.small_tutor.has_fast_bfloat16", lambda fast=fast: fast)
        config = load(TrainRLConfig, "train_rl", overrides_of("small_tutor", tmp_path), check_train_rl)
        used = {config.train.dtype, config.teacher_model.vllm.dtype, config.student_model.vllm.dtype}
        assert used == {dtype}


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    """A benchmark that was stopped in the middle of a program begins that program anew, and no other."""
    played: list[Path] = []

    def play(folder: Path) -> Round:
        folder.mkdir(parents=True)
        played.append(folder)
        if len(played) == 2:
            raise KeyboardInterrupt
        return Round(float(len(played)), 0.5, 500)

    rounds = Rounds(tmp_path / "kept", {"steps": 4})
    assert rounds.measure(0, PROJECT, play) == Round(1.0, 0.5, 500)
    with pytest.raises(KeyboardInterrupt):
        rounds.measure(0, TRL_ALONE, play)
    again = Rounds(tmp_path / "kept", {"steps": 4})
    assert again.measure(0, PROJECT, play) == Round(1.0, 0.5, 500)
    assert again.measure(0, TRL_ALONE, play) == Round(3.0, 0.5, 500)
    assert again.measure(1, PROJECT, play) == Round(4.0, 0.5, 500)
    assert played == [again.folder_of(0, name) for name in (PROJECT, TRL_ALONE, TRL_ALONE)] + [
        again.folder_of(1, PROJECT)
    ]
    again.end(0)
    assert not again.folder_of(0, PROJECT).exists() and again.folder_of(1, PROJECT).exists()
    with pytest.raises(SystemExit, match="choose another --folder"):
        Rounds(tmp_path / "kept", {"steps": 5})


def test_the_bound_shows_a_student_what_the_template_said(world: Path) -> None:
    """A message of the template is in no turn of the journal, but in the student's prompt."""
    named = [f"{role}_model.model_name_or_path={world / 'blank'}" for role in ("teacher", "student")]
    config = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", *named], check_train_rl)
    tokenizer = load_tokenizer("teacher_model", str(world / "blank"))
    given = [{"role": "student", "text": "Hello!", "given": True}, {"role": "teacher", "text": "Who?", "given": True}]
    answer = {"role": "student", "text": "I see a cat.", "persona": "correct_student", "tokens": 5, "given": False}
    record = {"student_name": "Ann", "problem": "a lesson", "turns": [*given, answer]}
    replayed = _replayed([{"turn": answer, "ids": [], "logprobs": []}], record, config, tokenizer)
    (message,) = replayed.messages
    shown = tokenizer.decode(message.prompt_ids)
    assert shown.index("Hello!") < shown.index("Who?") and "a cat" not in shown


@pytest.mark.engines
@pytest.mark.parametrize(
    ("opening", "turns"), [((), 3), (("generation.teacher_prompt_path=prompt_templates/small_tutor/teacher.txt",), 4)]
)
def test_trl_alone_plays_the_classrooms_conversations(
    opening: tuple[str, ...], turns: int, world: Path, tmp_path: Path
) -> None:
    """Two steps with a blank model; the lines have what the report reads. A template's own messages count as messages:
    with two of them, and the student's answer, the teacher has the fourth."""
    out, blank = tmp_path / "steps.jsonl", world / "blank"
    command = [sys.executable, "-m", "benchmarks.trl_alone", str(out), "--config-name", "quickstart"]
    command += [f"teacher_model.model_name_or_path={blank}", f"student_model.model_name_or_path={blank}"]
    command += [f"dataset.train_datasets=[{{name_or_path: {world / 'lessons_train.jsonl'}}}]", "train.max_steps=2"]
    command += ["train.number_of_problems_per_batch=2", "train.num_samples_per_problem=2"]
    command += [
        "train.per_device_train_batch_size=2",
        f"generation.max_turns={turns}",
        "generation.max_tokens_per_turn=6",
    ]
    command += opening
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and {line["messages"] for line in lines} == {4 * turns}
    assert all(0 <= line["reward"] <= 1 for line in lines)
