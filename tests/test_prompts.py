"""Prompt templates: what is missing is an error that names the template, and never an empty string."""

import json
from pathlib import Path

import pytest

from src.errors import DataError
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
