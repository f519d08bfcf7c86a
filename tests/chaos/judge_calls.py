"""Conversations that are judged through a misbehaving endpoint: real HTTP, the real client, panel, ledger and journal;
scripted engines write the conversations.

30 % of the calls meet one of the faults in judge_faults.py. A redirect and a reached spending cap stop the batch; it is
then asked for again, as a trainer does, the cap a little higher.
"""

import asyncio
import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from classroom_rl.engines.api.call_ledger import IN_FLIGHT, LOST, UNUSABLE, USABLE
from classroom_rl.errors import ProviderFailure, SpendingCapReached
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.server.open_models import JUDGE_CALLS_NAME
from tests.chaos.cases import Case, Result, Settings, table
from tests.chaos.judge_faults import FAULTS, GOOD, NO_VERDICT, VERDICT, draw
from tests.chaos.programs import wait_for
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, judge_endpoint
from tests.support.judged_room import PRICES, Server, judged_by, verdict, verdicts_of, write_rule
from tests.support.scripted_room import Room, guided, write_templates

FAULT_SHARE = 0.3
_BATCH = 128
_CASES = 10
_HUNG_S = 3600.0
_CAP_STEP_USD = 5e-5
"""By which the cap rises, for each call that a run makes; a call costs a few times as much."""
_CONTROL = "teacher: Hello! Please go on."
"""How a conversation begins in which the tutor's words are replaced by plain ones."""


@dataclass
class Tally:
    """What came of the calls.

    Attributes:
        calls: by what the endpoint did.
        without: conversations without a reward, since no attempt brought a verdict.
        defaulted: verdicts and rewards that are not those of the endpoint's true verdict.
        refusals: attempts without a verdict that were taken for a refusal of the tutor's words, since a control request
            brought one (docs/classroom.md); the other attempt counts.
        hung: conversations that were not finished within the time limit, and requests that were never settled.
        paid_twice: answers that were paid for although the ledger held one to the same request.
        too_late: answers that the endpoint sent whole, after the client had given up waiting.
        unused: readable verdicts in the ledger that no conversation used.
        over_cap: how often the endpoint had billed more than the cap allows.
        stops: batches that were stopped and asked for again, by reason.
        billed_usd, spent_usd, held_usd: by the endpoint; in the ledger, as spent and as possibly billed.
    """

    calls: Counter = field(default_factory=Counter)
    conversations: int = 0
    verdicts: int = 0
    without: int = 0
    defaulted: int = 0
    refusals: int = 0
    hung: int = 0
    paid_twice: int = 0
    too_late: int = 0
    unused: int = 0
    over_cap: int = 0
    stops: Counter = field(default_factory=Counter)
    billed_usd: float = 0.0
    spent_usd: float = 0.0
    held_usd: float = 0.0
    seconds: float = 0.0

    @property
    def faults(self) -> int:
        """The number of calls that met a fault."""
        return self.calls.total() - self.calls[GOOD]

    def as_json(self) -> dict:
        return dict(vars(self))


def scores_of(number: int) -> tuple[float, float, float]:
    """The true scores of a conversation."""
    return (number % 11) / 10, (number % 7) / 8, number % 5


def right_reward(number: int) -> float:
    """The true reward of a conversation, by the formula in docs/classroom.md."""
    task_final, progression, momentum = scores_of(number)
    reward = round(0.4 * task_final + 0.4 * progression + 0.2 * momentum / 10, 4)
    return reward if reward >= 0.3 else max(0.0, round(reward - 0.25, 4))


def _number_of(body: dict) -> int:
    return int(re.search(r"lesson number (\d+)", body["messages"][0]["content"])[1])


