"""Records every request to a model behind an API in an SQLite table, with its cost, outcome and reply.

A request is entered with its highest possible cost (its reservation) before it is sent. Its outcome, cost and reply are
stored in one transaction. So spending never exceeds the cap unnoticed, and no paid reply is lost: the same request is
answered from the table, even after a restart. A request with unknown outcome (timed out, connection reset, process
killed) keeps its reservation.
"""

import sqlite3
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from classroom_rl.errors import StorageError
from classroom_rl.rollout.engine import BATCH, Usage

IN_FLIGHT, USABLE, UNUSABLE, LOST = "in flight", "usable", "unusable", "lost"

LARGEST_COUNT, LARGEST_COST_USD = 10**9, 10_000.0
"""Upper bounds on the tokens and dollars of one reply. Larger numbers from a provider are ignored: they would overflow
the sums, or use up any cap."""


_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    batch TEXT NOT NULL,
    model TEXT NOT NULL,
    key TEXT NOT NULL,       -- of the request's content
    outcome TEXT NOT NULL,   -- in flight, usable, unusable, lost, or the kind of failure
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    cost_usd REAL NOT NULL DEFAULT 0,
    reserved_usd REAL NOT NULL,
    text TEXT,               -- the reply, or what the failure said
    cut INTEGER              -- whether the reply ran into max_tokens; null if that is not known
);
CREATE INDEX IF NOT EXISTS calls_by_key ON calls (key);
CREATE INDEX IF NOT EXISTS calls_by_batch ON calls (batch);
"""


@dataclass(frozen=True)
class CallUsage:
    """Tokens and cost of one reply, as the provider reports them; `cost_usd` is None if it reports no cost."""

    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None = None


@dataclass(frozen=True)
class Spending:
    """Tokens and cost of one role's API for a whole run folder. `reserved_usd` is reserved for requests in flight and
    for those with unknown outcome."""

    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    reserved_usd: float


class CallLedger:
    """The table of requests at `path`, with running totals.

    Args:
        cap_usd: limit on the sum of spent and reserved dollars; None for no cap.

    Attributes:
        spent_usd, reserved_usd, prompt_tokens, completion_tokens: totals over all requests, including those of earlier
            processes.
        outcomes: number of settled requests by (model, outcome), including those of earlier processes.

    Raises:
        StorageError: if the file cannot be read or written; without it no request may be sent.
    """

    def __init__(self, path: Path, cap_usd: float | None = None):
        self.path = path
        self.cap_usd = cap_usd
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # two programs would not see each other's spending
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
            self._db.executescript(_SCHEMA)
            if "cut" not in {column[1] for column in self._db.execute("PRAGMA table_info(calls)")}:
                self._db.execute("ALTER TABLE calls ADD COLUMN cut INTEGER")  # the file is older than this column
        except sqlite3.Error as error:
            raise self._storage_error(error) from error
        # Requests in flight when an earlier process ended: they may have been billed, so they keep their reservations.
        self._run("UPDATE calls SET outcome = ? WHERE outcome = ?", LOST, IN_FLIGHT)
        self._zero_impossible_usage()
        query = "SELECT TOTAL(cost_usd), TOTAL(reserved_usd), TOTAL(prompt_tokens), TOTAL(completion_tokens) FROM calls"
        self.spent_usd, self.reserved_usd, prompt, completion = self._run(query).fetchone()
        self.prompt_tokens, self.completion_tokens = int(prompt), int(completion)
        counts = self._run("SELECT model, outcome, COUNT(*) FROM calls GROUP BY model, outcome")
        self.outcomes: Counter[tuple[str, str]] = Counter({(model, outcome): count for model, outcome, count in counts})

    def enter(self, key: str, model: str, worst_usd: float) -> int | None:
        """Enter a request that is about to be sent.

        Args:
            worst_usd: the request's highest possible cost, which is reserved.

        Returns:
            The request's id in the table; None if its highest possible cost would exceed the cap.
        """
        if self.cap_usd is not None and self.spent_usd + self.reserved_usd + worst_usd > self.cap_usd:
            return None
        insert = "INSERT INTO calls (time, batch, model, key, outcome, reserved_usd) VALUES (?, ?, ?, ?, ?, ?)"
        call = self._run(insert, time.time(), BATCH.get(), model, key, IN_FLIGHT, worst_usd).lastrowid
        self.reserved_usd += worst_usd
        return call

    def settle(
        self,
        call: int,
        outcome: str,
        text: str,
        usage: CallUsage | None,
        keep_reserved: bool = False,
        cut: bool | None = None,
    ) -> None:
        """Record the outcome of a request, and release its reservation.

        Args:
            text: the reply, or the failure's message.
            usage: tokens and cost; None if the provider reported none.
            keep_reserved: keep the reservation, because the request may have been billed without a reported cost.
            cut: whether the reply was cut off at `max_tokens`; None if unknown.
        """
        model, reserved = self._run("SELECT model, reserved_usd FROM calls WHERE id = ?", call).fetchone()
        usage = usage or CallUsage(0, 0, 0.0)
        still_reserved = reserved if keep_reserved else 0.0
        self._run(
            "UPDATE calls SET outcome = ?, text = ?, prompt_tokens = ?, completion_tokens = ?, cost_usd = ?, "
            "reserved_usd = ?, cut = ? WHERE id = ?",
            *(
                outcome,
                text,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cost_usd or 0.0,
                still_reserved,
                cut,
                call,
            ),
        )
        self.reserved_usd = max(0.0, self.reserved_usd + still_reserved - reserved)  # sums are rounded
        self.spent_usd += usage.cost_usd or 0.0
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.outcomes[model, outcome] += 1

    def find_reply(self, key: str) -> tuple[str, CallUsage, bool | None] | None:
        """The first reply, usable or not, to a request of this content; None if there is none.

        Returns:
            The reply's text, its usage (zero tokens if the provider reported none), and whether it was cut off (None if
            unknown). Replies that cannot be decoded, for example after damage to the disk, are skipped.
        """
        rows = self._run(
            "SELECT CAST(text AS BLOB), cut, prompt_tokens, completion_tokens, cost_usd FROM calls "
            "WHERE key = ? AND outcome IN (?, ?) AND typeof(text) = 'text' ORDER BY id",
            *(key, USABLE, UNUSABLE),
        )
        for text, cut, *usage in rows:
            with suppress(UnicodeDecodeError):
                return text.decode(), CallUsage(*usage), None if cut is None else bool(cut)
        return None

    def usage(self, batch: str) -> Usage:
        """Usage of the requests of a batch, including those of earlier processes."""
        rows = self._run(
            "SELECT outcome, COUNT(*), SUM(prompt_tokens), SUM(completion_tokens), SUM(cost_usd), SUM(reserved_usd) "
            "FROM calls WHERE batch = ? GROUP BY outcome",
            batch,
        ).fetchall()
        counts = {outcome: count for outcome, count, *_ in rows}
        keys = self._run("SELECT COUNT(DISTINCT key) FROM calls WHERE batch = ?", batch).fetchone()[0]
        return Usage(
            calls=sum(counts.values()),
            retries=sum(counts.values()) - keys,
            unusable=counts.get(UNUSABLE, 0),
            failures={
                outcome: count for outcome, count in counts.items() if outcome not in (USABLE, UNUSABLE, IN_FLIGHT)
            },
            prompt_tokens=sum(row[2] for row in rows),
            completion_tokens=sum(row[3] for row in rows),
            cost_usd=sum(row[4] for row in rows),
            reserved_usd=sum(row[5] for row in rows),
            run_cost_usd=self.spent_usd,
        )

    def spending(self) -> Spending:
        """The totals over all requests so far."""
        return Spending(self.prompt_tokens, self.completion_tokens, self.spent_usd, self.reserved_usd)

    def close(self) -> None:
        self._db.close()

    def _zero_impossible_usage(self) -> None:
        """Set impossible numbers in the table to 0, as if the provider had reported none; they would distort sums."""
        for column, kind, largest in (
            ("prompt_tokens", "integer", LARGEST_COUNT),
            ("completion_tokens", "integer", LARGEST_COUNT),
            ("cost_usd", "real", LARGEST_COST_USD),
        ):
            possible = f"typeof({column}) = '{kind}' AND {column} BETWEEN 0 AND ?"
            self._run(f"UPDATE calls SET {column} = 0 WHERE NOT ({possible})", largest)

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise self._storage_error(error) from error

    def _storage_error(self, error: sqlite3.Error) -> StorageError:
        return StorageError(
            f"The record of paid requests, {self.path}, cannot be used: {error}. End the other program if one uses the "
            "same run folder, or make room on the disk; a damaged file can be moved aside, and with it goes what was "
            "spent and answered so far."
        )
