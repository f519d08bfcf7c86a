"""Generates the tables of docs/marooned.md from the rules, and replaces the text between their markers.

python -m classroom_rl.environments.marooned.rules_docs docs/marooned.md
"""

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

from classroom_rl.environments.marooned.actions import ACTIONS, LONGEST_TEXT, WORDS, Form
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.observation import observe
from classroom_rl.environments.marooned.players import cast
from classroom_rl.environments.marooned.presets import PRESETS, TINY
from classroom_rl.environments.marooned.prompts import render, system_prompt
from classroom_rl.environments.marooned.review import DEFAULT_PENALTIES, review_action
from classroom_rl.environments.marooned.rewards import REWARDS
from classroom_rl.environments.marooned.rules import COLONIST, THINGS, TRAITOR, RewardTable, Rules
from classroom_rl.errors import DataError

_BLOCK = re.compile(r"(<!-- made by the code: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VOTES = {
    "right_vote": "A vote that removed the traitor.",
    "wrong_vote": "A vote that removed a colonist.",
    "removed": "Being removed, for the traitor.",
}
_TRAITOR_REWARDS = ("sabotage", "poisoning", "removed", "prevented")
_SHARED_REWARDS = ("turn", "failed", "death")
_FUNCTION_OF_REWARD = {"milestones": "milestone"}
_UNITS = {"gather": "per piece", "deposit": "per piece", "progress": "per percent"}


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def of_presets(value: Callable[[Rules], Any]) -> str:
    """A value of the rules: once if it is the same in all presets, otherwise with the name of each preset."""
    values = {name: str(value(rules)) for name, rules in PRESETS.items()}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{name}: {text}" for name, text in values.items())


def pieces(counts: Any) -> str:
    """Pieces by kind, such as `6 WOOD, 2 METAL`."""
    return ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "–"


def actions_block() -> str:
    """The table of all actions, numbered."""
    header = ("no.", "action", "arguments", "example", "what it does", "energy", "who")
    return table(header, (_action_row(number, form) for number, form in enumerate(ACTIONS.values(), start=1)))


def _action_row(number: int, form: Form) -> tuple[Any, ...]:
    arguments = ", ".join(form.types) or "–"
    roles = (COLONIST, TRAITOR) if form.role is None else (form.role,)
    costs = of_presets(lambda rules: " / ".join(dict.fromkeys(f"{rules.cost(role, form.name):g}" for role in roles)))
    who = f"the {form.role}" if form.role else "all"
    return number, form.name, arguments, f"`{form.example}`", form.meaning, costs, who


def arguments_block() -> str:
    """The table of argument types."""
    texts = {kind: ", ".join(words) for kind, words in WORDS.items() if kind != "sailor"}
    texts |= {"sailor": "1 to " + of_presets(lambda rules: rules.sailors), "number": "1 to 99"}
    texts["text"] = f"one line of at most {LONGEST_TEXT} characters"
    return table(("argument", "can be"), texts.items())


def phases_block() -> str:
    """The table of the phases of a day, for each preset."""
    rows = []
    for rules in PRESETS.values():
        first_turn = 1
        for phase in rules.phases:
            closed = ", ".join(name for name in ACTIONS if name in phase.closed)
            rows.append((rules.name, phase.name, f"{first_turn}–{phase.last}", closed))
            first_turn = phase.last + 1
    return table(("preset", "phase", "turns of the day", "not possible"), rows)


def ship_block() -> str:
    """The tables of the ship's parts, and of the needed and the existing pieces on an island."""
    parts = [
        (name, f"{part.share} %", part.after or "–", *(pieces(rules.part[name].material) for rules in PRESETS.values()))
        for name, part in TINY.part.items()
    ]
    header = ("part", "share", "after", *(f"material in `{name}`" for name in PRESETS))
    rows = []
    for kind in THINGS:
        counts = ((rules.needed.get(kind, 0), rules.lying_about.get(kind, 0)) for rules in PRESETS.values())
        rows.append((kind, *(number for pair in counts for number in pair)))
    columns = [f"`{name}`: {label}" for name in PRESETS for label in ("needed", "on the island")]
    return f"{table(header, parts)}\n\n{table(('thing', *columns), rows)}"


_NUMBERS: dict[str, Callable[[Rules], Any]] = {
    "levels": lambda r: ", ".join(f"{level.name} {level.width}×{level.height}" for level in r.levels),
    "sailors": lambda r: r.sailors,
    "days × turns": lambda r: f"{r.days} × {r.turns}",
    "cells that one sees": lambda r: ", ".join(f"{level.name} {level.sight}" for level in r.levels),
    "cells that one sees in fog": lambda r: r.fog_sight,
    "chance of fog, each day": lambda r: f"{r.fog_chance:g}",
    "near: at most so many steps away": lambda r: r.reach,
    "times what the ship needs, at least, on an island": lambda r: f"{r.room:g}",
    "pieces in a pack": lambda r: r.pack,
    "pieces gathered at a time": lambda r: r.gather_limit,
    "builders in the same turn": lambda r: r.builders,
    "building turns of a part": lambda r: r.build_turns,
    "full energy": lambda r: f"{r.energy.full:g}",
    "energy at night, fed / not fed": lambda r: f"+{r.energy.fed:g} / −{r.energy.unfed:g}",
    "energy from food": lambda r: ", ".join(f"{kind} {gain:g}" for kind, gain in r.energy.food.items()),
    "steps in which the energy of others is shown": lambda r: r.energy_shown,
    "nights after poison: symptoms / severe / death": lambda r: " / ".join(
        str(night) for night in (r.poison.symptoms, r.poison.severe, r.poison.death)
    ),
    "nights after poison in which an antidote helps": lambda r: r.poison.antidote_until,
    "votes that remove a sailor, at least": lambda r: r.least_votes,
    "pieces that the traitor can hide": lambda r: r.traitor.hidden_items,
    "false traces of the traitor": lambda r: r.traitor.frames,
    "building turns that a sabotage undoes": lambda r: r.traitor.sabotage_turns,
    "suspicion of who was seen at sabotage": lambda r: r.suspicion.witness,
    "suspicion by a trace (and its chance)": lambda r: f"{r.suspicion.trace} ({r.suspicion.trace_chance:g})",
    "suspicion of whose pack held poison": lambda r: r.suspicion.tablet,
    "suspicion of who fed a poisoned sailor": lambda r: r.suspicion.meal,
    "messages / evidence that are kept": lambda r: f"{r.messages_kept} / {r.evidence_kept}",
}


