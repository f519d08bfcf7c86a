"""What a start needs is known before anything is loaded: keys, a login, places to write to, and what APIs are asked."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import wandb

import classroom_rl.launch.before_start as before_start
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.launch.before_start import check_prompts_fit, check_start, requests_of, slow_numbers, what_is_missing
from tests.support.configs import loaded, training
from tests.support.programs import run_program

JUDGE = (
    "judge_model.base_url=http://127.0.0.1:9/v1",
    "judge_model.model_name_or_path=judge",
    "generation.judges_rules_prompts_paths={pedagogical_eval: prompt_templates/judges/language_tutor_eval.txt}",
)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = ("OPENROUTER_API_KEY", "MY_KEY", "CLASSROOM_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC")
    for name in (*keys, "TORCHINDUCTOR_CACHE_DIR", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(before_start.tempfile, "gettempdir", lambda: "/tmp")


def missing(*overrides: str, **programs: bool) -> str:
    return "\n".join(what_is_missing(training(*overrides), **programs))


def test_nothing_is_missing_for_the_quickstart():
    for name in ("quickstart", "quickstart_ppo", "quickstart_online_dpo", "marooned", "small_tutor"):
        assert missing(f"--config-name={name}") == ""
        check_start(training(f"--config-name={name}"), loads_models=True, reports=True)


def test_a_missing_key_is_named_with_its_role_and_variable(monkeypatch):
    overrides = [*JUDGE, "judge_model.api_key_env=MY_KEY"]
    assert missing(*overrides).startswith(
        "judge_model is judge, behind an API that needs a key: set the environment varia"
    )
    assert missing(*overrides, loads_models=False) == "", "the trainer asks no judge"
    with pytest.raises(ConfigError, match="MY_KEY"):
        check_start(training(*overrides), loads_models=True, reports=False)
    monkeypatch.setenv("MY_KEY", "none")
    assert missing(*overrides) == "" and missing(*JUDGE) == ""


def test_a_missing_key_of_a_guard_that_is_asked_and_a_missing_token_are_said():
    guard = "guards.held_out_judge_model={model_name_or_path: second, use_openrouter: true}"
    assert missing(guard) == ""
    assert "guards.held_out_judge_model is second" in missing(guard, "guards.judge_check_every_n_steps=5")
    assert "server_host is 0.0.0.0, which other machines can reach" in missing("generation.server_host=0.0.0.0")


@pytest.mark.parametrize("overrides", [["logging.wandb=true"], ["logging.report_to=[wandb]"]])
def test_a_missing_login_is_said(overrides: list[str], monkeypatch, tmp_path):
    monkeypatch.setattr(before_start.sys.stdin, "isatty", lambda: False, raising=False)
    host = urlsplit(wandb.Settings().base_url).hostname  # not that of every version
    assert f"there is no login for {host}: run `wandb login`, set WANDB_API_KEY" in missing(*overrides)
    assert missing(*overrides, reports=False) == "", "the server reports nothing"
    for login_host in (host, "api.wandb.ai"):
        (tmp_path / ".netrc").write_text(f"machine {login_host} login user password {40 * 'a'}\n")
        assert missing(*overrides) == ""
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here")
    assert "there is no login for wandb.here" in missing(*overrides)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert missing(*overrides) == ""
    for name in ("WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))  # its settings files count as its environment does
    (tmp_path / ".netrc").write_text(f"machine wandb.here login user password {40 * 'a'}\n")
    assert "there is no login for" in missing(*overrides)
    for setting in ("mode = offline", "base_url = https://wandb.here"):
        (tmp_path / "settings").write_text(f"[default]\n{setting}\n")
        assert missing(*overrides) == ""


def test_a_temporary_folder_with_a_space_is_refused_where_engines_start(monkeypatch):
    monkeypatch.setattr(before_start.tempfile, "gettempdir", lambda: "/tmp/my files")
    assert "TMPDIR is '/tmp/my files', with a space in it: torch's compiler" in missing()
    assert missing(loads_models=False) == ""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/cache")
    assert missing() == ""


def test_a_cache_that_cannot_be_written_to_is_named_and_not_the_data(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("a folder's name is taken by a file")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file" / "datasets"))
    data = "dataset.train_datasets=[{name_or_path: owner/problems}]"
    message = missing(data)
    assert f"goes into {tmp_path / 'file' / 'datasets'}, which cannot be written to (Not a directory): set" in message
    assert "HF_DATASETS_CACHE or HF_HOME" in message
    assert missing() == "", "nothing is fetched"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["train.dtype=float32"], None),
        (["train.dtype=bfloat16"], "train.dtype"),
        (["teacher_model.vllm.dtype=bfloat16"], "teacher_model.vllm.dtype"),
    ],
)
def test_bfloat16_on_a_cpu_that_is_slow_in_it_is_said(overrides: list[str], keys: str | None, monkeypatch):
    monkeypatch.setattr(before_start, "gpu_is_there", lambda: False)
    monkeypatch.setattr(before_start, "has_fast_bfloat16", lambda: False)
    assert slow_numbers(training(*overrides)) == ([] if keys is None else [f"warning: {keys} is bfloat16, {SLOWER}"])
    monkeypatch.setattr(before_start, "has_fast_bfloat16", lambda: True)
    assert slow_numbers(training(*overrides)) == []


SLOWER = "which this CPU computes slower than float32: unless memory is short, set it to float32"


def test_the_requests_to_a_judge_and_their_costs():
    """10 batches of 8 × 8 conversations, 2 attempts by one rule, of up to 3 replies and a control each."""
    prices = ["judge_model.usd_per_million_prompt_tokens=1", "judge_model.usd_per_million_completion_tokens=10"]
    sizes = ["train.max_steps=10", "train.mu=1", "generation.number_judge_attempts=2"]
    sizes += ["generation.max_tokens_per_judge_attempt=500"]
    (line,) = requests_of(training(*JUDGE, *sizes, *prices))
    assert "requests to judge_model (judge), for 10 batches: 1,280, and 5,120 at most" in line  # 640 × 2, × (3 + 1)
    assert "about $10.27, and $41.08 at most" in line  # 5,120 × (1,024 + 2,000 prompt tokens at $1 + 500 at $10) / 10⁶
    (line,) = requests_of(training(*JUDGE, *sizes))
    assert "what they cost is known with judge_model.usd_per_million_… set" in line
    assert requests_of(training()) == []


def test_the_requests_of_a_judge_of_groups_a_student_and_a_supervisor():
    api = ["base_url=http://127.0.0.1:9/v1", "model_name_or_path=m"]
    overrides = [*JUDGE, "judge_model.mode=group", "judge_model.anchor_share=0", "train.max_steps=10", "train.mu=1"]
    overrides += [f"{role}_model.{option}" for role in ("student", "supervisor") for option in api]
    overrides += ["generation.supervisor.prompt_path=prompt_templates/supervisors/language_tutor.txt"]
    overrides += ["generation.supervisor.on_invalid=retry", "generation.supervisor.share=0.5"]
    overrides += ["train.turn_credit.mode=immediate"]
    lines = "\n".join(requests_of(training(*overrides)))
    assert "requests to judge_model (judge), for 10 batches: 80, and 240 at most" in lines  # one for each group
    assert "requests to student_model (m), for 10 batches: 3,200, and 3,200 at most" in lines  # 640 × (9 // 2 + 1)
    assert "requests to supervisor_model (m), for 10 batches: 1,600, and 12,800 at most" in lines  # × (1 + 1) × 2


EVALUATION = ("--config-name=language_tutor", "server_url=null")


def test_the_requests_of_an_evaluation_are_for_the_problems_that_there_are(tmp_path: Path):
    config = loaded("eval", *EVALUATION, "dataset.max_val_examples=10")
    requests_per_problem = (
        config.num_samples_per_problem * len(config.samplings) * config.generation.number_judge_attempts
    )
    arms = 3 + len(config.tutors)  # the base and two control arms
    assert f"for 10 problems: {10 * requests_per_problem * arms:,}, and" in requests_of(config)[0]
    (tmp_path / "few.jsonl").write_text('{"problem": "one"}\n{"problem": "two"}\n')
    data = f"dataset.eval_datasets=[{{name_or_path: {tmp_path / 'few.jsonl'}, answer_column: null}}]"
    assert "for 2 problems: " in requests_of(loaded("eval", *EVALUATION, data))[0]


def test_a_comparison_needs_the_keys_of_its_tutors_and_further_judges_and_counts_every_arm(monkeypatch):
    arguments = [*EVALUATION, "dataset.max_val_examples=10"]
    arguments += ["generation.number_judge_attempts=1", "samplings=[sampled]", "num_samples_per_problem=1"]
    arguments += ["tutors=[{name: other, model_name_or_path: tutor, base_url: https://a.b/v1, api_key_env: MY_KEY}]"]
    arguments += ["extra_judges=[{model_name_or_path: second, use_openrouter: true}]"]
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    config = loaded("eval", *arguments)
    message = "\n".join(what_is_missing(config))
    assert "tutors[0] is tutor, behind an API that needs a key: set the environment variable MY_KEY" in message
    assert "extra_judges[0] is second, behind an API that needs a key" in message
    lines = "\n".join(requests_of(config))
    rules = len(config.generation.judge_rules)
    judge = config.judge_model.model_name_or_path
    assert f"requests to judge_model ({judge}), for 10 problems: {40 * rules}, and" in lines
    assert f"requests to extra_judges[0] (second), for 10 problems: {40 * rules}, and {120 * rules} at most" in lines


def test_a_problem_that_leaves_no_room_is_refused_before_anything_is_loaded(world: Path, long_problems: str):
    overrides = [f"teacher_model.model_name_or_path={world / 'blank'}", long_problems]
    with pytest.raises(DataError, match="makes a teacher prompt of .* tokens, but a conversation may have 1024"):
        check_prompts_fit(training(*overrides))


@pytest.mark.parametrize("program", ["vllm_server.py", "eval.py"])
def test_a_run_folder_that_cannot_be_made_ends_a_program_with_a_message(tmp_path: Path, program: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "p.jsonl").write_text('{"problem": "p", "answer": ""}\n')
    data = f"[{{name_or_path: {tmp_path / 'p.jsonl'}}}]"
    key = "dataset.eval_datasets" if program == "eval.py" else "dataset.train_datasets"
    result = run_program(program, f"logging.save_dir={tmp_path / 'file' / 'run'}", f"{key}={data}")
    assert result.returncode == 2, result.stderr[-3000:]
    assert f"error: {tmp_path / 'file'}" in result.stderr and "Not a directory" in result.stderr
    assert "Traceback" not in result.stderr
