"""The quickstart: what happens to an existing folder, and what it shows."""

import pytest

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch.quickstart import ensure_models, main, prepare_folder, read_notes, reason_to_move, write_notes
from classroom_rl.launch.quickstart_plan import make_commands
from classroom_rl.system.processes import Signals
from classroom_rl.system.shipped import ROOT


def quickstart_in(folder, *overrides):
    return make_commands([f"logging.save_dir='{folder}'", *overrides])


def test_an_empty_folder_and_one_with_models_only_are_gone_on_with(tmp_path):
    quickstart = quickstart_in(tmp_path / "run", "train.learning_rate=0")
    assert reason_to_move(quickstart) is None
    write_notes(quickstart.folder, {"models": quickstart.models.recipe})
    quickstart.models.model.mkdir(parents=True)
    assert reason_to_move(quickstart) is None
    prepare_folder(quickstart)
    assert read_notes(quickstart.folder)["overrides"] == sorted(quickstart.overrides)
    assert reason_to_move(quickstart) is None  # taken up again


@pytest.mark.parametrize(
    ("notes", "also_there", "reason"),
    [
        ("same", "summary.json", "finished"),
        ("none", "run_id", "other models"),
        ("other seed", "", "other models"),
        ("other overrides", "run_id", "other overrides"),
        ("models only", "config/train_rl.yaml", "other means"),
        ("none", "world/world.json", "other models"),
    ],
)
def test_what_a_run_cannot_go_on_from_is_moved_aside_whole(tmp_path, capsys, notes, also_there, reason):
    quickstart = quickstart_in(tmp_path / "run")
    same_notes = {"models": quickstart.models.recipe, "overrides": sorted(quickstart.overrides)}
    notes_by_case = {
        "same": same_notes,
        "other seed": {**same_notes, "models": {**quickstart.models.recipe, "seed": 7}},
        "other overrides": {**same_notes, "overrides": ["seed=1"]},
        "models only": {"models": quickstart.models.recipe},
    }
    if notes in notes_by_case:
        write_notes(quickstart.folder, notes_by_case[notes])
    if also_there:
        (quickstart.folder / also_there).parent.mkdir(parents=True, exist_ok=True)
        (quickstart.folder / also_there).write_text("{}", encoding="utf-8")
    paths_before = {path.relative_to(quickstart.folder) for path in quickstart.folder.rglob("*")}

    assert reason in reason_to_move(quickstart)
    prepare_folder(quickstart)

    [aside] = [path for path in tmp_path.iterdir() if path.name.startswith("run.")]
    assert {path.relative_to(aside) for path in aside.rglob("*")} == paths_before
    assert str(aside) in capsys.readouterr().out
    assert read_notes(quickstart.folder) == same_notes


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    (tmp_path / "world").mkdir()
    with pytest.raises(ConfigError, match="something else"):
        prepare_folder(quickstart_in(tmp_path))
    assert (tmp_path / "thesis.txt").exists()


def test_dry_run_shows_every_program_with_its_file_and_makes_nothing(tmp_path, capsys):
    assert main([f"logging.save_dir={tmp_path / 'run'}", "dry_run=true"]) == 0
    output = capsys.readouterr().out
    for program in (
        "classroom_rl.environments.toy_language.build",
        "classroom_rl.launch.sft",
        "classroom_rl.launch.server",
        "classroom_rl.launch.train",
        "classroom_rl.launch.evaluate",
    ):
        assert program in output
    for folder in ("train_rl", "train_sft", "eval"):
        assert f"# configuration: {ROOT / 'config' / folder / 'quickstart.yaml'}\n" in output
    assert not (tmp_path / "run").exists()


def test_models_are_made_only_for_a_teacher_that_is_the_quickstarts(tmp_path):
    config = TrainRLConfig()
    config.logging.save_dir = str(tmp_path)
    config.teacher_model.model_name_or_path = "Qwen/Qwen3-4B"
    ensure_models(config, Signals())
    assert list(tmp_path.iterdir()) == []
    config.teacher_model.model_name_or_path = str(tmp_path / "sft" / "model")
    (tmp_path / "sft" / "model").mkdir(parents=True)
    ensure_models(config, Signals())
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_models_made_with_another_seed_are_not_passed_off_as_these(tmp_path, capsys):
    quickstart = quickstart_in(tmp_path)
    quickstart.models.model.mkdir(parents=True)
    write_notes(tmp_path, {"models": {"seed": 7, "sft_overrides": []}})
    assert main(["--models-only", f"logging.save_dir={tmp_path}"]) == 2
    assert "'seed': 7" in capsys.readouterr().err
