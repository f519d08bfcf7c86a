"""A training that resumes with a changed configuration: allowed changes take effect, others are refused."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load, to_yaml
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch.cli import main as launch
from classroom_rl.rollout import prompts
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.trainer.checkpoints import UNFINISHED
from classroom_rl.trainer.contents import CONTENTS, fingerprint, read_contents, unknown
from classroom_rl.trainer.correction_set import CURSOR_NAME, CorrectionSet
from classroom_rl.trainer.loop import TrainingLoop
from classroom_rl.trainer.resume import (
    FIXED,
    MADE_WITH,
    TAKES_EFFECT,
    check_launch,
    check_problems,
    check_resume,
    contents_at_start,
    keys_of,
    write_config,
)
from classroom_rl.trainer.run import train
from classroom_rl.trainer.run_length import load_training_problems
from classroom_rl.trainer.session import _open_run_folder
from classroom_rl.trainer.sft.run import _Trainer as SFTTrainer
from classroom_rl.trainer.trainer_hooks import ResumedTrainer
from tests.conftest import free_port
from tests.support.scripted_room import Room, application, serving


def configured(run_folder: Path, *overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", [f"logging.save_dir={run_folder}", *overrides], check_train_rl)


def checkpoint_made_with(run_folder: Path, *overrides: str, step: int = 20) -> Path:
    folder = run_folder / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    config = configured(run_folder, *overrides)
    on_disk = all(Path(source.name_or_path).is_file() for source in config.dataset.train_datasets)
    problems = load_training_problems(config) if on_disk else []
    write_config(folder, config, contents_at_start(config, problems))
    return folder


def test_every_key_of_the_training_and_its_data_is_decided_on() -> None:
    keys = set(keys_of(TrainRLConfig))
    decided = {key for key in keys if key.startswith(("train.", "dataset.", "teacher_model.lora.")) or "." not in key}
    model_keys = {"teacher_model.model_name_or_path", "teacher_model.load_in_4bit", "generation.trained_role"}
    assert decided - {"dry_run"} == (set(FIXED) | TAKES_EFFECT) - model_keys
    assert set(FIXED) | TAKES_EFFECT <= keys and not set(FIXED) & TAKES_EFFECT


LAUNCHES = {
    "optimizer.pt": {},
    "latest": {"ACCELERATE_USE_DEEPSPEED": "true"},
    "optimizer.bin": {"ACCELERATE_USE_FSDP": "true"},
}


@pytest.mark.parametrize("state", LAUNCHES)
def test_a_training_launched_otherwise_does_not_begin_with_a_new_optimizer(state: str, tmp_path: Path) -> None:
    (tmp_path / state).touch()
    for launch_state, environment in LAUNCHES.items():
        if launch_state == state:
            check_launch(tmp_path, {"ACCELERATE_USE_DEEPSPEED": "false", **environment})
        else:
            with pytest.raises(ConfigError, match="a new state of the optimizer. Give accelerate the --config_file"):
                check_launch(tmp_path, environment)


OTHERS = {
    "environment": "classroom_rl.environments.classroom",
    "generation.trained_role": "student",
    "seed": "7",
    "skip_first_samples": "3",
    "dataset.train_datasets": "[{name_or_path: other.jsonl}]",
    "dataset.max_train_examples": "100",
    "train.number_of_problems_per_batch": "16",
    "train.num_samples_per_problem": "4",
    "train.mu": "2",
    "train.algorithm": "ppo",
    "train.ppo.head": "mlp",
    "train.optimizer": "sgd",
    "train.dtype": "bfloat16",
    "teacher_model.model_name_or_path": "Qwen/Qwen3-0.6B",
    "teacher_model.lora.enable": "true",
    "teacher_model.lora.rank": "8",
    "teacher_model.lora.alpha": "8",
    "teacher_model.lora.target_modules": "[q_proj]",
    "teacher_model.lora.dropout": "0.1",
    "teacher_model.lora.bias": "lora_only",
    "teacher_model.load_in_4bit": "true",
}


@pytest.mark.parametrize("key", sorted(FIXED))
def test_what_a_checkpoint_depends_on_may_not_change(tmp_path: Path, key: str) -> None:
    checkpoint_made_with(tmp_path, step=5)
    last = checkpoint_made_with(tmp_path)
    with pytest.raises(ConfigError) as raised:
        if key == "environment":  # another environment has other keys, so it is set after loading
            config = replace(configured(tmp_path), environment="tests.support.guessing")
        else:
            config = load(TrainRLConfig, "train_rl", [f"logging.save_dir={tmp_path}", f"{key}={OTHERS[key]}"])
        check_resume(tmp_path, config)
    message = str(raised.value)
    assert message.startswith(f"The training cannot go on from {last}: {key} was ") and FIXED[key] in message
    assert message.endswith("Set back what has changed, or give a new run another folder, logging.save_dir=…")


def test_the_model_of_a_trained_student_may_not_change(tmp_path: Path) -> None:
    role, other_model = "generation.trained_role=student", "student_model.model_name_or_path=Qwen/Qwen3-0.6B"
    for folder, overrides, fixed in ((tmp_path / "student", [role], True), (tmp_path / "teacher", [], False)):
        checkpoint_made_with(folder, *overrides)
        if fixed:
            with pytest.raises(ConfigError, match="student_model.model_name_or_path was .* the weights of this one"):
                check_resume(folder, configured(folder, *overrides, other_model))
        else:
            [line] = check_resume(folder, configured(folder, *overrides, other_model))
            assert line.startswith("student_model.model_name_or_path changes")


def test_a_checkpoint_from_before_the_role_could_be_chosen_goes_on(tmp_path: Path) -> None:
    made_with = checkpoint_made_with(tmp_path) / MADE_WITH
    made_with.write_text("".join(line for line in made_with.read_text().splitlines(True) if "trained_role" not in line))
    assert check_resume(tmp_path, configured(tmp_path)) == []


def test_what_takes_effect_is_told_with_both_values(tmp_path: Path) -> None:
    assert check_resume(tmp_path, configured(tmp_path)) == []
    checkpoint_made_with(tmp_path)
    assert check_resume(tmp_path, configured(tmp_path)) == []
    rate = configured(tmp_path).train.learning_rate
    overrides = ("train.learning_rate=1e-3", "train.beta=0.01", "train.loss_type=grpo", "generation.max_turns=3")
    assert check_resume(tmp_path, configured(tmp_path, *overrides)) == [
        f"train.learning_rate changes from {rate} to 0.001 after step 20",
        "train.beta changes from 0.0 to 0.01 after step 20",
        'train.loss_type changes from "dapo" to "grpo" after step 20',
        "generation.max_turns changes from 9 to 3 after step 20",
    ]


def test_supervision_may_begin_change_and_end_with_a_line_for_each_key(tmp_path: Path) -> None:
    supervised = (
        "supervisor_model.model_name_or_path=rubric",
        "generation.supervisor.share=0.5",
        "train.turn_credit.mode=immediate",
        "train.corrections.mode=pass",
    )
    checkpoint_made_with(tmp_path)
    begun_lines = check_resume(tmp_path, configured(tmp_path, *supervised))
    assert [line.partition(" changes from ")[0] for line in begun_lines] == [
        "train.turn_credit.mode",
        "train.corrections.mode",
        "supervisor_model",
        "generation.supervisor.share",
    ]
    assert begun_lines[1] == 'train.corrections.mode changes from "none" to "pass" after step 20'
    checkpoint_made_with(tmp_path, *supervised, step=30)
    other = ("generation.supervisor.on_invalid=replace", "generation.supervisor.penalties.leak=-4")
    changed = ("train.corrections.interval=5", "train.corrections.learning_rate=1e-5", "train.turn_credit.weight=0.1")
    lines = check_resume(tmp_path, configured(tmp_path, *supervised, *other, *changed))
    assert "train.turn_credit.weight changes from 0.3 to 0.1 after step 30" in lines
    assert "train.corrections.learning_rate changes from null to 1e-05 after step 30" in lines
    assert 'generation.supervisor.on_invalid changes from "observe" to "replace" after step 30' in lines
    assert any(line.startswith("generation.supervisor.penalties changes from ") for line in lines)
    assert len(lines) == 5
    ended_lines = check_resume(tmp_path, configured(tmp_path))
    assert any(line.startswith("supervisor_model changes from ") and " to null " in line for line in ended_lines)


def test_a_run_folder_may_be_moved_or_spelt_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_made_with(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert check_resume(tmp_path / "run", configured(Path("run"))) == []
    (tmp_path / "run").rename(tmp_path / "moved")
    assert check_resume(tmp_path / "moved", configured(tmp_path / "moved")) == []


def test_a_checkpoint_that_does_not_say_what_it_was_made_with_is_told_about(tmp_path: Path) -> None:
    (checkpoint_made_with(tmp_path) / MADE_WITH).unlink()
    (line,) = check_resume(tmp_path, configured(tmp_path, "train.mu=2"))
    assert f"checkpoint-20 does not say what it was made with ({MADE_WITH})" in line


def test_the_launcher_refuses_before_any_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoint_made_with(tmp_path)
    assert launch(["--config-name", "quickstart", f"logging.save_dir={tmp_path}", "train.mu=4"]) == 2
    assert "train.mu was 1 and is 4 now (steps are counted in batches of this size)" in capsys.readouterr().err
    assert not (tmp_path / "server.log").exists()


# What the files hold ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, world: Path) -> Path:
    """A folder with all that a training is made from."""
    folder = tmp_path / "files"
    shutil.copytree(world / "blank", folder / "teacher")
    shutil.copytree(world / "blank", folder / "student")
    (folder / "plan.txt").write_text("Teach: {{ problem }}")
    shutil.copy(ROOT / "prompt_templates/quickstart/teacher.txt", folder / "teacher.txt")
    lines = [json.dumps({"problem": f"What is {n} + 1?", "hint": n}) + "\n" for n in range(40)]
    (folder / "lessons.jsonl").write_text("".join(lines))
    return folder


def made_from(files: Path) -> list[str]:
    source = f"name_or_path: {files}/lessons.jsonl, problem_template: {files}/plan.txt, answer_column: null"
    return [
        f"dataset.train_datasets=[{{{source}}}]",
        f"teacher_model.model_name_or_path={files}/teacher",
        f"student_model.model_name_or_path={files}/student",
        f"generation.teacher_prompt_path={files}/teacher.txt",
    ]


def turn_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


CHANGES = {
    "another problem in the data": (
        lambda files: replace_in(files / "lessons.jsonl", "What is 3 + 1?", "What is 3 + 2?"),
        r"lessons.jsonl has changed: dataset.train_datasets gave 40 problems, and gives 40 now, which are not the same",
        None,
    ),
    "problems in another order": (
        lambda files: (files / "lessons.jsonl").write_text(
            "".join(reversed((files / "lessons.jsonl").read_text().splitlines(keepends=True)))
        ),
        "lessons.jsonl has changed: .* which are not the same",
        None,
    ),
    "another template of problems": (
        lambda files: replace_in(files / "plan.txt", "Teach", "Explain"),
        "plan.txt has changed: dataset.train_datasets gave 40 problems, and gives 40 now",
        None,
    ),
    "a column that no problem is made of": (
        lambda files: replace_in(files / "lessons.jsonl", '"hint": 3}', '"hint": 5}'),
        None,
        "lessons.jsonl has changed since the training began, but gives the same problems",
    ),
    "another weight of the teacher": (
        lambda files: turn_a_bit(files / "teacher/model.safetensors"),
        "teacher/model.safetensors is not what it was .teacher_model.model_name_or_path: the checkpoint holds",
        None,
    ),
    "another file of the teacher's tokenizer": (
        lambda files: (files / "teacher/added_tokens.json").write_text("{}"),
        "teacher/added_tokens.json is not what it was",
        None,
    ),
    "a note beside the teacher": (lambda files: (files / "teacher/NOTES.md").write_text("x"), None, None),
    "another weight of the student": (
        lambda files: turn_a_bit(files / "student/model.safetensors"),
        None,
        "student/model.safetensors .student_model.model_name_or_path. has changed since .* takes effect after step 20",
    ),
    "another prompt of the teacher": (
        lambda files: (files / "teacher.txt").write_text("Teach. {{ problem }}"),
        None,
        "teacher.txt .generation.teacher_prompt_path. has changed since the training began, and takes effect after",
    ),
    "only the time": (lambda files: os.utime(files / "lessons.jsonl", (0, 0)), None, None),
}
"""What is changed → how, the words of the refusal, the words that are said."""


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_files_of_a_checkpoint_held_may_not_change_unnoticed(tmp_path: Path, files: Path, what: str) -> None:
    change, refusal, notice = CHANGES[what]
    checkpoint_made_with(tmp_path / "run", *made_from(files))
    config = configured(tmp_path / "run", *made_from(files))
    assert check_resume(tmp_path / "run", config) == []
    check_problems(tmp_path / "run", load_training_problems(config))
    change(files)
    prompts._load.cache_clear()  # a training resumes in a new process
    if refusal is not None:
        with pytest.raises(ConfigError, match=f"go on from .*checkpoint-20: .*{refusal}.*Set back what has changed"):
            check_resume(tmp_path / "run", config)
        return
    lines = check_resume(tmp_path / "run", config)
    assert (re.search(notice, lines.pop()) is not None) if notice is not None else lines == []
    assert lines == []


def test_other_problems_are_refused_wherever_they_come_from(tmp_path: Path, files: Path) -> None:
    """As of a dataset on the Hub, where no file of the configuration shows it."""
    checkpoint_made_with(tmp_path, *made_from(files))
    problems = load_training_problems(configured(tmp_path, *made_from(files)))
    with pytest.raises(ConfigError, match="dataset.train_datasets gave 40 problems, and gives 39 now"):
        check_problems(tmp_path, problems[1:])


def test_files_in_the_run_folder_move_with_it(tmp_path: Path, world: Path) -> None:
    """The quickstart makes its lessons and models there."""
    run = tmp_path / "run"
    shutil.copytree(world / "blank", run / "world/blank")
    checkpoint_made_with(run, f"teacher_model.model_name_or_path={run}/world/blank")
    moved = run.rename(tmp_path / "moved")
    config = configured(moved, f"teacher_model.model_name_or_path={moved}/world/blank")
    assert check_resume(moved, config) == []
    turn_a_bit(moved / "world/blank/model.safetensors")
    with pytest.raises(ConfigError, match=r"…/world/blank/model.safetensors is not what it was"):
        check_resume(moved, config)


def test_a_checkpoint_without_fingerprints_is_told_about(tmp_path: Path) -> None:
    checkpoint = checkpoint_made_with(tmp_path)
    (checkpoint / CONTENTS).unlink()
    assert check_resume(tmp_path, configured(tmp_path)) == [unknown(checkpoint)]


def test_of_a_large_file_of_weights_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header, and something of every MiB to the end."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [5 << 20], "data_offsets": [0, 5 << 20]}}).encode()
    path, data = tmp_path / "model.safetensors", bytes(5 << 20)
    original = len(header).to_bytes(8, "little") + header + data

    def of(content: bytes, most: int) -> str:
        path.write_bytes(content)
        monkeypatch.setattr("classroom_rl.trainer.contents.WHOLE_UP_TO", most)
        return fingerprint(path)

    def changed(*places: int) -> bytes:
        content = bytearray(original)
        for index in places:
            content[index] ^= 1
        return bytes(content)

    sampled = of(original, 1 << 20)
    assert sampled.startswith("sampled ") and sampled == of(original, 1 << 20)
    assert of(changed(20), 1 << 20) != sampled, "the header"
    assert of(changed(len(original) - 1), 1 << 20) != sampled, "the end"
    assert all(of(changed(number << 20), 1 << 20) != sampled for number in range(5))
    assert of(original + b"0", 1 << 20) != sampled, "the size"
    assert of(changed((1 << 20) + 9000), 1 << 20) == sampled, "what lies between is not read"
    assert of(changed((1 << 20) + 9000), 1 << 30) != of(original, 1 << 30), "of a small file all is"


# What takes effect -----------------------------------------------------------------------------------------------


class Tiny(ResumedTrainer, Trainer):
    """The trainer of transformers that the others are built on."""


def steps(folder: Path, blank: Path, resume: bool, **changed: object) -> Tiny:
    options = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 4, "save_steps": 2} | changed
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="steps", **options,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 16, "labels": [[5, 6, 7, 8]] * 16})
    trainer = Tiny(AutoModelForCausalLM.from_pretrained(blank), arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return trainer


def rates(trainer: Trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_resumed_training_steps_with_the_configured_rate_schedule_and_saving(world: Path, tmp_path: Path) -> None:
    """By hand: the third of 4 steps of a linear decay begins at half of 4e-3, of one over 6 steps at two thirds."""
    blank = world / "blank"
    first = steps(tmp_path, blank, resume=False)
    assert rates(first) == [1e-3] * 4
    assert rates(steps(tmp_path, blank, resume=True))[2:] == [1e-3] * 2
    changed = steps(tmp_path, blank, resume=True, learning_rate=4e-3, lr_scheduler_type="linear", save_steps=3)
    assert rates(changed)[2:] == pytest.approx([2e-3, 1e-3]) and (tmp_path / "checkpoint-3").is_dir()
    longer = steps(tmp_path, blank, resume=True, lr_scheduler_type="linear", max_steps=6, learning_rate=3e-3)
    assert rates(longer)[2:] == pytest.approx([2e-3, 1.5e-3, 1e-3, 0.5e-3])
    parameters, changed_parameters = (dict(trainer.model.named_parameters()) for trainer in (first, changed))
    assert any(not torch.equal(parameters[name], changed_parameters[name]) for name in parameters)


def test_a_training_that_has_made_its_steps_makes_no_other(world: Path, tmp_path: Path) -> None:
    """transformers would make one more."""
    blank = world / "blank"
    steps(tmp_path, blank, resume=False, max_steps=2)
    trainer = steps(tmp_path, blank, resume=True, max_steps=2)
    assert trainer.state.global_step == 2 and len(rates(trainer)) == 2
    saved_weights = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert all(torch.equal(weight, saved_weights[name]) for name, weight in trainer.model.state_dict().items())


def test_a_checkpoint_with_more_steps_than_configured_is_not_gone_on_from(tmp_path: Path) -> None:
    checkpoint = checkpoint_made_with(tmp_path)
    assert check_resume(tmp_path, configured(tmp_path, "train.max_steps=20")) != []
    with pytest.raises(ConfigError, match="checkpoint-20 has made 20 steps already, and train.max_steps is 18"):
        check_resume(tmp_path, configured(tmp_path, "train.max_steps=18"))
    assert checkpoint.is_dir()


def test_both_trainers_go_on_with_the_configured_rate() -> None:
    assert issubclass(TrainingLoop, ResumedTrainer) and issubclass(SFTTrainer, ResumedTrainer)


def test_a_checkpoint_is_complete_with_what_it_was_made_with(tmp_path: Path) -> None:
    config = configured(tmp_path, "train.learning_rate=1e-3")
    (tmp_path / UNFINISHED / "checkpoint-3").mkdir(parents=True)
    trainer = TrainingLoop.__new__(TrainingLoop)
    trainer.run_config, trainer.state = config, SimpleNamespace(global_step=3)
    trainer.contents = {"dataset.train_datasets": {"a.jsonl": {"a.jsonl": "1"}}}
    trainer.corrections = CorrectionSet(tmp_path, 8, "", lambda text: [])
    trainer.corrections.passed(2, 5)
    trainer._complete_checkpoint(tmp_path, keep=2)
    assert (tmp_path / "checkpoint-3" / MADE_WITH).read_text() == to_yaml(config)
    assert read_contents(tmp_path / "checkpoint-3") == trainer.contents
    cursor = json.loads((tmp_path / "checkpoint-3" / CURSOR_NAME).read_text())
    assert cursor == {"passes": 1, "examples": 5, "next_step": 2}


def test_the_trainer_refuses_before_it_writes_or_loads_anything(tmp_path: Path) -> None:
    checkpoint_made_with(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint-20: seed was 42 and is 7 now"):
        train(configured(tmp_path, "seed=7"))
    assert not (tmp_path / "config").exists() and not (tmp_path / "run_id").exists()


@pytest.fixture
def port(room: Room, generation: GenerationConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    port = free_port()
    with serving(application(room, generation, monkeypatch)(port=port), port):
        yield port


@pytest.mark.full
def test_a_grpo_run_goes_on_with_another_learning_rate(
    room: Room, generation: GenerationConfig, world: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole run, with scripted engines in the server; then it goes on, as it is configured then."""
    options = [
        f"teacher_model.model_name_or_path={world / 'blank'}",
        f"dataset.train_datasets=[{{name_or_path: {world / 'lessons_train.jsonl'}}}]",
        "train.number_of_problems_per_batch=1",
        "train.num_samples_per_problem=2",
        "train.per_device_train_batch_size=2",
        "train.lr_scheduler_type=constant",
        "guards.judge_check_every_n_steps=0",
        "logging.save_steps=1",
        "generation.colocate=false",
    ]

    def run(*overrides: str) -> list[float]:
        config = configured(room.folder, *options, *overrides)
        config.generation = replace(generation, server_port=port, colocate=False)
        train(config)
        lines = (room.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["learning_rate"] for line in lines]

    assert run("train.learning_rate=1e-3", "train.max_steps=1") == [1e-3]
    written = (room.folder / "checkpoints/checkpoint-1" / MADE_WITH).read_text()
    assert "learning_rate: 0.001" in written
    assert run("train.learning_rate=5e-3", "train.max_steps=3") == [1e-3, 5e-3, 5e-3]
    assert "train.learning_rate changes from 0.001 to 0.005 after step 1" in caplog.text
    recorded = (room.folder / "config/train_rl.yaml").read_text()
    with pytest.raises(ConfigError, match=r"checkpoint-3: train.optimizer was \"adamw_torch\" and is \"sgd\" now"):
        run("train.learning_rate=5e-3", "train.max_steps=6", "train.optimizer=sgd")
    assert (room.folder / "config/train_rl.yaml").read_text() == recorded


@pytest.mark.parametrize("name", ["lr=1e-4", "a b (c)", "Übung:1", "x" * 200])
@pytest.mark.parametrize("earlier", [None, "lr=1e-4-0123abcd"])
def test_request_ids_fit_whatever_the_folder_is_called(tmp_path: Path, name: str, earlier: str | None) -> None:
    """Also in a folder that a training left that could not ask for its first batch."""
    folder = tmp_path / name
    folder.mkdir()
    if earlier is not None:
        (folder / "run_id").write_text(earlier)
    config = load(TrainRLConfig, "train_rl", [f"logging.save_dir={folder}"], check_train_rl)
    run_id = _open_run_folder(config, folder)
    assert name not in run_id and _open_run_folder(config, folder) == run_id
    longest = f"{run_id}-step{10**6}-rank1000of1000-{'0' * 8}-again100-of{10**6}"
    assert SampleRequest(problems=["p"], answers=[""], request_id=longest, seed=1, step=0)
