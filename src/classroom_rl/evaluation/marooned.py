"""Measures the games of Marooned that a server's model plays on held-out islands, without a supervisor:

python -m classroom_rl.evaluation.marooned http://127.0.0.1:8005 runs/marooned/world/islands_heldout.jsonl games.parquet
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from classroom_rl.environments.marooned.episode import GameRecord
from classroom_rl.environments.marooned.messages import VALID
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.results.statistics import paired_change
from classroom_rl.rollout.intervals import Estimate, mean_with_ci, shown
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.server.client import ClassroomClient
from classroom_rl.system.keys import print_error

Figures = dict[str, dict[str, list[float]]]
"""Figure → problem → its value in each game."""

LABELS = {
    "valid": "valid actions (in the exact grammar, and possible)",
    "readable": "actions in the exact grammar",
    "ship": "ship finished",
    "reward": "reward",
    "decisions": "decisions a game",
}
SEED = 2024


def measure(
    client: ClassroomClient, problems: Sequence[str], games: int, path: Path, name: str = "", untrained: bool = False
) -> list[GameRecord]:
    """Play each problem `games` times with the server's current policy, without a supervisor and with fixed seeds, and
    write the games into a Parquet file. If the file already holds these games of this policy, it is read instead.

    Args:
        name: a part of the games' request id; games under another name are played again.
        untrained: measure the policy before any training.

    Raises:
        DataError: if the file lacks the games of the untrained policy, and the server has a trained one.
        ClassroomError: as `ClassroomClient.sample`.
    """
    policy = PolicyVersion() if untrained else client.health().policy
    request = SampleRequest(
        problems=list(problems) * games,
        answers=[""] * len(problems) * games,
        request_id=f"measured-{name}",
        seed=SEED,
        step=0,
        run_id=policy.run_id,
        policy_version=policy.version,
        fixed_seeds=True,
    )
    # The digest covers the whole request: a file with this id holds the answer to exactly this request.
    request = request.model_copy(update={"request_id": f"measured-{request.digest[:16]}"})
    if path.is_file():
        records = read_records(path, GameRecord)
        if {record.request_id for record in records} == {request.request_id}:
            return records
    if untrained and client.health().policy != policy:
        raise DataError(
            f"{path} does not hold the games of the untrained model, and the server has {client.health().policy} "
            "already: take another folder (logging.save_dir) to measure before and after."
        )
    records = client.sample(request).conversations
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, records)
    return records


def figures_of(records: Sequence[GameRecord]) -> Figures:
    """The figures of games, by island. Games without a decision or a reward are left out."""
    figures: Figures = {name: defaultdict(list) for name in LABELS}
    for record in records:
        decisions = record.decisions
        if not decisions or record.reward is None:
            continue
        values = {
            "valid": sum(decision.grade == VALID and not decision.fault for decision in decisions) / len(decisions),
            "readable": sum(decision.grade == VALID for decision in decisions) / len(decisions),
            "ship": record.ship_progress,
            "reward": record.reward,
            "decisions": float(len(decisions)),
        }
        for name, value in values.items():
            figures[name][record.problem].append(value)
    return {name: dict(by_problem) for name, by_problem in figures.items()}


def compared(before: Figures, after: Figures) -> dict[str, dict[str, Estimate]]:
    """Figure → its mean before and after, and the mean change on the same islands, each with a 95 % interval over
    islands."""
    return {
        name: {
            "before": mean_with_ci(before[name]),
            "after": mean_with_ci(after[name]),
            "change": paired_change(before[name], after[name]),
        }
        for name in LABELS
    }


def table(figures: Mapping[str, Mapping[str, Estimate]]) -> str:
    """The comparison as text."""
    lines = [f"{'':52}{'before':>8}{'after':>8}   change [95 % interval over islands]"]
    for name, label in LABELS.items():
        before, after, change = (figures[name][key] for key in ("before", "after", "change"))
        if change["mean"] is None:
            continue
        values = f"{before['mean']:8.3f}{after['mean']:8.3f}   {shown(change, '+')}"
        lines.append(f"{label:52}{values}")
    return "\n".join(lines)


def held_out(path: Path) -> list[str]:
    """The problems of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["problem"] for line in file]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the address of a running server")
    parser.add_argument("islands", type=Path, help="a JSONL file of problems")
    parser.add_argument("games", type=Path, help="the Parquet file to write")
    parser.add_argument("--games-per-island", type=int, default=2)
    parser.add_argument("--name", default="", help="a part of the games' request id: letters, digits and -")
    parser.add_argument("--untrained", action="store_true", help="the policy is the one before any training")
    arguments = parser.parse_args()
    try:
        client = ClassroomClient(arguments.url, record=GameRecord)
        islands, games = held_out(arguments.islands), arguments.games_per_island
        records = measure(client, islands, games, arguments.games, arguments.name, arguments.untrained)
    except (ClassroomError, OSError, ValidationError) as error:
        print_error(error)
        return 2
    for name, by_island in figures_of(records).items():
        print(f"{LABELS[name]:52}{mean_with_ci(by_island)['mean']:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
