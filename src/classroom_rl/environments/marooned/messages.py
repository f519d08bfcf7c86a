"""Parses the messages of players: `REASONING: …` and `ACTION: …`, in the exact grammar or in a form that rules can
repair.
"""

import re
from dataclasses import dataclass

from classroom_rl.environments.marooned.actions import ACTIONS, Action, ActionError, format_action, parse_action
from classroom_rl.environments.marooned.builder import in_sight_for_ship, way_to
from classroom_rl.environments.marooned.observation import Observation
from classroom_rl.environments.marooned.prompts import nearest_text, pieces_text, possible_text, way_text
from classroom_rl.environments.marooned.rules import DIRECTIONS, FOODS, PARTS, THINGS, Place, Rules

VALID = "valid"
REPAIRABLE = "repairable"
INVALID = "invalid"
_EXACT = re.compile(r"REASONING: (\S[^\n]*(?:\n[^\n]+)*)\nACTION: ([^\n]+)")
_LABEL = re.compile(r"^[ \t*_#>-]*(reasoning|action)[ \t*_]*:[ \t*_]*", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Message:
    """A parsed message. `grade` is `valid`, `repairable` or `invalid`. `action` is the action, repaired if necessary;
    None if the message is invalid."""

    reasoning: str
    action_text: str
    grade: str
    action: Action | None = None


def format_message(reasoning: str, action: Action) -> str:
    """A message with this action in the exact form; the reasoning becomes one line."""
    return f"REASONING: {' '.join(reasoning.split()) or '-'}\nACTION: {format_action(action)}"


def parse_message(text: str) -> Message:
    """Parse a message. It is *valid* if it has the exact form, *repairable* if it has one ACTION line and rules can
    repair the rest, and otherwise *invalid*."""
    labels = list(_LABEL.finditer(text))
    actions = [label for label in labels if label[1].upper() == "ACTION"]
    if len(actions) != 1:
        last = text[actions[-1].end() :].partition("\n")[0].strip() if actions else ""
        return Message(_reasoning_of(text, labels), last, INVALID)
    exact = _EXACT.fullmatch(text)
    if exact and len(labels) == 2:
        try:
            return Message(exact[1], exact[2], VALID, parse_action(exact[2]))
        except ActionError:
            pass
    action_text, _, rest = text[actions[0].end() :].strip().partition("\n")
    action = None if rest.strip() else repair(action_text)
    reasoning = _reasoning_of(text, labels)
    return Message(reasoning, action_text.strip(), INVALID if action is None else REPAIRABLE, action)


def read_action(text: str) -> Action | None:
    """The action of a message, repaired if necessary; None if it has none. The text may also be just an action."""
    return parse_message(text).action if _LABEL.search(text) else repair(text)


def _reasoning_of(text: str, labels: list[re.Match[str]]) -> str:
    """The text from the REASONING label, or from the beginning, to the next label."""
    start = next((label.end() for label in labels if label[1].upper() == "REASONING"), 0)
    end = next((label.start() for label in labels if label.start() >= start), len(text))
    return text[start:end].strip()


_OPENINGS = re.compile(
    r"(?:(?:i|we)(?:'ll| will| would| should| must| want to|'d like to| am going to|'m going to)|let me|let's|please"
    r"|now|my action is|action:)\s+",
    re.IGNORECASE,
)
_VERBS = {
    **dict.fromkeys(("GO", "WALK", "STEP", "HEAD", "RUN"), "MOVE"),
    **dict.fromkeys(("PICK", "COLLECT", "PICKUP", "HARVEST"), "GATHER"),
    **dict.fromkeys(("STORE", "DROP"), "DEPOSIT"),
    **dict.fromkeys(("SAY", "TELL"), "SPEAK"),
    **dict.fromkeys(("PASS", "REST"), "WAIT"),
    **{"CLIMB": "UP", "DESCEND": "DOWN", "ACCEPT": "TAKE", "CONSTRUCT": "BUILD"},
}
_SPELLINGS = {"BERRIES": "BERRY", "FIBER": "FIBRE", "FIBERS": "FIBRE"}
_SPELLINGS |= {f"{thing}S": thing for thing in THINGS} | {direction[0]: direction for direction in DIRECTIONS}
_FILLERS = {"THE", "A", "AN", "SOME", "PIECE", "PIECES", "OF", "SAILOR", "PLAYER", "FOR", "PACK", "FOOD", "MY"}
_FILLERS |= {"FROM", "TO", "AT", "ON", "TOWARDS", "BASE", "STORE", "IN", "INTO"}
"""Words that are not arguments. They are dropped; `format_action` puts the grammar's own prepositions back."""
_NUMBERED = re.compile(rf"({'|'.join((*THINGS, *_SPELLINGS))})[_#-]?[0-9]{{2,}}")
"""A thing with a number, such as WOOD001. Pieces have no numbers, so it stands for one piece."""
_COUNTED = {"GATHER", "DEPOSIT", "WITHDRAW"}
"""Actions with a number of pieces; without one, it is 1."""


def repair(text: str) -> Action | None:
    """The action that rules can read from a text such as `I will go north.`; None if it is not clear."""
    line = re.sub(r"\s+", " ", text).strip(" \"'`*“”‘’")
    while (opening := _OPENINGS.match(line)) is not None:
        line = line[opening.end() :]
    try:
        return parse_action(line)
    except ActionError:
        pass
    verb, _, rest = line.partition(" ")
    verb = verb.upper().rstrip(":.!,")
    verb = _VERBS.get(verb, verb)
    try:
        if verb == "SPEAK":
            return Action("SPEAK", (_spoken(re.sub(r"(?i)^to (all|everyone|everybody)\b", "", rest)),))
        if verb == "WHISPER":
            match = re.fullmatch(r"(?i)(?:to )?(?:sailor )?([1-9])\s*[:,]?\s+(.+)", rest)
            return Action("WHISPER", (int(match[1]), _spoken(match[2]))) if match else None
        return _action_from_words(verb, rest)
    except ActionError:
        return None


def _spoken(text: str) -> str:
    return text.strip(" :\"'“”")


def _action_from_words(verb: str, rest: str) -> Action | None:
    """An action without free text, from its verb and the words after it, in any order.

    Raises:
        ActionError: if the words are not the action's arguments.
    """
    words = [_NUMBERED.sub(r"\1", word) for word in re.findall(r"[A-Z0-9_#-]+", rest.upper())]
    words = [_SPELLINGS.get(word, word) for word in words]
    if verb in DIRECTIONS or _SPELLINGS.get(verb) in DIRECTIONS:
        verb, words = "MOVE", [_SPELLINGS.get(verb, verb), *words]
    if verb in ("MOVE", "GATHER") and words and words[0] in ("UP", "DOWN"):
        verb, words = (words[0] if verb == "MOVE" else verb), words[1:]
    if verb in ("UP", "DOWN"):
        words = [word for word in words if word not in ("STAIRS", verb)]
    form = ACTIONS.get(verb)
    if form is None:
        return None
    if verb == "OFFER" and "TABLET" in words:
        return None
    words = [word for word in words if word not in _FILLERS]
    things = [word for word in words if word in DIRECTIONS or word in THINGS or word in PARTS]
    numbers = [int(word) for word in words if re.fullmatch("[0-9]{1,2}", word)]
    if len(things) + len(numbers) != len(words):
        return None
    if verb in _COUNTED and not numbers:
        numbers = [1]
    if verb == "EAT" and numbers == [1]:
        numbers = []
    return Action(verb, (*things, *numbers))


KNOWN_WORDS = frozenset((*ACTIONS, *_VERBS, *DIRECTIONS, *THINGS, *PARTS, *FOODS, "REASONING", "ACTION"))
"""A text with one of these words counts as an attempt at an action."""


def reasoning(view: Observation, rules: Rules, action: Action) -> str:
    """What a sailor has, sees and can do, and why it does an action. This precedes the action, because a small model
    acts on what it has just written."""
    situation = f"I hold {pieces_text(view.pack)}; near is {nearest_text(view, rules)}"
    return f"{situation}; possible is {possible_text(view, rules)}; {_why(view, rules, action)}"


def _why(view: Observation, rules: Rules, action: Action) -> str:
    if action.name != "MOVE":
        meaning = ACTIONS[action.name].meaning
        return meaning[0].lower() + meaning[1:]
    gathers = view.load < rules.pack and view.turn < rules.last_turn("GATHER")
    for rank, (place, kind) in enumerate(in_sight_for_ship(view, rules) if gathers else ()):
        # The nearest pile was just named ("near is …"), so it is not named again.
        if _leads(view, rules, place, action):
            return f"I go for {kind} {way_text(rules, view.place, place)}." if rank else "I go there."
    if _leads(view, rules, rules.base, action):
        return f"I go to the base {way_text(rules, view.place, rules.base)}."
    return f"I look around {action.args[0]}."


def _leads(view: Observation, rules: Rules, target: Place, step: Action) -> bool:
    """Whether a step is the first one on the way to a target."""
    way = way_to(rules, view.place, target)
    return way is not None and way[1] == step
