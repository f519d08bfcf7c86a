"""Prompt templates: what is missing is an error that names the template, and never an empty string."""

import json
from pathlib import Path

import pytest

from config.base import GenerationConfig
from config.load import load
from config.train_rl_model import TrainRLConfig
from src.data import Problem
from src.errors import DataError
from src.inference_providers.open_router_inference import render_rule
from src.inference_providers.scripted_inference import ScriptedJudge
from src.prompt_check import check_lengths, check_prompts
from src.prompts import render, variables_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def template(tmp_path):
    def write(text: str, name: str = "teacher.txt") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_a_template_is_filled_in_and_stripped(template):
    path = template("\n{% if student_name %}\nHello {{ student_name }}!\n{% endif %}\n{{ problem }}\n\n")
    assert render(path, student_name="Zoë", problem="2 + 2") == "Hello Zoë!\n2 + 2"
    assert render(path, student_name=None, problem="2 + 2") == "2 + 2"


def test_a_value_is_not_a_template(template):
    assert render(template("{{ problem }}"), problem="{{ 7 * 7 }} {% if %}") == "{{ 7 * 7 }} {% if %}"


@pytest.mark.parametrize(
    "text", ["{{ studnet_name }}", "{% if studnet_name %}x{% endif %}", "{{ problem.studnet_name }}"]
)
def test_an_unknown_variable_is_an_error_that_names_it_the_template_and_what_there_is(template, text):
    with pytest.raises(DataError) as caught:
        render(template(text), student_name="Alex", problem="p")
    for part in ("teacher.txt", "studnet_name", "problem, student_name"):
        assert part in str(caught.value)


def test_null_is_not_written_into_a_prompt(template):
    path = template("Hello {{ student_name }}!")
    with pytest.raises(DataError, match=r"teacher\.txt: a value that it writes out is null"):
        render(path, student_name=None)
    assert render(path, student_name=0) == "Hello 0!"


def test_the_variables_of_a_template_are_those_that_it_has_to_be_given(template):
    path = template("{% set a = b %}{% for c in d if e %}{{ c.f }}{{ a }}{% endfor %}{# g #}")
    assert variables_of(path) == {"b", "d", "e"}


def test_a_missing_template_is_named():
    with pytest.raises(DataError, match="nowhere/teacher.txt"):
        render("nowhere/teacher.txt")


def test_a_template_that_does_not_parse_is_named_with_its_line(template):
    with pytest.raises(DataError, match=r"teacher\.txt does not parse: line 2"):
        render(template("fine\n{% if x %}"), x=1)


def test_a_template_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8"):
        render(str(tmp_path / "latin.txt"))


@pytest.mark.parametrize("text", ["{{ ''.__class__.__mro__ }}", "{{ problem.__class__.__base__.__subclasses__() }}"])
def test_a_template_cannot_reach_out_of_the_sandbox(template, text):
    with pytest.raises(DataError, match="teacher.txt"):
        render(template(text), problem="p")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "prompt_templates").rglob("*.txt")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_shipped_template_can_be_filled_in(path):
    given = {
        "student_name": "Alex",
        "problem": "Lesson: food",
        "include_thinking": False,
        "attempt": "I think 4.",
        "conversation": [{"role": "teacher", "content": "Hi."}, {"role": "student", "content": "Hello."}],
        "user_message": "",
        "teacher_message": "",
    }
    if path.name == "lesson_plan.txt":
        given = json.loads((ROOT / "data/lesson_plans/train.jsonl").read_text(encoding="utf-8").splitlines()[0])
        assert given["lesson_aim"] in render(str(path), **given)
        return
    assert render(str(path), **given)
    assert render(str(path), **given | {"student_name": None, "include_thinking": True})


# All configured templates, tried before models are loaded ---------------------------------------------------------

PROMPT_KEYS = {
    "teacher_prompt_path": "{{ student_name or 'you' }} {{ problem }} {{ include_thinking }}",
    "student_personas_prompts_paths.error_student": "{{ student_name or 'you' }} {{ problem }} {{ include_thinking }}",
    "student_final_prompt_path": "{{ student_name or 'you' }} {{ problem }} {{ include_thinking }}",
    "student_initial_attempt_prompt_path": "{{ problem }}",
    "initial_attempt_wrapper_prompt_path": "{{ attempt }}",
    "judges_rules_prompts_paths.does_not_leak_answer": "{{ problem }}{{ conversation | map(attribute='role') | list }}",
}


@pytest.fixture
def all_prompts(generation, template):
    """A configuration with a template of its own for every use, which takes all the variables that it may."""

    def configure(changed: str = "", path: str | None = None) -> GenerationConfig:
        for key, text in PROMPT_KEYS.items():
            given = path if key == changed else template(text, f"{key}.txt")
            group, _, name = key.partition(".")
            setattr(generation, group, getattr(generation, group) | {name: given} if name else given)
        generation.judges_rules_prompts_paths.pop("pedagogical_eval", None)
        return generation

    return configure


def test_templates_with_all_the_variables_that_they_may_use_pass(all_prompts):
    check_prompts(all_prompts(), judge_reads_templates=True)


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


def test_the_classroom_gives_templates_the_variables_that_the_check_allows(all_prompts, room):
    generation = all_prompts()
    generation.forced_conversation_type = "attempt"
    room.judge = ScriptedJudge(lambda rule, conversation, _: judged(generation, rule, conversation))
    record = room.play(generation)[0]
    assert record.solutions and record.verdicts and record.reward is not None


def judged(generation: GenerationConfig, rule: str, conversation: list) -> str:
    assert render_rule(generation.judges_rules_prompts_paths[rule], conversation, "p")[0]["content"]
    return '{"reasoning": "", "decision": "OK"}'


def test_a_problem_longer_than_the_context_is_found_before_training_and_named(all_prompts, tokenizer):
    problems = [Problem.of("fractions"), Problem.of("Long division, " + "again and " * 300)]
    check_lengths(problems, all_prompts(), tokenizer, limit=2000)
    with pytest.raises(DataError) as caught:
        check_lengths(problems, all_prompts(), tokenizer, limit=200)
    for part in (problems[1].id, "'Long division, again", "but a conversation may have 200", "max_length"):
        assert part in str(caught.value)


def test_rules_of_the_embedded_rubric_are_no_templates(all_prompts):
    check_prompts(all_prompts("judges_rules_prompts_paths.does_not_leak_answer", "rubric"), judge_reads_templates=False)


def test_the_server_looks_at_the_templates_before_any_engine_starts(all_prompts, monkeypatch, tmp_path):
    import src.seats

    async def start(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(src.seats, "_start_engines", start)
    config = load(TrainRLConfig, "train_rl", [])
    generation = all_prompts("teacher_prompt_path", "nowhere.txt")
    models = (config.teacher_model, config.student_model, config.judge_model)
    opening = src.seats.open_seats(*models, generation, 1, tmp_path)
    with pytest.raises(DataError, match="There is no prompt template nowhere.txt"):
        opening.send(None)