def numbers_block() -> str:
    """The table of the other numbers of the rules."""
    rows = ((label, *map(value, PRESETS.values())) for label, value in _NUMBERS.items())
    return table(("", *(f"`{name}`" for name in PRESETS)), rows)


def rewards_block() -> str:
    """The table of rewards of each preset, raw and scaled."""
    header = ["reward", "paid to", "for"]
    for rules in PRESETS.values():
        header += [f"`{rules.name}`, raw", f"`{rules.name}` × {rules.reward_scale:g}"]
    return table(header, (_reward_row(field.name) for field in fields(RewardTable)))


def _reward_row(name: str) -> tuple[str, ...]:
    receiver = "the traitor" if name in _TRAITOR_REWARDS else "all" if name in _SHARED_REWARDS else "colonists"
    functions = {function.__name__: function for function in REWARDS.values()}
    # The explanation of a reward is the docstring of its function.
    meaning = _VOTES.get(name) or " ".join(functions[_FUNCTION_OF_REWARD.get(name, name)].__doc__.split())
    values = []
    for rules in PRESETS.values():
        for scale in (1.0, rules.reward_scale):
            reward = rules.rewards.scaled(scale)[name]
            if isinstance(reward, tuple):
                values.append(", ".join(f"{minus(value)} at {percent} %" for percent, value in reward))
            else:
                values.append(f"{minus(reward)} {_UNITS.get(name, '')}".strip())
    return name, receiver, meaning, *values


def minus(number: float) -> str:
    """A number with a true minus sign instead of a hyphen, and without an exponent."""
    return ("−" if number < 0 else "") + f"{abs(number):.6f}".rstrip("0").rstrip(".")


def _tired(game: Game) -> None:
    game.state.sailors[1].energy = 0.5


def _laden(game: Game) -> None:
    game.state.sailors[1].pack = {"WOOD": 3}


def _as_it_is(game: Game) -> None:
    pass


_EXAMPLES: tuple[tuple[Callable[[Game], None], str], ...] = (
    (_as_it_is, "REASONING: I look north.\nACTION: MOVE NORTH"),
    (_as_it_is, "ACTION: I will go north."),
    (_as_it_is, "I think that we should MOVE NORTH"),
    (_as_it_is, "REASONING: I climb.\nACTION: UP"),
    (_tired, "REASONING: I walk on.\nACTION: MOVE NORTH"),
    (_laden, "REASONING: I rest with 3 WOOD at the base.\nACTION: WAIT"),
    (_as_it_is, "la la la"),
)
"""Messages of sailor 1 on the first morning, each after a change of the game's state."""


def penalties_block() -> str:
    """The table of penalties by category, each with an example that the rules put into it."""
    rows = {}
    for change, message in _EXAMPLES:
        game = Game(TINY, 0)
        change(game)
        review = review_action(game, 1, message)
        example = "<br>".join(f"`{line}`" for line in message.splitlines())
        rows[review.category] = (
            review.category,
            minus(DEFAULT_PENALTIES[review.category]),
            example,
            review.critique or "–",
        )
    if rows.keys() != DEFAULT_PENALTIES.keys():
        raise DataError(f"no example for {', '.join(DEFAULT_PENALTIES.keys() - rows.keys())}")
    return table(("category", "penalty", "example", "what the supervisor says"), rows.values())


def island_block() -> str:
    """What one sailor sees of an island on the second day."""
    game = Game(TINY, 4)
    players, rng = cast(game), Random(0)
    while game.state.day < 2 or game.state.turn < 8 or game.seat != 1:
        game.step(players[game.seat].act(observe(game, game.seat), game.rules, rng))
    return _code(render(game, seat=1))


def prompt_block() -> str:
    """The system prompt of a colonist."""
    return _code(system_prompt(TINY, COLONIST))


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    **{"actions": actions_block, "arguments": arguments_block, "phases": phases_block, "ship": ship_block},
    **{"numbers": numbers_block, "rewards": rewards_block, "penalties": penalties_block},
    **{"island": island_block, "prompt": prompt_block},
}
"""The generated blocks by the name in their markers."""


def rewritten(page: str) -> str:
    """The page with all its blocks generated again.

    Raises:
        DataError: if the page lacks the markers of a block, or has markers of an unknown block.
    """
    names = [match[2] for match in _BLOCK.finditer(page)]
    if sorted(names) != sorted(BLOCKS):
        raise DataError(f"the page must have each of the blocks {', '.join(BLOCKS)} once; it has {', '.join(names)}")
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}", page)


def main() -> None:
    """The command line: generate the page's tables again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
