"""Evaluations from the configuration to the run folder, with a scripted server over HTTP."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from classroom_rl.config.base import DatasetSource
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.compare import compare_tutors
from classroom_rl.evaluation.report.tables import measurement_table
from classroom_rl.evaluation.run import evaluate
from classroom_rl.results.evaluation_files import read_records
from tests.support.configs import loaded
from tests.support.evaluated_server import ScriptedServer

# The configuration -------------------------------------------------------------------------------------------------


SUPERVISED = ("samplings=[sampled,supervised]", "supervisor_model.model_name_or_path=rubric", "server_url=null")
TUTOR = "{name: x, model_name_or_path: y}"
TWO_APIS = "{name: x, model_name_or_path: m, use_openrouter: true, use_gemini: true}"
QUICKSTART, COMPARE, MATHS, FORKS = "quickstart", "quickstart_compare", "maths", "quickstart_counterfactuals"
REFUSED = [
    (QUICKSTART, ["samplings=[warm]"], "samplings"),
    (QUICKSTART, ["samplings=[]"], "samplings"),
    (QUICKSTART, ["samplings=[greedy,greedy]"], "samplings"),
    (QUICKSTART, ["samplings=[supervised]", "server_url=null"], "model_name_or_path, to rules, rubric or a"),
    (QUICKSTART, ["supervisor_model.model_name_or_path=rules", "server_url=null"], "measured without a supervisor"),
    (QUICKSTART, ["samplings=[supervised]", "supervisor_model.model_name_or_path=rules"], "the server's own"),
    (QUICKSTART, [*SUPERVISED, "generation.supervisor.penalties.leak=2"], "a penalty is at most 0: write -2"),
    (
        QUICKSTART,
        [*SUPERVISED, "supervisor_model.model_name_or_path=gpt", "supervisor_model.use_openrouter=true"],
        "a prompt",
    ),
    (QUICKSTART, ["num_samples_per_problem=0"], "num_samples_per_problem"),
    (QUICKSTART, ["dataset.eval_datasets=[]", "~generation.judges_rules_prompts_paths"], "eval_datasets"),
    (QUICKSTART, ["server_url=127.0.0.1:8005"], "server_url"),
    (QUICKSTART, ["server_url=null", "generation.student_personas_prompts_paths=null"], "personas_prompts_paths"),
    (QUICKSTART, ["server_url=null", "teacher_model.vllm.top_p=0"], "top_p"),
    (QUICKSTART, ["teacher_model.vllm.temprature=1"], "temperature"),
    (QUICKSTART, ["judges=[{model_name_or_path: rules}]"], "judges label a benchmark's replies, and benchmark is null"),
    (COMPARE, ["tutors=[{name: a b, model_name_or_path: x}]"], "name is 'a b'"),
    (COMPARE, ["tutors=[{name: base, model_name_or_path: x}]"], "other than base, acknowledges, ideal"),
    (COMPARE, [f"tutors=[{TUTOR},{TUTOR}]"], "a name of its own"),
    (COMPARE, ["tutors=[{name: x}]"], "names no model_name_or_path, adapter or server_url"),
    (COMPARE, ["tutors=[{name: x, server_url: localhost}]"], "must begin with http"),
    (COMPARE, [f"tutors=[{TWO_APIS}]"], "use_openrouter of the tutor x and use_gemini of the tutor x are both set"),
    (COMPARE, ["server_url='http://127.0.0.1:8005'"], "set server_url=null and name a server as one of the tutors"),
    (COMPARE, ["extra_judges=[{model_name_or_path: owner/model}]"], "must be behind an API"),
    (COMPARE, ["extra_judges=[{model_name_or_path: rubric},{model_name_or_path: rubric}]"], "name each judge once"),
    (COMPARE, ["tutors=[]", "extra_judges=[{model_name_or_path: rubric}]"], "no tutors to compare"),
    (MATHS, ["server_url=http://127.0.0.1:8005"], "a server lends nobody its student"),
    (MATHS, ["generation.student_attempt_prompt_path=null"], "set it, for example to prompt_templates/student_attempt"),
    (MATHS, ["pedagogical_reward_vllm.max_length=4096"], "reward_vllm.max_length is 4096; .* = 8192 tokens"),
    (MATHS, ["pedagogical_reward_vllm.top_p=0"], "pedagogical_reward_vllm.top_p is 0"),
    (MATHS, ["reward_model.model_name_or_path=None"], "measured by the student's solutions"),
    (MATHS, ["reward_model.vllm.max_num_seqs=0"], r"reward_model\.vllm\.max_num_seqs is 0"),
    (FORKS, ["server_url=http://127.0.0.1:8005"], "forks is 64, but .*continue a conversation from the middle"),
    (FORKS, [f"+tutors=[{TUTOR}]"], "forks is 64, but .*tutors names several"),
    (FORKS, ["samplings=[greedy]"], "forks is 64, but .*the messages come from the sampling sampled"),
    (FORKS, ["supervisor_model=null"], "forks is 64, but .*there is no supervisor to price messages"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSED)
def test_a_configuration_that_cannot_be_measured_is_refused(name: str, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        loaded("eval", f"--config-name={name}", *overrides)


def test_a_maths_tutor_on_a_server_is_measured_with_the_solutions_that_were_kept():
    overrides = ["server_url=http://127.0.0.1:8005", "recompute_initial_attempts=false"]
    assert loaded("eval", "--config-name=maths", *overrides).server_url


@pytest.mark.parametrize("overrides", [SUPERVISED, ("samplings=[greedy,supervised]",)])
def test_a_supervisor_is_the_configurations_or_the_servers(overrides: Sequence[str]):
    config = loaded("eval", *overrides)
    assert (config.supervisor_model is None) == (config.server_url is not None)


def test_the_quickstarts_evaluation_has_the_classroom_of_its_training():
    measured, trained = loaded("eval"), loaded("train_rl")
    assert measured.generation == trained.generation
    for role in ("teacher_model", "student_model", "judge_model"):
        assert getattr(measured, role).vllm == getattr(trained, role).vllm, role
    assert measured.judge_model == trained.judge_model
    assert measured.server_url == f"http://{trained.generation.server_host}:{trained.generation.server_port}"


# From a configuration to a run folder ------------------------------------------------------------------------------


def test_an_evaluation_leaves_its_numbers_and_its_conversations(config: EvalConfig, server: ScriptedServer, capsys):
    metrics = evaluate(config)
    folder = Path(config.logging.save_dir)
    assert metrics == json.loads((folder / "metrics.json").read_text())
    assert metrics["tutor"] == "tutor" and metrics["policy"] == {"run_id": "abc", "version": 3}
    assert metrics["engine"] == {"name": "vllm", "version": "0.32.0"} and metrics["problems"] == 20
    records = read_records(folder / "conversations.parquet")
    assert {name: len(played) for name, played in records.items()} == {"sampled": 40, "greedy": 40}
    assert [record.problem_id for record in records["sampled"]] == [record.problem_id for record in records["greedy"]]
    assert metrics["sampled"]["reward"]["n"] == 40 and metrics["sampled"]["reward"]["mean"] > 0.9
    assert metrics["greedy"]["error_turns"]["scaffolded"] == 1.0
    assert (folder / "config" / "eval.yaml").is_file()
    printed = capsys.readouterr().out
    assert measurement_table(metrics) in printed and "Reward" in printed and "n=40" in printed


def test_every_tutor_gets_the_same_conversations_but_no_evaluation_gets_anothers_answers(
    config: EvalConfig, server: ScriptedServer
):
    evaluate(config)
    first = sorted(server.requests, key=lambda request: request.request_id.split("-v3-")[1])
    server.requests.clear()
    evaluate(config)
    second = sorted(server.requests, key=lambda request: request.request_id.split("-v3-")[1])
    assert not {request.request_id for request in first} & {request.request_id for request in second}
    nameless = [[request.model_dump(exclude={"request_id"}) for request in requests] for requests in (first, second)]
    assert nameless[0] == nameless[1]
    assert all(request.fixed_seeds and request.run_id is None and request.seed == config.seed for request in first)
    assert sum(len(request.problems) for request in first if request.greedy) == 40
    for request in first:  # a group is in one request, because places in the request seed its conversations
        assert all(request.problems.count(problem) == 2 for problem in request.problems)


@pytest.mark.parametrize("measure", [evaluate, compare_tutors])
def test_problems_without_a_post_test_are_refused_before_a_model_is_loaded(tmp_path: Path, measure) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"problem": "What is 2 + 2?", "answer": "4"}))
    config = EvalConfig()
    config.dataset.eval_datasets = [DatasetSource(str(path))]
    config.logging.save_dir = str(tmp_path / "run")
    config.generation.post_test.enable = True
    with pytest.raises(DataError, match="has no sibling problems: name the dataset's column"):
        measure(config)
    assert not (tmp_path / "run").exists()


def test_figures_go_to_weights_and_biases_if_configured(config: EvalConfig, monkeypatch):
    logged, begun = {}, {}

    class Run:
        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            begun["ended"] = True

        def log(self, values: dict) -> None:
            logged.update(values)

    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_ENTITY", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores them afterwards
    monkeypatch.setattr("wandb.init", lambda **options: begun.update(options) or Run())
    config.samplings = ["greedy"]
    evaluate(config)
    assert not begun
    config.logging.wandb, config.logging.wandb_run_name, config.logging.wandb_project = True, "mine", "eval"
    metrics = evaluate(config)
    assert "sampled" not in metrics and "sampled" not in measurement_table(metrics)
    assert begun["name"] == "mine" and begun["config"]["seed"] == 42 and begun["ended"]
    assert logged["greedy/reward/mean"] == metrics["greedy"]["reward"]["mean"]
    assert os.environ["WANDB_PROJECT"] == "eval"
