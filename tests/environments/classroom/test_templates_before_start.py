"""All configured templates, tried before models are loaded."""

import importlib
import re
from dataclasses import replace

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_environment
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import load
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.prompt_check import check_judge_prompts, check_lengths, check_prompts
from classroom_rl.errors import DataError
from classroom_rl.judges.model_judge import render_rule
from classroom_rl.launch.cli import main as launcher
from classroom_rl.rollout.problem import Problem
from tests.support.scripted_engine import ScriptedJudge

PROMPT_KEYS = {
    "teacher_prompt_path": "{{ student_name or 'you' }} {{ problem }} {{ include_thinking }}",
    "student_personas_prompts_paths.error_student": "{{ student_name or 'you' }} {{ problem }} {{ include_thinking }}",
    "student_final_prompt_path": "{{ student_name or 'you' }} {{ problem }} {{ include_thinking }}",
    "student_initial_attempt_prompt_path": "{{ problem }}",
    "initial_attempt_wrapper_prompt_path": "{{ attempt }}",
    "judges_rules_prompts_paths.does_not_leak_answer": "{{ problem }}{{ conversation | join(attribute='content') }}",
}


@pytest.fixture
def template(tmp_path):
    def write(text: str, name: str = "teacher.txt") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def all_prompts(generation, template):
    """A configuration with a template of its own for every use, which takes all the variables that it may."""

    def configure(changed: str = "", path: str | None = None) -> GenerationConfig:
        for key, text in PROMPT_KEYS.items():
            template_path = path if key == changed else template(text, f"{key}.txt")
            group, _, name = key.partition(".")
            setattr(generation, group, getattr(generation, group) | {name: template_path} if name else template_path)
        generation.judges_rules_prompts_paths.pop("pedagogical_eval", None)
        return generation

    return configure


@pytest.mark.parametrize("key", PROMPT_KEYS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "There is no prompt template"),
        ("{{ studnet }}", r"uses studnet\. It may use: "),
        ("{% if false %}{{ studnet }}{% endif %}", r"uses studnet\. It may use: "),
        ("{% if %}", "does not parse: line 1"),
        ("{{ ''.__class__.__mro__ }}", "cannot be filled in|'__class__'"),
    ],
)
def test_a_wrong_template_is_found_before_a_conversation_meets_it(all_prompts, template, key, text, message):
    wrong = "nowhere.txt" if text is None else template(text, "wrong.txt")
    with pytest.raises(DataError, match=rf"generation\.{key}: .*({message})"):
        check_prompts(all_prompts(key, wrong), judge_reads_templates=True)


def test_what_fails_only_for_a_nameless_student_is_found(all_prompts, template):
    path = template("{{ student_name.upper() }}", "wrong.txt")
    generation = all_prompts("teacher_prompt_path", path)
    generation.student_names = ["Alex"]
    check_prompts(generation, judge_reads_templates=True)
    generation.student_names = ["Alex", None]
    with pytest.raises(DataError, match="teacher_prompt_path"):
        check_prompts(generation, judge_reads_templates=True)


def test_only_a_judge_that_reads_templates_has_to_be_shown_the_lesson(all_prompts, template):
    key = "judges_rules_prompts_paths.does_not_leak_answer"
    generation = all_prompts(key, template("Was the lesson on {{ problem }} a good one?", "blind.txt"))
    with pytest.raises(DataError, match=rf"generation\.{key}: .*blind\.txt never uses conversation"):
        check_prompts(generation, judge_reads_templates=True)
    check_prompts(generation, judge_reads_templates=False)


def test_a_judge_of_groups_has_to_be_shown_every_lesson(template):
    rules = ["pedagogical_eval", "another"]
    judge = JudgeModelConfig(mode="group", group_prompts_paths={"pedagogical_eval": template("{{ conversations[0] }}")})
    with pytest.raises(
        DataError, match="judge_model.group_prompts_paths.pedagogical_eval: .* every one of conversations"
    ):
        check_judge_prompts(judge, rules)
    check_judge_prompts(JudgeModelConfig(mode="group"), rules)


