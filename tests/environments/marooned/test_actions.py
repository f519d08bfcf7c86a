"""The grammar: every action can be written and read; the parser refuses what the formatter could not have written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.environments.marooned.actions import (
    ACTIONS,
    LONGEST_TEXT,
    WORDS,
    Action,
    ActionError,
    format_action,
    parse_action,
)
from classroom_rl.environments.marooned.messages import (
    INVALID,
    REPAIRABLE,
    VALID,
    format_message,
    parse_message,
    read_action,
    repair,
)

SAID = st.text(min_size=1).filter(lambda text: any(letter.isprintable() and letter != " " for letter in text))
ARGUMENTS = {
    **{kind: st.sampled_from(words) for kind, words in WORDS.items()},
    **{"number": st.integers(1, 99), "sailor": st.integers(1, 9), "text": SAID},
}


@st.composite
def actions(draw: st.DrawFn) -> Action:
    form = draw(st.sampled_from(list(ACTIONS.values())))
    return Action(form.name, tuple(draw(ARGUMENTS[kind]) for kind in form.types))


@given(actions())
def test_parsing_undoes_formatting(action):
    assert parse_action(format_action(action)) == action
    assert repair(format_action(action)) == action
    assert "\n" not in format_action(action) and len(format_action(action)) <= LONGEST_TEXT + 20


@given(actions(), st.text())
def test_a_formatted_message_is_valid(action, reasoning):
    message = parse_message(format_message(reasoning, action))
    assert (message.grade, message.action) == (VALID, action)


@given(st.one_of(st.text(), st.builds(lambda a, b, c: a + format_action(b) + c, st.text(), actions(), st.text())))
def test_the_parser_accepts_only_what_the_formatter_writes(text):
    try:
        action = parse_action(text)
    except ActionError:
        return
    assert format_action(action) == text


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *[("DANCE", ()), ("MOVE", ()), ("MOVE", ("UPWARDS",)), ("GATHER", ("WOOD", 0)), ("GATHER", ("WOOD", "3"))],
        *[
            ("GATHER", ("WOOD", True)),
            ("EAT", ("WOOD",)),
            ("VOTE", (10,)),
            ("SPEAK", ("\n",)),
        ],
    ],
)
def test_an_action_that_nobody_can_write_cannot_be_made(name, args):
    with pytest.raises(ActionError):
        Action(name, args)


def test_spoken_text_is_one_line_of_limited_length():
    assert Action("SPEAK", ("One\nACTION:  two\t",)).args == ("One ACTION: two",)
    assert len(Action("SPEAK", ("a" * 999,)).args[0]) == LONGEST_TEXT


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *[
            ("move north", "MOVE NORTH"),
            ("MOVE NORTH.", "MOVE NORTH"),
            ("GO NORTH", "MOVE NORTH"),
            ("North", "MOVE NORTH"),
        ],
        *[("I will move north.", "MOVE NORTH"), ("I'll walk to the east!", "MOVE EAST"), ('"WAIT"', "WAIT")],
        *[
            ("GATHER WOOD001", "GATHER WOOD 1"),
            ("GATHER  3  WOOD", "GATHER WOOD 3"),
            ("collect 2 berries", "GATHER BERRY 2"),
        ],
        *[("GATHER FIBER_012", "GATHER FIBRE 1"), ("Build the hull", "BUILD HULL"), ("EAT AN APPLE.", "EAT APPLE")],
        *[
            ("deposit 3 wood to the store", "DEPOSIT WOOD 3"),
            ("vote for sailor 3", "VOTE 3"),
            ("TAKE 2", "TAKE FROM 2"),
        ],
        *[("offer apple to sailor 2.", "OFFER APPLE TO 2"), ("say: I have wood.", "SPEAK I have wood.")],
        *[("whisper to 2: Trust me.", "WHISPER TO 2 Trust me."), ("go up the stairs", "UP"), ("`DOWN`", "DOWN")],
    ],
)
def test_small_slips_are_mended(text, meant):
    assert format_action(repair(text)) == meant
    message = parse_message(f"REASONING: because\nACTION: {text}")
    assert (message.grade, message.action) == (REPAIRABLE, parse_action(meant))


@pytest.mark.parametrize(
    "text", ["", "fly", "MOVE", "MOVE NORTH SOUTH", "GATHER", "GATHER GOLD 3", "BUILD", "VOTE 12", "3"]
)
def test_what_is_not_clear_is_not_mended(text):
    assert repair(text) is None
    assert parse_message(f"REASONING: because\nACTION: {text}").grade == INVALID


def test_the_grades_of_a_message():
    assert parse_message("REASONING: wood\nACTION: WAIT").grade == VALID
    assert parse_message("REASONING: wood,\nand more\nACTION: WAIT").grade == VALID
    for text in ("reasoning: a\naction: WAIT", "ACTION: WAIT", "REASONING: a\nACTION: WAIT\n", "**ACTION:** WAIT"):
        assert parse_message(text).grade == REPAIRABLE, text
    for text in ("WAIT", "", "REASONING: a", "REASONING: a\nACTION: WAIT\nACTION: UP", "ACTION: WAIT\nThen more."):
        assert parse_message(text).grade == INVALID, text


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("REASONING: so\nACTION: MOVE NORTH", "MOVE NORTH"),
        ("ACTION: go north.", "MOVE NORTH"),
        ("MOVE NORTH", "MOVE NORTH"),
        ("I will go north.", "MOVE NORTH"),
        ("REASONING: MOVE NORTH", None),
        ("ACTION: WAIT\nACTION: WAIT", None),
        ("glub", None),
        ("", None),
    ],
)
def test_an_action_can_stand_alone_where_other_tools_write_it(text, read):
    action = read_action(text)
    assert (None if action is None else format_action(action)) == read


@pytest.mark.parametrize("form", ACTIONS.values(), ids=ACTIONS)
def test_every_action_of_the_table_can_be_parsed(form):
    assert format_action(parse_action(form.example)) == form.example
