"""The actions of a sailor: one table, and the exact grammar that is derived from it.

`MOVE` counts as four of the 24 actions, one for each direction; with `WAIT` there are 25 commands.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from classroom_rl.environments.marooned.rules import DIRECTIONS, FOODS, PARTS, THINGS, TRAITOR
from classroom_rl.errors import DataError

LONGEST_TEXT = 200
"""The most characters of a spoken text; the rest is cut off."""
SAMPLE_TEXT = "Hello."
"""The spoken text where actions are listed or drawn at random."""


class ActionError(DataError, ValueError):
    """A text that is not an action of the grammar, or an action with invalid arguments."""


WORDS: dict[str, tuple[str, ...]] = {
    "direction": tuple(DIRECTIONS),
    "thing": THINGS,
    "part": PARTS,
    "food": FOODS,
    "sailor": tuple("123456789"),
}
"""The possible words of each argument type. In addition, a `number` is 1 to 99, and a `text` is one line."""
NUMBERS = {"sailor", "number"}


@dataclass(frozen=True)
class Form:
    """A row of the table of actions.

    Attributes:
        syntax: how the action is written, with the types of its arguments in braces.
        example: an example of it.
        meaning: what the action does.
        note: what prompts add to the example.
        role: the only role that can do it; None if all can.
    """

    syntax: str
    example: str
    meaning: str
    note: str = ""
    role: str | None = None

    @cached_property
    def name(self) -> str:
        """The name of the action, the first word of its syntax."""
        return self.syntax.split()[0]

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The types of the arguments, in order."""
        return tuple(re.findall(r"{(\w+)}", self.syntax))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """A pattern that matches the action, with a group for each argument."""
        pattern = self.syntax
        for kind in self.types:
            words = {"number": "[1-9][0-9]?", "text": ".+"}.get(kind) or "|".join(WORDS[kind])
            pattern = pattern.replace("{" + kind + "}", f"({words})", 1)
        return re.compile(pattern)


_TABLE = (
    Form("MOVE {direction}", "MOVE NORTH", "Take one step.", "or SOUTH, EAST, WEST"),
    Form("UP", "UP", "Climb the stairs."),
    Form("DOWN", "DOWN", "Go down the stairs."),
    Form("GATHER {thing} {number}", "GATHER WOOD 3", "Pick up what lies here."),
    Form("DEPOSIT {thing} {number}", "DEPOSIT WOOD 3", "Bring pieces from the pack to the store, at the base.", "base"),
    Form("WITHDRAW {thing} {number}", "WITHDRAW APPLE 1", "Take pieces from the store, at the base.", "base"),
    Form("BUILD {part}", "BUILD HULL", "Build with others in the same turn, at the base.", "base"),
    Form("EAT {food}", "EAT APPLE", "Eat from the pack."),
    Form("OFFER {food} TO {sailor}", "OFFER APPLE TO 2", "Offer food to a sailor near by.", "near"),
    Form("TAKE FROM {sailor}", "TAKE FROM 2", "Eat what a sailor offers.", "near"),
    Form("REFUSE FROM {sailor}", "REFUSE FROM 2", "Give back what a sailor offers."),
    Form(
        "POISON {food} TO {sailor}", "POISON APPLE TO 2", "Offer food with a tablet in it.", "near; a TABLET", TRAITOR
    ),
    Form("ANTIDOTE TO {sailor}", "ANTIDOTE TO 2", "Cure a sailor near by, or oneself.", "near"),
    Form("SHOW TO {sailor}", "SHOW TO 2", "Show the pack to a sailor in sight.", "your pack"),
    Form("SEARCH {sailor}", "SEARCH 2", "Look into the pack of a sailor near by.", "near"),
    Form("SABOTAGE {part}", "SABOTAGE HULL", "Undo some of what was built, at the base.", "base", TRAITOR),
    Form("HIDE {thing}", "HIDE TABLET", "Hide a piece of the pack from searches.", role=TRAITOR),
    Form("FRAME {sailor}", "FRAME 2", "Leave a false trace, once.", "once", TRAITOR),
    Form("SPEAK {text}", "SPEAK Hello.", "Say something to all."),
    Form("WHISPER TO {sailor} {text}", "WHISPER TO 2 Hello.", "Say something that only one sailor hears."),
    Form("VOTE {sailor}", "VOTE 2", "Vote to remove a sailor."),
    Form("WAIT", "WAIT", "Do nothing."),
)
ACTIONS: dict[str, Form] = {form.name: form for form in _TABLE}
"""The table of all actions, by name."""


def _one_line(text: str) -> str:
    """A text as one line: no control characters, single spaces, at most `LONGEST_TEXT` characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line[:LONGEST_TEXT].rstrip()


_ALLOWED: dict[str, Callable[[object], bool]] = {
    **{kind: set(words).__contains__ for kind, words in WORDS.items() if kind not in NUMBERS},
    "number": lambda value: type(value) is int and 1 <= value <= 99,
    "sailor": lambda value: type(value) is int and 1 <= value <= 9,
    "text": lambda value: isinstance(value, str) and bool(value),
}


@dataclass(frozen=True)
class Action:
    """One action: a name of `ACTIONS` and its arguments. Sailors and numbers are integers; a text becomes one line.

    Raises:
        ActionError: if the name or an argument is not in the grammar.
    """

    name: str
    args: tuple[str | int, ...] = field(default=())

    def __post_init__(self) -> None:
        form = ACTIONS.get(self.name)
        if form is None:
            raise ActionError(f"no action is called {self.name!r}; there are {', '.join(ACTIONS)}")
        if form.types and form.types[-1] == "text" and self.args and isinstance(self.args[-1], str):
            object.__setattr__(self, "args", (*self.args[:-1], _one_line(self.args[-1])))
        is_valid = len(self.args) == len(form.types) and all(
            _ALLOWED[kind](value) for kind, value in zip(form.types, self.args, strict=True)
        )
        if not is_valid:
            raise ActionError(f"{self.name} is written as {form.syntax!r}; it cannot have the arguments {self.args!r}")

    def __str__(self) -> str:
        return format_action(self)


WAIT = Action("WAIT")


@lru_cache(maxsize=4096)
def action_of(name: str, *args: str | int) -> Action:
    """`Action(name, args)`, cached: faster for long lists of actions.

    Raises:
        ActionError: if the name or an argument is not in the grammar.
    """
    return Action(name, args)


def format_action(action: Action) -> str:
    """The action in the exact grammar, such as `GATHER WOOD 3`."""
    form = ACTIONS[action.name]
    return form.syntax.format_map(dict(zip(form.types, action.args, strict=True))) if form.types else form.syntax


def parse_action(text: str) -> Action:
    """Parse a text in the exact grammar.

    Raises:
        ActionError: for any text that `format_action` would not write.
    """
    form = ACTIONS.get(text.partition(" ")[0])
    match = form.pattern.fullmatch(text) if form else None
    if form is None or match is None:
        hint = f"it is written as {form.syntax!r}" if form else f"actions are {', '.join(ACTIONS)}"
        raise ActionError(f"{text[:80]!r} is no action; {hint}")
    values = (int(word) if kind in NUMBERS else word for kind, word in zip(form.types, match.groups(), strict=True))
    parsed = Action(form.name, tuple(values))
    if format_action(parsed) != text:  # for example, a spoken text with double spaces
        raise ActionError(f"{text[:80]!r} is not written as {format_action(parsed)!r}")
    return parsed
