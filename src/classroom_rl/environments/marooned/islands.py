"""Files of problems for Marooned.

python -m classroom_rl.environments.marooned.islands runs/marooned/train.jsonl --first 0 --count 400
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from classroom_rl.environments.marooned.episode import problem_text
from classroom_rl.environments.marooned.game import Game
from classroom_rl.environments.marooned.presets import PRESETS
from classroom_rl.environments.marooned.rules import COLONIST, TRAITOR


def islands(preset: str, first: int, count: int, role: str | None = None, traitor: bool = True) -> Iterator[str]:
    """Yields the problems of `count` seeds, starting at `first`. Each seed draws one seat, with this role unless it is
    None.

    Raises:
        ValueError: if a game has no seat of this role.
    """
    for seed in range(first, first + count):
        roles = Game(PRESETS[preset], seed, traitor=traitor).roles
        seats = [seat for seat, seat_role in roles.items() if role in (None, seat_role)]
        if not seats:
            raise ValueError(f"island {seed} has no {role}: the games have no traitor")
        yield problem_text(seed, Random(f"{seed}:seat").choice(seats))


def main() -> None:
    """The command line: write a file of problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the JSONL file to write")
    parser.add_argument("--preset", choices=list(PRESETS), default="tiny")
    parser.add_argument("--first", type=int, default=0, help="the first seed; other seeds are other islands")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--role", choices=[COLONIST, TRAITOR], help="whose seats; default: all")
    parser.add_argument("--no-traitor", action="store_true", help="as generation.has_traitor=false")
    arguments = parser.parse_args()
    problems = islands(
        arguments.preset, arguments.first, arguments.count, arguments.role, traitor=not arguments.no_traitor
    )
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"problem": problem, "answer": ""}) + "\n" for problem in problems)
    arguments.path.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.count} games in {arguments.path}")


if __name__ == "__main__":
    main()
