"""Prompt templates: a missing variable is an error that names the template, never an empty string."""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import GenerationConfig, JudgeModelConfig
from classroom_rl.config.checks import check_environment
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.prompt_check import check_group_prompts, check_lengths, check_prompts
from classroom_rl.errors import DataError
from classroom_rl.judges.model_judge import render_rule
from classroom_rl.launch.cli import main as launcher
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render, variables_of
from tests.support.scripted_engine import ScriptedJudge


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
    with pytest.raises(DataError, match=r"teacher\.txt, line 1: a value that it writes out is null"):
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


SIXTY_TIMES = "{% set it = namespace(x='ab') %}{% for i in range(60) %}"
MISTAKES = {
    "{{ problem + 1 }}": "TypeError: can only concatenate str",
    "{{ 1 + problem }}": "TypeError: unsupported operand",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ 1 % 0 }}": "ZeroDivisionError",
    "{% for x in 5 %}{% endfor %}": "TypeError: 'int' object is not iterable",
    "{% for a, b in [1] %}{% endfor %}": "TypeError: cannot unpack",
    "{{ problem() }}": "TypeError: 'str' object is not callable",
    "{{ problem < 5 }}": "TypeError: '<' not supported",
    "{{ problem.upper(1) }}": "TypeError",
    "{{ problem | sum }}": "TypeError",
    "{{ problem | wordwrap(0) }}": "ValueError: invalid width",
    "{{ '%d' % problem }}": "TypeError",
    "{{ '{nosuch}'.format() }}": "KeyError: 'nosuch'",
    "{{ 'x'.encode().decode('nosuch') }}": "LookupError: unknown encoding",
    "{{ problem | dictsort }}": "AttributeError",
    "{{ problem.nosuch }}": "has no attribute 'nosuch'",
    "{{ none }}": "a value that it writes out is null",
    "{{ problem | nosuch }}": "No filter named 'nosuch'",
    "{{ problem is nosuch }}": "No test named 'nosuch'",
    "{{ [1, 2] | random }}": "No filter named 'random'",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{% include 'other.txt' %}": "include takes in another file",
    "{% extends 'other.txt' %}": "extends takes in another file",
    "{% import 'other.txt' as other %}": "import takes in another file",
    "{% from 'other.txt' import it %}": "import takes in another file",
    "{{ conversation.append(1) }}": "the sandbox of prompt templates forbids it",
    "{{ ''.__class__.__mro__ }}": "the sandbox of prompt templates forbids it",
    "{{ '{0.__class__}'.format(problem) }}": "the sandbox of prompt templates forbids it",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "goes into itself without an end",
    "{% block a %}{{ self.a() }}{% endblock %}": "goes into itself without an end",
    "{% for c in conversation recursive %}{{ loop(conversation) }}{% endfor %}": "goes into itself without an end",
    "{% for i in range(10**9) %}x{% endfor %}": "asks for 1000000000 of something",
    "{% for i in range(100001) %}x{% endfor %}": "OverflowError: Range too big",
    "{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}": "takes more than 100000 steps",
    "{% for i in range(60) %}{% for j in range(9999) | map('string') %}{% endfor %}{% endfor %}": "100000 steps",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": "100000 steps",
    "{{ 'x' * 10**10 }}": "makes a text or a list of more than 1000000",
    "{{ [1] * 10**10 }}": "makes a text or a list of more than 1000000",
    "{{ 10**(10**10) }}": "makes a number of about",
    "{{ '%1000000000d' % 1 }}": "has a width of six digits",
    "{{ '%*d' % (1000000000, 1) }}": "or one that is an argument",
    "{{ '%1000000000d' | format(1) }}": "has a width of six digits",
    "{{ '{:1000000000}'.format(1) }}": "has a width of six digits",
    "{{ '%.1000000000f' % 1 }}": "has a width of six digits",
    "{{ '%(a)1000000000d' % {'a': 1} }}": "has a width of six digits",
    "{{ '{:{}}'.format(1, 1000000000) }}": "or one that is an argument",
    "{{ problem.center(10**9) }}": "asks for 1000000000 of something",
    "{{ problem | indent(10**9) }}": "asks for 1000000000 of something",
    "{% for i in range(99) %}{{ problem * 20000 }}{% endfor %}": "writes more than 1000000 characters",
    SIXTY_TIMES + "{% set it.x = it.x ~ it.x %}{% endfor %}": "makes a text or a list of more than 1000000",
    SIXTY_TIMES + "{% set it.x = it.x + it.x %}{% endfor %}": "makes a text or a list of more than 1000000",
    SIXTY_TIMES + "{% set it.x = [it.x, it.x] | join %}{% endfor %}": "makes a text or a list of more than 1000000",
    SIXTY_TIMES + "{% set it.x %}{{ it.x }}{{ it.x }}{% endset %}{% endfor %}": "writes more than 1000000 characters",
    "{% for i in range(9999) %}" + "x" * 2000 + "{% endfor %}": "writes more than 1000000 characters",
    "{% if %}": "Expected an expression",
    "{{ x": "unexpected end of template",
}
UNPLACED = {
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "nests too deep",
    "{% for a in [1] %}" * 25 + "{% endfor %}" * 25: "nest its loops and conditions less deep",
    "{% if 1 %}" * 120 + "{% endif %}" * 120: "nest its loops and conditions less deep",
    "{{ " + "9" * 5000 + " }}": "ValueError: Exceeds the limit",
    "x" * 4_000_001: "larger than 4000000 bytes",
}
LESSON = [{"role": "teacher", "content": "Hi."}]


