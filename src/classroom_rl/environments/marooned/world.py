"""Makes the world of the tiny island, from which a training starts: games for training and evaluation, a corpus of
decisions, and an untrained model with a tokenizer.

python -m classroom_rl.environments.marooned.world --out runs/marooned/world --seed 42

A model that is fine-tuned on the corpus knows the words of the game and roughly how actions are written, but about half
of its actions are impossible or not in the grammar. It is a beginner, to be improved by reinforcement learning and
corrections.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from classroom_rl.environments.marooned.actions import Action, format_action
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.islands import islands
from classroom_rl.environments.marooned.legality import fault_in
from classroom_rl.environments.marooned.messages import format_message, reasoning
from classroom_rl.environments.marooned.observation import Observation, observe
from classroom_rl.environments.marooned.players import any_action, cast
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.prompts import decision_prompt
from classroom_rl.environments.marooned.rules import COLONIST, Rules
from classroom_rl.models.random_model import write_tiny_chat_model
from classroom_rl.system.storage import cached_folder

Row = dict[str, list[dict[str, str]]]
"""One training sample: `messages`, as train_sft.py expects them."""

SPOILED = 0.5
"""The share of the corpus's messages that are made faulty."""


def decisions(preset: str, first: int, games: int, per_game: int, seed: int) -> Iterator[tuple[Observation, Action]]:
    """Yields what scripted players saw and did: `per_game` decisions of each game, drawn from its first 1.5 days."""
    rules = PRESETS[preset]
    rng = Random(f"{seed}|decisions")
    for game_seed in range(first, first + games):
        game = Game(rules, game_seed)
        players = cast(game)
        steps = int(1.5 * rules.turns * rules.sailors)
        sampled_steps = set(rng.sample(range(steps), per_game))
        for step in range(steps):
            if game.seat is None:
                break
            view = observe(game, game.seat)
            action = players[game.seat].act(view, rules, rng)
            if step in sampled_steps:
                yield view, action
            game.step(action)


def make_corpus(preset: str, games: int, per_game: int, seed: int, first: int = 200_000) -> list[Row]:
    """Prompts with messages, a share of `SPOILED` of them faulty, from the islands with seed `first` and later."""
    rng, rules, rows = Random(f"{seed}|corpus"), PRESETS[preset], []
    for view, action in decisions(preset, first, games, per_game, seed):
        spoiled = rng.random() < SPOILED
        text = (
            rng.choice(_SPOILERS)(rng, rules, view, action)
            if spoiled
            else format_message(reasoning(view, rules, action), action)
        )
        messages = [*decision_prompt(rules, view, show_rules=False), {"role": "assistant", "content": text}]
        rows.append({"messages": messages})
    rng.shuffle(rows)
    return rows


# Faulty messages -----------------------------------------------------------------------------------------------------


def _impossible(rng: Random, rules: Rules, view: Observation, action: Action) -> str:
    """An action of the grammar that is not possible now."""
    while (impossible := any_action(rng)) and fault_in(view, rules, impossible) is None:
        pass
    return format_message(reasoning(view, rules, impossible), impossible)


def _sloppy(rng: Random, rules: Rules, view: Observation, action: Action) -> str:
    """The action in lower case, with a full stop or in a sentence: `repair` can read it."""
    text = format_action(action)
    sloppy_text = rng.choice([text.lower(), f"{text}.", f"I will {text.lower()}"])
    return f"REASONING: {reasoning(view, rules, action)}\nACTION: {sloppy_text}"


def _without_form(rng: Random, rules: Rules, view: Observation, action: Action) -> str:
    """The action without the required two lines, or without its arguments."""
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


_SPOILERS: tuple[Callable[[Random, Rules, Observation, Action], str], ...] = (
    *(_sloppy, _sloppy, _sloppy, _without_form, _without_form, _without_form, _impossible, _gibberish),
)
"""How a faulty message is made. Functions that are listed more than once are drawn more often."""


PRESET = "tiny"
TRAINED, HELD_OUT, HELD_OUT_FROM = 400, 48, 100_000
GAMES, PER_GAME = 900, 16
CONTEXT, VOCABULARY = 2048, 1024
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}


def build_world(out: Path, seed: int) -> bool:
    """Write the world of a seed into the folder `out`, as `cached_folder` does. Any change to the game's code makes it
    anew.

    Returns:
        Whether anything was written.

    Raises:
        FileExistsError: if `out` holds something else.
    """
    return cached_folder(out, seed, sorted(Path(__file__).parent.glob("*.py")), _write)


def _write(folder: Path, seed: int) -> None:
    for name, first_seed, count in (("train", 0, TRAINED), ("heldout", HELD_OUT_FROM, HELD_OUT)):
        rows = ({"problem": problem, "answer": ""} for problem in islands(PRESET, first_seed, count, COLONIST))
        _write_jsonl(folder / f"islands_{name}.jsonl", rows)
    corpus = make_corpus(PRESET, GAMES, PER_GAME, seed)
    _write_jsonl(folder / "corpus.jsonl", corpus)
    texts = (message["content"] for row in corpus for message in row["messages"])
    write_tiny_chat_model(folder / "blank", texts, vocabulary=VOCABULARY, context=CONTEXT, seed=seed, sizes=SIZES)


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the world of the tiny island.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    is_new = build_world(arguments.out, arguments.seed)
    print(f"{arguments.out}: {'made' if is_new else 'is there already'}")


if __name__ == "__main__":
    main()
