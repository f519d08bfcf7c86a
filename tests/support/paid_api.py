"""A provider in a process of its own, which can be killed: a judge and a supervisor behind one OpenAI-compatible API.

    python -m tests.support.paid_api PORT RECORD [SECONDS]

It gives verdicts and reviews at random, all of them readable, each after about SECONDS. It appends a line to RECORD for
each reply that it has sent whole: what was asked, and what it charges.
"""

import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.support.judge_endpoint import Behaviour, Exchange, completion, judge_endpoint
from tests.support.judged_room import verdict

CRITIQUE = '"critique"'
"""What the prompt and the schema of a review hold, and those of a verdict do not."""


def review() -> str:
    """A review, valid or not."""
    valid = random.random() < 0.7
    fields = {"critique": "As it is.", "category": "none" if valid else "task", "valid": valid}
    return json.dumps({**fields, "correction": "" if valid else "Good. What do you cook today?"})


def scores() -> str:
    """A verdict."""
    return verdict(round(random.random(), 2), round(random.random(), 2), random.randint(0, 10))


class Provider:
    """The replies, and the file that records those which were sent."""

    def __init__(self, record: Path, seconds: float):
        self._file = record.open("a", encoding="utf-8", buffering=1)
        self._seconds = seconds

    def script(self, body: dict, nth: int) -> Behaviour:
        return lambda exchange: self._answer(exchange, body)

    def _answer(self, exchange: Exchange, body: dict) -> None:
        time.sleep(random.uniform(0.5, 1.5) * self._seconds)
        request = json.dumps([body["model"], body["messages"]])
        text = review() if CRITIQUE in json.dumps(body) else scores()
        exchange.bill(text)
        exchange.send(200, completion(text, "stop", exchange.usage()))
        key = hashlib.sha256(request.encode()).hexdigest()
        self._file.write(json.dumps({"key": key, "usd": exchange.call.billed_usd}) + "\n")


def sent(record: Path) -> Counter:
    """How many replies were sent, by what was asked."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return Counter(json.loads(line)["key"] for line in lines if line.endswith("}"))


def command(port: int, record: Path, seconds: float) -> list[str]:
    """The command that starts a provider, from the project's folder."""
    return [sys.executable, "-m", "tests.support.paid_api", str(port), str(record), str(seconds)]


def main(arguments: Sequence[str]) -> None:
    port, record, *rest = arguments
    provider = Provider(Path(record), float(rest[0]) if rest else 0.0)
    with judge_endpoint(provider.script, int(port)):
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