@pytest.mark.parametrize("text", [*MISTAKES, *UNPLACED], ids=lambda text: text[:40])
def test_whatever_goes_wrong_in_a_template_is_said_with_file_and_line(template, text):
    with pytest.raises(DataError) as caught:
        render(template(f"One line,\ntwo lines.\n{text}"), problem="pp", conversation=LESSON)
    for part in ("teacher.txt", *(["line 3", MISTAKES[text]] if text in MISTAKES else [UNPLACED[text]])):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ('{{ "**%s**" | format(problem) }}', "**pp**"),
        ('{{ "**%s** 100 %% of 1234567" % problem }}', "**pp** 100 % of 1234567"),
        ('{{ "{\\"a\\": {\\"b\\": %s}}" % problem }}', '{"a": {"b": pp}}'),
        ('{{ "**{:>4}** of 1234567".format(problem) }}', "**  pp** of 1234567"),
        ('{{ "{{{}: {}}}".format(problem, 1) }}', "{pp: 1}"),
    ],
)
def test_bold_text_and_json_are_no_widths_of_a_format(template, text, prompt):
    assert render(template(text), problem="pp", conversation=LESSON) == prompt


def test_a_template_without_a_mistake_is_not_held_up(template):
    text = """
{% macro named(who) %}{{ who | upper }}{% endmacro %}
{% for c in conversation %}{{ loop.index }}/{{ loop.length }} {{ named(c.role) ~ ": " ~ c.content }}{% endfor %}
{{ 2 ** 3 * 4 }} {{ "%s, %5.2f" % (problem, 1) }} {{ "{}: {:,}".format(problem, 2000000) }} {{ "-" * 3 }}
{{ range(9999) | list | length }} {{ [1, 2] + [3] }} {{ 3000000 | int }}"""
    shown = render(template(text), problem="p", conversation=LESSON)
    assert shown == "1/1 TEACHER: Hi.32 p,  1.00 p: 2,000,000 ---\n9999 [1, 2, 3] 3000000"


@pytest.mark.parametrize("path", ["x" * 300 + ".txt", "a\0b.txt", "."], ids=["long", "null byte", "folder"])
def test_a_path_that_is_none_is_a_message(path):
    with pytest.raises(DataError, match="prompt template"):
        render(path)


NAMES = ["problem", "conversation", "nosuch", "c", "i", "it", "it.x", "loop", "none", "[1, 'a']", "'a%s{}'", "7", "-1"]
VALUES = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from("+ - * / % ** ~ < in and".split()), inner)
        | st.builds(
            "{}|{}".format, inner, st.sampled_from(["list", "join", "upper", "length", "first", "sum", "tojson"])
        )
        | st.builds("{}({})".format, st.sampled_from(["f", "range", "dict", "'ab'.center", "loop"]), inner)
        | st.builds("{}[{}]".format, inner, inner)
    ),
    max_leaves=5,
)
TEMPLATES = st.recursive(
    st.builds("{{{{ {} }}}}".format, VALUES)
    | st.sampled_from(["text", "{% set it = namespace(x='ab') %}", "{%", "}}"]),
    lambda inner: (
        st.builds(lambda value, body: "{% for c in " + value + " %}" + body + "{% endfor %}", VALUES, inner)
        | st.builds(lambda value, body: "{% if " + value + " %}" + body + "{% endif %}", VALUES, inner)
        | st.builds(lambda body: "{% macro f(i) %}" + body + "{% endmacro %}{{ f(2) }}", inner)
        | st.builds(lambda value: "{% set it.x = " + value + " %}", VALUES)
        | st.builds(str.__add__, inner, inner)
    ),
    max_leaves=6,
)


