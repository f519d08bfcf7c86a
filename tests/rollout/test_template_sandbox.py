"""What a template may do: whatever goes wrong in one is said with its file and line, and nothing hangs."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.errors import DataError
from classroom_rl.rollout.prompts import render

SIXTY_TIMES = "{% set it = namespace(x='ab') %}{% for i in range(60) %}"

MISTAKES = {
    "{{ problem + 1 }}": "TypeError: can only concatenate str",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{% for x in 5 %}{% endfor %}": "TypeError: 'int' object is not iterable",
    "{{ problem() }}": "TypeError: 'str' object is not callable",
    "{{ problem | wordwrap(0) }}": "ValueError: invalid width",
    "{{ '{nosuch}'.format() }}": "KeyError: 'nosuch'",
    "{{ 'x'.encode().decode('nosuch') }}": "LookupError: unknown encoding",
    "{{ problem.nosuch }}": "has no attribute 'nosuch'",
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
    rendered = render(template(text), problem="p", conversation=LESSON)
    assert rendered == "1/1 TEACHER: Hi.32 p,  1.00 p: 2,000,000 ---\n9999 [1, 2, 3] 3000000"


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
