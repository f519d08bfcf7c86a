"""Prompt templates: a missing variable is an error that names the template, never an empty string."""

import json

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.errors import DataError
from classroom_rl.rollout.prompts import GROUP, OF_SUPERVISORS, TRANSCRIPT, check_template, render, variables_of


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
    with pytest.raises(DataError, match=r"teacher\.txt, line 1: a value that it writes out is null"):
        render(path, student_name=None)
    assert render(path, student_name=0) == "Hello 0!"


def test_the_variables_of_a_template_are_those_that_it_has_to_be_given(template):
    path = template("{% set a = b %}{% for c in d if e %}{{ c.f }}{{ a }}{% endfor %}{# g #}")
    assert variables_of(path) == {"b", "d", "e"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nowhere/teacher.txt", None, "nowhere/teacher.txt"),
        ("teacher.txt", b"fine\n{% if x %}", r"teacher\.txt does not parse: line 2"),
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8"),
        ("x" * 300 + ".txt", None, "prompt template"),
        ("a\0b.txt", None, "prompt template"),
        (".", None, "prompt template"),
    ],
    ids=["missing", "wrong", "Latin-1", "long name", "null byte", "folder"],
)
def test_what_is_no_template_is_named(tmp_path, name: str, content: bytes | None, words: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        render(str(tmp_path / name))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "prompt_templates").rglob("*.txt")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_shipped_template_can_be_filled_in(path):
    variables = {
        "student_name": "Alex",
        "problem": "Lesson: food",
        "include_thinking": False,
        "attempt": "I think 4.",
        "conversation": (messages := [{"role": "teacher", "content": "Hi."}, {"role": "student", "content": "Hello."}]),
        "conversations": [messages, messages],
        "user_message": "",
        "teacher_message": "",
        "message": "And now?",
        "answer": "4",
        "known": [{"item": "Bonjour.", "cue": "a greeting"}],
        "unknown": [{"cue": "a goodbye"}],
        "knows": True,
        "history": "Tutor: What is 2 + 2?\nStudent: 5",
        "solution": "2 + 2 = 4",
        "student_solution": "2 + 2 = 5",
        "steps": ["2 + 2 = 5"],
        "reply": "Count again.",
        "use_case": "assessment",
        "prompt": "Grade this.",
        "explanation": "",
        "follow_up": "And this?",
        "examples": [{"lesson": "food", "messages": messages, "reward": 0.5, "verdicts": []}],
        "variables": ["problem"],
        "personas": ["student", "error_student"],
        "refused": [{"text": "Teach.", "reason": "it does not use problem"}],
        "criteria": [{"name": "hints", "question": "Any?", "anchors": [{"score": "0", "text": "no"}]}],
    }
    if path.name in ("lesson_plan.txt", "lesson.txt"):
        plan = json.loads((ROOT / "data/lesson_plans/train.jsonl").read_text(encoding="utf-8").splitlines()[0])
        assert plan["lesson_aim"].removeprefix("The learner can ") in render(str(path), **plan)
        return
    assert render(str(path), **variables)
    assert render(str(path), **variables | {"student_name": None, "include_thinking": True})


# Templates tried before a run ----------------------------------------------------------------------------------------

JUDGE = {"problem": "p", "conversation": TRANSCRIPT}
GROUP_JUDGE = {"problem": "p", "conversations": GROUP}


@pytest.mark.parametrize(
    ("variables", "text", "words"),
    [
        ({"problem": "p"}, "{% if false %}{{ studnet }}{% endif %}", r"uses studnet\. It may use: problem"),
        (JUDGE, "Was the lesson on {{ problem }} a good one?", "never uses conversation.*Write the messages out"),
        (JUDGE, "{% set conversation = [] %}{{ conversation }}", "never uses conversation"),
        (JUDGE, "{% if conversation %}{{ conversation | length }} messages.{% endif %}", "does not get into"),
        (JUDGE, "{{ conversation | map(attribute='role') | join(' ') }}", "does not get into"),
        (GROUP_JUDGE, "{{ conversations[0] }}{{ conversations[2] }}", "does not show every one of conversations"),
        (GROUP_JUDGE, "{{ problem }}", "does not show every one of conversations"),
        (GROUP_JUDGE, "{{ conversations }}{{ conversation }}", "uses conversation. It may use: conversations, problem"),
        (OF_SUPERVISORS, "{{ conversation }}", "never uses message"),
    ],
)
def test_a_template_that_does_not_show_what_is_asked_about_is_refused(template, variables, text, words):
    with pytest.raises(DataError, match=f"some.key: .*teacher.txt.*{words}"):
        check_template("some.key", template(text), variables)


@pytest.mark.parametrize("text", ["{{ conversation[1:] }}", "{{ conversation[-1].content }}", "{{ conversation }}"])
def test_a_judge_may_be_shown_a_part_of_the_lesson(template, text):
    check_template("some.key", template(text), JUDGE)
