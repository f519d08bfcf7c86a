"""Decisions to learn from: games of scripted players, written down by somebody who has half forgotten the rules.

A model that is fine-tuned on them knows the words of the game and roughly how actions are written, and about half of
what it does is not possible or not in the grammar: a beginner for reinforcement learning and corrections to teach.
"""

from collections.abc import Callable, Iterator
from random import Random

from classroom_rl.environments.marooned.actions import Action, format_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.legality import fault_in
from classroom_rl.environments.marooned.messages import format_message
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.players import any_action, cast
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import decision_prompt
from classroom_rl.environments.marooned.reasoning import reasoning
from classroom_rl.environments.marooned.rules import Rules

Row = dict[str, list[dict[str, str]]]
"""`messages`, as train_sft.py takes them."""

SPOILED = 0.5
"""The share of messages that are spoiled."""


def decisions(preset: str, first: int, games: int, per_game: int, seed: int) -> Iterator[tuple[Observation, Action]]:
    """What scripted players saw and did: `per_game` decisions of each game, drawn from its first day and a half."""
    rules = PRESETS[preset]
    rng = Random(f"{seed}|decisions")
    for number in range(first, first + games):
        game = Game(rules, number)
        players = cast(game)
        most = int(1.5 * rules.turns * rules.sailors)
        kept = set(rng.sample(range(most), per_game))
        for step in range(most):
            if game.seat is None:
                break
            view = observe(game, game.seat)
            action = players[game.seat].act(view, rules, rng)
            if step in kept:
                yield view, action
            game.step(action)


def make_corpus(preset: str, games: int, per_game: int, seed: int, first: int = 200_000) -> list[Row]:
    """Prompts and messages, of which `SPOILED` are spoiled; from the islands `first` and on."""
    rng, rules, rows = Random(f"{seed}|corpus"), PRESETS[preset], []
    for view, action in decisions(preset, first, games, per_game, seed):
        spoiled = rng.random() < SPOILED
        said = (
            rng.choice(_WAYS)(rng, rules, view, action)
            if spoiled
            else format_message(reasoning(view, rules, action), action)
        )
        messages = [*decision_prompt(rules, view, show_rules=False), {"role": "assistant", "content": said}]
        rows.append({"messages": messages})
    rng.shuffle(rows)
    return rows


# Ways to get it wrong ------------------------------------------------------------------------------------------------


def _impossible(rng: Random, rules: Rules, view: Observation, action: Action) -> str:
    """An action of the grammar that is not possible now."""
    while (other := any_action(rng)) and fault_in(view, rules, other) is None:
        pass
    return format_message(reasoning(view, rules, other), other)


def _sloppy(rng: Random, rules: Rules, view: Observation, action: Action) -> str:
    """Lower case, or a full stop: rules can mend it."""
    text = format_action(action)
    written = rng.choice([text.lower(), f"{text}.", f"I will {text.lower()}"])
    return f"REASONING: {reasoning(view, rules, action)}\nACTION: {written}"


def _without_form(rng: Random, rules: Rules, view: Observation, action: Action) -> str:
    """The action without its two lines, or without its arguments."""
    text = format_action(action)
    return rng.choice(
        [
            text,
            f"{reasoning(view, rules, action)} {text}",
            f"REASONING: {reasoning(view, rules, action)}\nACTION: {text.split()[0]} IT",
        ]
    )


def _gibberish(rng: Random, rules: Rules, view: Observation, action: Action) -> str:
    """No action at all."""
    return rng.choice(["I am lost.", "What a day.", "Hmm."])


_WAYS: tuple[Callable[[Random, Rules, Observation, Action], str], ...] = (
    *(_sloppy, _sloppy, _sloppy, _without_form, _without_form, _without_form, _impossible, _gibberish),
)
"""What a spoiled message is drawn from; what stands there several times is more frequent."""
