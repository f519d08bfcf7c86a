"""What `make chaos` plays: cases, whose results are kept, so that a suite that was interrupted goes on."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.kills import make_world


@dataclass
class Result:
    """The result of a case: its figures, what was not as it has to be, and why it could not be played on this machine
    (empty if it was played). A case that was left out has not passed."""

    figures: dict
    wrong: list[str] = field(default_factory=list)
    left_out: str = ""
    name: str = ""


class LeftOut(Exception):
    """A case cannot be played on this machine; the text says why."""


@dataclass(frozen=True)
class Case:
    """One case. `play` gets an empty folder of its own, and the suite's settings."""

    part: str
    name: str
    play: Callable[[Path, "Settings"], Result]


@dataclass(frozen=True)
class Settings:
    """The settings of a suite: its folder, how many judge calls, batches of the soak, kills of each program and
    requests of each kind to each route there are, and for how many seconds a program is stopped."""

    folder: Path
    calls: int
    batches: int
    kills: int
    stopped_s: float
    requests: int = 200

    @property
    def world(self) -> Path:
        """The quickstart's lessons and untrained model; made where they are not there."""
        return make_world(self.folder, "quickstart")


class Results:
    """The results of a suite, one file for each case."""

    def __init__(self, folder: Path):
        self._folder = folder / "results"
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, case: Case) -> Path:
        return self._folder / f"{case.part}-{case.name}.json"

    def get(self, case: Case) -> Result | None:
        """The result of a case; None if it was never played to its end."""
        path = self._path(case)
        return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def keep(self, case: Case, result: Result) -> None:
        result.name = case.name
        unfinished = self._path(case).with_suffix(".unfinished")
        unfinished.write_text(json.dumps(vars(result), indent=1), encoding="utf-8")
        os.replace(unfinished, self._path(case))

    def of(self, cases: Iterable[Case]) -> list[Result]:
        """The results that are there."""
        return [result for result in map(self.get, cases) if result is not None]


def in_shard(cases: Sequence[Case], shard: str) -> list[Case]:
    """Every n-th of the cases, for a shard written as k/n; k counts from 1."""
    number, _, count = shard.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise SystemExit(f"--shard {shard}: write it as k/n, with k from 1 to n, such as 1/4.")
    return list(cases[int(number) - 1 :: int(count)])


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
