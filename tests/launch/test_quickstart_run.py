"""The quickstart's runner: which override reaches which program, and what happens to a folder that is there already."""

import pytest

from config.eval_model import EvalConfig, check_eval
from config.load import load
from config.train_rl_model import TrainRLConfig
from config.train_sft_model import TrainSFTConfig
from src.errors import ConfigError
from src.launch.quickstart import ensure_models, main, read_notes, reason_to_move, settle_folder, write_notes
from src.launch.quickstart_plan import applies, make_plan
from src.system.processes import Signals


def plan_in(folder, *overrides):
    return make_plan([f"logging.save_dir='{folder}'", *overrides])


def test_overrides_reach_the_programs_that_they_are_meant_for(tmp_path):
    plan = plan_in(
        tmp_path / "a run",
        "seed=2",
        "train.learning_rate=0",
        "generation.max_turns=5",
        "generation.server_port=8123",
        "num_samples_per_problem=1",
        "sft.train.max_steps=7",
    )
    rl = load(TrainRLConfig, "train_rl", plan.rl_arguments)
    sft = load(TrainSFTConfig, "train_sft", plan.models.sft_arguments())
    evaluation = load(EvalConfig, "eval", plan.eval_arguments("after"), check_eval)

    folder = str(tmp_path / "a run")
    assert (rl.seed, rl.train.learning_rate, rl.generation.max_turns, rl.logging.save_dir) == (2, 0, 5, folder)
    assert rl.teacher_model.model_name_or_path == rl.student_model.model_name_or_path == str(plan.models.model)
    assert rl.dataset.train_datasets[0].name_or_path == f"{folder}/world/lessons_train.jsonl"

    assert (sft.seed, sft.train.max_steps, sft.logging.save_dir) == (2, 7, f"{folder}/sft")
    assert sft.train.learning_rate > 0

    assert (evaluation.seed, evaluation.num_samples_per_problem) == (2, 1)
    assert evaluation.server_url == "http://127.0.0.1:8123"
    assert evaluation.logging.save_dir == f"{folder}/eval/after"
    assert evaluation.dataset.eval_datasets[0].name_or_path == f"{folder}/world/lessons_heldout.jsonl"
    assert plan.models.world_command()[-4:] == ["--out", f"{folder}/world", "--seed", "2"]


def test_a_key_that_no_program_has_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="train.learning_rate"):
        plan_in(tmp_path, "train.learning_rat=1")
    with pytest.raises(ConfigError, match="train.max_steps"):
        plan_in(tmp_path, "sft.train.max_step=1")


def test_keys_inside_mappings_belong_to_the_schema_of_the_mapping():
    assert applies("generation.judges_rules_prompts_paths.mine=x.txt", TrainRLConfig)
    assert applies("+train.reward_weights.end_rm=1", TrainRLConfig)
    assert not applies("train.learning_rate=1", EvalConfig)
    assert not applies("generation=1", EvalConfig)


def test_an_empty_folder_and_one_with_models_only_are_gone_on_with(tmp_path):
    plan = plan_in(tmp_path / "run", "train.learning_rate=0")
    assert reason_to_move(plan) is None
    write_notes(plan.folder, {"models": plan.models.recipe})
    plan.models.model.mkdir(parents=True)
    assert reason_to_move(plan) is None
    settle_folder(plan)
    assert read_notes(plan.folder)["overrides"] == sorted(plan.overrides)
    assert reason_to_move(plan) is None  # taken up again


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
    plan = plan_in(tmp_path / "run")
    same = {"models": plan.models.recipe, "overrides": sorted(plan.overrides)}
    written = {
        "same": same,
        "other seed": {**same, "models": {**plan.models.recipe, "seed": 7}},
        "other overrides": {**same, "overrides": ["seed=1"]},
        "models only": {"models": plan.models.recipe},
    }
    if notes in written:
        write_notes(plan.folder, written[notes])
    if also_there:
        (plan.folder / also_there).parent.mkdir(parents=True, exist_ok=True)
        (plan.folder / also_there).write_text("{}", encoding="utf-8")
    before = {path.relative_to(plan.folder) for path in plan.folder.rglob("*")}

    assert reason in reason_to_move(plan)
    settle_folder(plan)

    [aside] = [path for path in tmp_path.iterdir() if path.name.startswith("run.")]
    assert {path.relative_to(aside) for path in aside.rglob("*")} == before
    assert str(aside) in capsys.readouterr().out
    assert read_notes(plan.folder) == same


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    (tmp_path / "world").mkdir()
    with pytest.raises(ConfigError, match="something else"):
        settle_folder(plan_in(tmp_path))
    assert (tmp_path / "thesis.txt").exists()


def test_dry_run_shows_every_program_and_makes_nothing(tmp_path, capsys):
    assert main([f"logging.save_dir={tmp_path / 'run'}", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    for program in ("src.toy_language.build", "train_sft.py", "vllm_server.py", "train_rl.py", "eval.py"):
        assert program in shown
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
    plan = plan_in(tmp_path)
    plan.models.model.mkdir(parents=True)
    write_notes(tmp_path, {"models": {"seed": 7, "sft_overrides": []}})
    assert main(["--models-only", f"logging.save_dir={tmp_path}"]) == 2
    assert "'seed': 7" in capsys.readouterr().err