class JudgeCalls:
    """Plays batches of conversations until the endpoint has been called `calls` times.

    Args:
        speed: of the clock by which the client pauses; 1 is the real one, None one that is turned.
        options: of the judge's configuration.
    """

    def __init__(self, tokenizer, folder: Path, calls: int, seed: int, speed: float | None = 1.0, **options):
        self._calls, self._seed, self._speed = calls, seed, speed
        self._options = {"max_concurrent_requests": 32, "request_timeout_s": 4.0, **PRICES, **options}
        self._step_usd = calls * _CAP_STEP_USD
        self._cap_usd = self._step_usd
        folder.mkdir(parents=True, exist_ok=True)
        self._room = Room(tokenizer, folder / "run")
        self._generation = judged_by(write_rule(folder), guided(write_templates(folder)))
        self.tally = Tally()

    def play(self) -> Tally:
        started = time.monotonic()
        with judge_endpoint(self._script) as endpoint:
            while len(endpoint.calls) < self._calls and not self.tally.hung:
                size = max(4, min(_BATCH, (self._calls - len(endpoint.calls)) // 3))
                first = self.tally.conversations + 1
                self._play_batch(endpoint, range(first, first + size))
            self._count_calls(endpoint)
        self._count_ledger()
        self.tally.seconds = time.monotonic() - started
        return self.tally

    def _script(self, body: dict, nth: int) -> Behaviour:
        number, control = _number_of(body), _CONTROL in body["messages"][0]["content"]
        return draw(random.Random(f"{self._seed}|{number}|{control}|{nth}"), FAULT_SHARE, verdict(*scores_of(number)))

    def _play_batch(self, endpoint: JudgeEndpoint, numbers: range) -> None:
        """Play a batch, and ask for it again whenever it was stopped."""
        response = None
        while response is None and not self.tally.hung:
            server = Server(
                self._room, self._generation, endpoint.url, self._speed, max_cost_usd=self._cap_usd, **self._options
            )
            try:
                response = self._sample(server, numbers)
            except TimeoutError:
                self.tally.hung += len(numbers)
            except SpendingCapReached:
                self._check_cap(endpoint)
                self.tally.stops["the cap is reached"] += 1
                self._cap_usd += self._step_usd
            except ProviderFailure as failure:
                if "307: it sends requests on to" not in str(failure):
                    raise
                self.tally.stops["redirect"] += 1
        self._check_cap(endpoint)
        self.tally.conversations += len(numbers)
        if response is not None:
            self._compare(response, numbers)

    def _sample(self, server: Server, numbers: range) -> SampleResponse:
        problems = [f"lesson number {number}" for number in numbers]
        answers, name = [""] * len(problems), f"from{numbers[0]}"
        request = SampleRequest(problems=problems, answers=answers, request_id=name, seed=self._seed, step=0)
        return server.run(lambda service: asyncio.wait_for(service.sample(request), _HUNG_S))

    def _compare(self, response: SampleResponse, numbers: range) -> None:
        for record, number in zip(response.conversations, numbers, strict=True):
            self.tally.without += record.reward is None
            self.tally.defaulted += record.reward not in (None, right_reward(number))

    def _check_cap(self, endpoint: JudgeEndpoint) -> None:
        self.tally.over_cap += endpoint.billed_usd > self._cap_usd

    def _count_calls(self, endpoint: JudgeEndpoint) -> None:
        with suppress(TimeoutError):  # the endpoint notices within a second that a client has left
            wait_for(lambda: all(call.ended for call in endpoint.calls), "the end of all calls")
        tally = self.tally
        tally.calls = Counter(call.behaviour for call in endpoint.calls)
        tally.hung += sum(not call.ended for call in endpoint.calls)
        tally.billed_usd = endpoint.billed_usd
        for event in verdicts_of(self._room):
            number = sum(map(int, re.fullmatch(r"from(\d+)-(\d+)", event["conversation"]).groups()))
            scores = event["verdict"]["scores"]
            tally.verdicts += scores is not None
            tally.refusals += event["verdict"]["refused"]
            tally.defaulted += scores is not None and tuple(scores.values()) != scores_of(number)
        holds = {GOOD, *(name for name, fault in FAULTS.items() if fault.leads_to == VERDICT)}
        controls = sum(call.behaviour in holds for call in endpoint.calls if _CONTROL in call.prompt)
        tally.unused -= tally.verdicts + controls

    def _count_ledger(self) -> None:
        tally = self.tally
        with closing(sqlite3.connect(self._room.folder / JUDGE_CALLS_NAME)) as table:
            outcomes = Counter(dict(table.execute("SELECT outcome, COUNT(*) FROM calls GROUP BY outcome")))
            keys = table.execute("SELECT COUNT(DISTINCT key) FROM calls WHERE outcome IN (?, ?)", (USABLE, UNUSABLE))
            answers, distinct = outcomes[USABLE] + outcomes[UNUSABLE], keys.fetchone()[0]
            sums = table.execute("SELECT TOTAL(cost_usd), TOTAL(reserved_usd) FROM calls")
            tally.spent_usd, tally.held_usd = sums.fetchone()
        tally.hung += outcomes[IN_FLIGHT] + outcomes[LOST]
        complete = {GOOD, *(name for name, fault in FAULTS.items() if fault.leads_to in (VERDICT, NO_VERDICT))}
        tally.paid_twice = answers - distinct
        tally.too_late = sum(tally.calls[name] for name in complete) - answers
        tally.unused += outcomes[USABLE]


def wrong_in(tally: Tally) -> list[str]:
    """What must not have happened and did."""
    must_be_zero = ("defaulted", "hung", "paid_twice", "unused", "over_cap")
    wrong = [f"{getattr(tally, name)} {name}" for name in must_be_zero if getattr(tally, name)]
    if not tally.spent_usd <= tally.billed_usd + 1e-9:
        wrong.append(f"${tally.spent_usd:.6f} in the ledger, ${tally.billed_usd:.6f} billed")
    if tally.billed_usd > tally.spent_usd + tally.held_usd + 1e-9:
        wrong.append(f"${tally.billed_usd:.6f} billed, ${tally.spent_usd + tally.held_usd:.6f} in the ledger")
    return wrong


def cases(settings: Settings) -> list[Case]:
    """The calls in ten parts, each with a run folder of its own."""

    def case(number: int) -> Case:
        def play(folder: Path, settings: Settings) -> Result:
            tokenizer = AutoTokenizer.from_pretrained(settings.world / "blank")
            tally = JudgeCalls(tokenizer, folder, settings.calls // _CASES, number).play()
            return Result(tally.as_json(), wrong_in(tally))

        return Case("judge", f"{number:02d}", play)

    return [case(number) for number in range(1, _CASES + 1)]


def summary(results: Sequence[Result]) -> str:
    """The calls by what the endpoint did, and what came of them."""
    tallies = [Tally(**result.figures) for result in results]
    calls, stops = Counter(), Counter()
    for tally in tallies:
        calls.update(tally.calls)
        stops.update(tally.stops)

    def total(name: str) -> float:
        return sum(getattr(tally, name) for tally in tallies)

    kinds = [(name, calls[name], fault.leads_to) for name, fault in FAULTS.items()]
    share = 1 - calls[GOOD] / max(calls.total(), 1)
    outcome = [
        ("calls", calls.total()),
        ("of them with a fault", f"{calls.total() - calls[GOOD]} ({share:.1%})"),
        ("conversations", total("conversations")),
        ("valid verdicts, all of them used", total("verdicts")),
        ("conversations without a verdict", total("without")),
        ("verdicts or rewards that nobody gave", total("defaulted")),
        ("attempts taken for a refusal, by chance", total("refusals")),
        ("hung", total("hung")),
        ("answers paid for twice", total("paid_twice")),
        ("answers that came after the client had given up", total("too_late")),
        ("times that the endpoint had billed more than the cap", total("over_cap")),
        *((f"batches stopped and asked for again: {why}", count) for why, count in stops.items()),
        ("billed by the endpoint", f"${total('billed_usd'):.4f}"),
        ("in the ledger as spent, and as possibly billed", f"${total('spent_usd'):.4f}, ${total('held_usd'):.4f}"),
        ("seconds", round(total("seconds"))),
    ]
    return table(("what the endpoint did", "calls", "the call is"), kinds) + "\n\n" + table(("", ""), outcome)