def test_a_teacher_that_is_not_told_the_problem_is_warned_about(all_prompts, template, caplog):
    check_prompts(all_prompts(), judge_reads_templates=True)
    assert not caplog.text
    generation = all_prompts("teacher_prompt_path", template("Teach well.", "vague.txt"))
    check_prompts(generation, judge_reads_templates=True)
    assert "generation.teacher_prompt_path: " in caplog.text and "vague.txt never uses problem" in caplog.text


@pytest.mark.parametrize("name", ["7b", "language_tutor", "maths_small", "quickstart"])
def test_shipped_prompts_pass_without_a_warning(name, caplog):
    config = load(TrainRLConfig, "train_rl", ["--config-name", name])
    check_environment(config)
    socratic = replace(
        config.generation,
        teacher_prompt_path="prompt_templates/teacher_prompt_socratic.txt",
        forced_conversation_type="guided",
    )
    check_environment(replace(config, generation=socratic))
    assert not caplog.text


@pytest.mark.parametrize("program", ["server", "train", "evaluate", "launcher"])
def test_dry_runs_find_a_template_that_fails(program, template, capsys):
    """In a judge's rule, of a judge that reads it."""
    wrong = template("{% for message in conversation %}\n{{ message.content + 1 }}{% endfor %}", "rule.txt")
    overrides = [
        f"generation.judges_rules_prompts_paths={{pedagogical_eval: {wrong}}}",
        "judge_model.base_url=http://x",
        "judge_model.model_name_or_path=some/judge",
    ]
    message = r"pedagogical_eval: .*rule\.txt, line 2 cannot be filled in: TypeError"
    if program == "launcher":
        assert launcher(["--config-name", "quickstart", *overrides, "dry_run=true"]) == 2
        assert re.search(f"error: generation.judges_rules_prompts_paths.{message}", capsys.readouterr().err)
        return
    schema, folder = (EvalConfig, "eval") if program == "evaluate" else (TrainRLConfig, "train_rl")
    overrides += ["server_url=null"] if program == "evaluate" else []
    with pytest.raises(DataError, match=message):
        importlib.import_module(f"classroom_rl.launch.{program}").more_of_dry_run(load(schema, folder, overrides))


def test_the_classroom_gives_templates_the_variables_that_the_check_allows(all_prompts, room):
    generation = all_prompts()
    generation.forced_conversation_type = "attempt"

    def judge(rule: str, conversation: list, _: int) -> str:
        assert render_rule(generation.judges_rules_prompts_paths[rule], conversation, "p")[0]["content"]
        return '{"reasoning": "", "decision": "OK"}'

    room.judge = ScriptedJudge(judge)
    record = room.play(generation)[0]
    assert record.solutions and record.verdicts and record.reward is not None


def test_a_problem_longer_than_the_context_is_found_before_training_and_named(all_prompts, tokenizer):
    problems = [Problem.of("fractions"), Problem.of("Long division, " + "again and " * 300)]
    check_lengths(problems, all_prompts(), tokenizer, limit=2000)
    with pytest.raises(DataError) as caught:
        check_lengths(problems, all_prompts(), tokenizer, limit=200)
    for part in (problems[1].id, "'Long division, again", "but a conversation may have 200", "max_length"):
        assert part in str(caught.value)


def test_rules_of_the_embedded_rubric_are_no_templates(all_prompts):
    check_prompts(all_prompts("judges_rules_prompts_paths.does_not_leak_answer", "rubric"), judge_reads_templates=False)


def test_the_server_looks_at_the_templates_before_any_engine_starts(all_prompts, tmp_path, monkeypatch):
    import classroom_rl.server.open_models

    async def start(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(classroom_rl.server.open_models, "_start_engines", start)
    config = load(TrainRLConfig, "train_rl", [])
    config.generation = all_prompts("teacher_prompt_path", "nowhere.txt")
    opening = classroom_rl.server.open_models.open_roles(config, {}, tmp_path)
    with pytest.raises(DataError, match="There is no prompt template nowhere.txt"):
        opening.send(None)