@given(TEMPLATES)
def test_every_template_is_filled_in_or_refused_with_its_file(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.txt"
        path.write_text(text, encoding="utf-8")
        try:
            assert isinstance(render(str(path), problem="p", conversation=LESSON), str)
        except DataError as error:
            assert "any.txt" in str(error)


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
        "conversation": (said := [{"role": "teacher", "content": "Hi."}, {"role": "student", "content": "Hello."}]),
        "conversations": [said, said],
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
    }
    if path.name in ("lesson_plan.txt", "lesson.txt"):
        given = json.loads((ROOT / "data/lesson_plans/train.jsonl").read_text(encoding="utf-8").splitlines()[0])
        assert given["lesson_aim"].removeprefix("The learner can ") in render(str(path), **given)
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
    "judges_rules_prompts_paths.does_not_leak_answer": "{{ problem }}{{ conversation | join(attribute='content') }}",
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Was the lesson on {{ problem }} a good one?", "never uses conversation"),
        ("{% set conversation = [] %}{{ conversation }}", "never uses conversation"),
        ("{% if conversation %}A lesson of {{ conversation | length }} messages.{% endif %}", "does not get into"),
        ("{{ conversation | map(attribute='role') | join(' ') }}", "does not get into"),
    ],
)
def test_a_judge_that_is_not_shown_the_lesson_is_refused(all_prompts, template, text, message):
    key = "judges_rules_prompts_paths.does_not_leak_answer"
    generation = all_prompts(key, template(text, "blind.txt"))
    with pytest.raises(DataError, match=rf"generation\.{key}: .*blind\.txt.*{message}.*Write the messages out"):
        check_prompts(generation, judge_reads_templates=True)
    check_prompts(generation, judge_reads_templates=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ conversations[0] }}{{ conversations[2] }}", "does not show every one of conversations"),
        ("{{ problem }}", "does not show every one of conversations"),
        ("{{ conversations }}{{ conversation }}", "uses conversation. It may use: conversations, problem"),
    ],
)
def test_a_judge_of_groups_that_is_not_shown_every_lesson_is_refused(tmp_path, template, message):
    (tmp_path / "group.txt").write_text(template)
    with pytest.raises(DataError, match=f"judge_model.group_prompts_paths.pedagogical_eval: .*{message}"):
        check_group_prompts({"pedagogical_eval": str(tmp_path / "group.txt")}, ["pedagogical_eval", "another"])
    check_group_prompts(JudgeModelConfig().group_prompts_paths, ["pedagogical_eval", "another"])


@pytest.mark.parametrize("text", ["{{ conversation[1:] }}", "{{ conversation[-1].content }}", "{{ conversation }}"])
def test_a_judge_may_be_shown_a_part_of_the_lesson(all_prompts, template, text):
    key = "judges_rules_prompts_paths.does_not_leak_answer"
    check_prompts(all_prompts(key, template(text, "part.txt")), judge_reads_templates=True)


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
    ]
    overrides.append("judge_model.model_name_or_path=some/judge")
    message = r"pedagogical_eval: .*rule\.txt, line 2 cannot be filled in: TypeError"
    if program == "launcher":
        assert launcher(["--config-name", "quickstart", *overrides, "dry_run=true"]) == 2
        assert re.search(f"error: generation.judges_rules_prompts_paths.{message}", capsys.readouterr().err)
        return
    schema, folder = (EvalConfig, "eval") if program == "evaluate" else (TrainRLConfig, "train_rl")
    overrides += ["server_url=null"] if program == "evaluate" else []
    with pytest.raises(DataError, match=message):
        importlib.import_module(f"classroom_rl.launch.{program}").more_of_dry_run(load(schema, folder, overrides))


def test_a_program_ends_its_dry_run_with_the_message_alone(template):
    command = [sys.executable, "eval.py", "dry_run=true", "server_url=null"]
    command.append(f"generation.teacher_prompt_path={template('{{ problem / 2 }}')}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"error: generation.teacher_prompt_path: .*teacher\.txt, line 1 cannot be filled in", done.stderr)


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
