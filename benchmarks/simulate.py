"""Simulates steps of a training from rates: how long a step takes, which GPUs wait, and what bounds the step.

    python -m benchmarks.simulate benchmarks/rates_7b_assumed.yaml [--gpus 4 8 16 32 64]

The file holds the rates of two engines, of the trainer, of the judge and of publishing, and the lengths of
conversations (`Rates`). A server has a teacher's and a student's engine, each on GPUs of its own; half of all GPUs
train, the others are divided between as many servers as they hold, and GPUs that are left over train, too. Rates of a
trainer are per GPU, and grow in proportion to the GPUs: real ones grow by less.

The model of an engine: a message first has its new tokens read, one message after the other; then it is sampled beside
at most `slots` - 1 others, which share the tokens per second that the engine makes with so many. Schedules:
`concurrent` (each conversation goes its own way), `phased` (all take a turn before any takes the next, and are judged
together), and `concurrent` with `max_staleness` 1: a batch begins once the messages of the one before it are sampled
and the weights trained on the one before that are published, while the judge still reads.
"""

import argparse
import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

CONCURRENT, PHASED = "concurrent", "phased"
_STEPS = 6
"""The steps simulated; the first ones, in which batches do not overlap yet, are left out of the means."""


@dataclass(frozen=True)
class EngineRates:
    """`decode`: tokens per second of all sequences together, by how many are running; between two numbers it is
    interpolated, beyond the largest it stays. `prefill`: tokens read per second. `slots`: the most that run at once.
    `reading_holds_up`: sampling stands still while a message is read; otherwise neither slows the other down. A real
    engine reads and samples in one pass over the weights, and is somewhere between the two."""

    decode: dict[int, float]
    prefill: float
    slots: int
    reading_holds_up: bool = False

    def per_sequence(self, running: int) -> float:
        """Tokens per second of each of so many running sequences."""
        known = sorted(self.decode)
        place = bisect_left(known, running)
        if place == len(known) or known[place] == running:
            return self.decode[known[min(place, len(known) - 1)]] / running
        if place == 0:
            return self.decode[known[0]] / known[0]
        low, high = known[place - 1], known[place]
        share = (running - low) / (high - low)
        return ((1 - share) * self.decode[low] + share * self.decode[high]) / running


@dataclass(frozen=True)
class Rates:
    """What a step is made of. `engine_gpus`: the GPUs of one engine. `train_tokens_s`: tokens trained on per second and
    GPU. `judge_s`: latencies of a judge, each as likely. `weights_gb`, `publish_gb_s`: what is published, and how fast.
    `conversations` a step, with `messages` each, by turns of teacher and student, of `teacher_tokens` and
    `student_tokens` tokens, each as likely; `prompt_tokens` before them. `sources` says where each rate is from, and
    whether it is measured or assumed."""

    teacher: EngineRates
    student: EngineRates
    train_tokens_s: float
    judge_s: list[float]
    weights_gb: float
    publish_gb_s: float
    conversations: int
    messages: int
    teacher_tokens: list[int]
    student_tokens: list[int]
    prompt_tokens: int
    engine_gpus: int
    sources: dict[str, str]


@dataclass(frozen=True)
class Conversation:
    """A conversation to simulate: the tokens of its messages, and the seconds that its judge takes."""

    prompt: int
    messages: tuple[int, ...]
    judge_s: float

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.messages)


@dataclass(frozen=True)
class Batch:
    """When, in seconds from the batch's start, all messages are sampled and all conversations judged; the seconds for
    which the engines worked, teacher's and student's of all servers together."""

    sampled: float
    judged: float
    busy: float


class Engine:
    """An engine at work. `busy` counts the seconds in which it reads or samples."""

    def __init__(self, rates: EngineRates):
        self._rates = rates
        self._waiting: deque[tuple[int, int, int]] = deque()  # name, tokens to read, tokens to sample
        self._reading: tuple[float, int, int] | None = None  # until when, name, tokens to sample
        self._running: list[tuple[float, int]] = []  # the progress at which each is done, name
        self._progress = self._now = self.busy = 0.0

    def ask(self, name: int, read: int, sample: int) -> None:
        """A message to sample from now on."""
        self._waiting.append((name, read, sample))
        self._read_next()

    def next_event(self) -> float:
        """When something changes; infinite if nothing is asked."""
        read = self._reading[0] if self._reading else float("inf")
        if not self._running or self._is_held_up():
            return read
        left = max(0.0, self._running[0][0] - self._progress)
        return min(read, self._now + left / self._rates.per_sequence(len(self._running)))

    def advance(self, now: float) -> list[int]:
        """Go on until a time that is not after the next event. Returns the names of the messages that are done."""
        if self._reading or self._running:
            self.busy += now - self._now
        if self._running and not self._is_held_up():
            self._progress += (now - self._now) * self._rates.per_sequence(len(self._running))
        self._now, done = now, []
        while self._running and self._running[0][0] <= self._progress + 1e-9:
            done.append(heapq.heappop(self._running)[1])
        if self._reading and self._reading[0] <= now + 1e-12:
            _, name, sample = self._reading
            heapq.heappush(self._running, (self._progress + sample, name))
            self._reading = None
        self._read_next()
        return done

    def _is_held_up(self) -> bool:
        return self._rates.reading_holds_up and self._reading is not None

    def _read_next(self) -> None:
        if self._reading is None and self._waiting and len(self._running) < self._rates.slots:
            name, read, sample = self._waiting.popleft()
            self._reading = (self._now + read / self._rates.prefill, name, sample)


def play(rates: Rates, conversations: Sequence[Conversation], servers: int, schedule: str = CONCURRENT) -> Batch:
    """Play a batch on so many servers, which get the conversations in turns."""
    parts = [_play_on_one(rates, conversations[place::servers], schedule) for place in range(servers)]
    return Batch(max(p.sampled for p in parts), max(p.judged for p in parts), sum(p.busy for p in parts))


def _play_on_one(rates: Rates, conversations: Sequence[Conversation], schedule: str) -> Batch:
    engines = (Engine(rates.teacher), Engine(rates.student))
    turn, ends = [0] * len(conversations), [0.0] * len(conversations)
    asleep: list[int] = []  # in phases: those that wait for the others
    now = 0.0

    def ask(name: int) -> None:
        each, place = conversations[name], turn[name]
        read = (each.prompt if place < 2 else 0) + (
            each.messages[place - 1] if place else 0
        )  # the rest is in the cache
        engines[place % 2].ask(name, read, each.messages[place])

    def go_on(name: int) -> None:
        if turn[name] == len(conversations[name].messages):
            ends[name] = now
        elif schedule == PHASED:
            asleep.append(name)
        else:
            ask(name)

    for name in range(len(conversations)):
        go_on(name)
    while True:
        if all(engine.next_event() == float("inf") for engine in engines):
            if not asleep:
                break
            waiting, asleep[:] = list(asleep), []
            for name in waiting:
                ask(name)
        now = min(engine.next_event() for engine in engines)
        done = [name for engine in engines for name in engine.advance(now)]
        for name in done:
            turn[name] += 1
            go_on(name)
    sampled = max(ends, default=0.0)
    begun = [sampled] * len(ends) if schedule == PHASED else ends
    judged = max((at + each.judge_s for at, each in zip(begun, conversations, strict=True)), default=0.0)
    return Batch(sampled, judged, sum(engine.busy for engine in engines))


@dataclass(frozen=True)
class Step:
    """Means over steps: seconds of a step; the shares of it in which an engine, and the trainer, do nothing; seconds of
    its parts, of which those that overlap count in full."""

    seconds: float
    engines_idle: float
    trainer_idle: float
    parts: dict[str, float]

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self.parts, key=self.parts.__getitem__)


def steps(batches: Sequence[Batch], train_s: Sequence[float], publish_s: float, staleness: int) -> list[float]:
    """The times at which the training on each batch ends, counted from the start of the first batch.

    With `staleness` 0, a batch begins when the weights trained on the one before it are published. With 1, it begins
    once the one before it is sampled and the weights trained on the one before that are published.
    """
    ends: list[float] = []
    begin = 0.0
    for batch, train in zip(batches, train_s, strict=True):
        sampled, judged = begin + batch.sampled, begin + batch.judged
        if staleness == 0:
            ends.append(judged + train)
            begin = ends[-1] + publish_s
            continue
        published = max(sampled, ends[-1]) + publish_s if ends else sampled
        begin = published
        ends.append(max(judged, published) + train)
    return ends


def simulate(rates: Rates, servers: int, train_gpus: int, schedule: str, staleness: int, seed: int = 1) -> Step:
    """Steps of a training with so many servers, and GPUs that train."""
    generator = random.Random(seed)
    drawn = [[draw(rates, generator) for _ in range(rates.conversations)] for _ in range(_STEPS)]
    batches = [play(rates, each, servers, schedule) for each in drawn]
    train = [sum(one.tokens for one in each) / (rates.train_tokens_s * train_gpus) for each in drawn]
    publish = rates.weights_gb / rates.publish_gb_s
    ends = steps(batches, train, publish, staleness)
    whole = (ends[-1] - ends[1]) / (_STEPS - 2)
    later = range(2, _STEPS)

    def mean(values: Sequence[float]) -> float:
        return sum(values[step] for step in later) / len(later)

    parts = {
        "sampling": mean([batch.sampled for batch in batches]),
        "the judge's last answers": mean([batch.judged - batch.sampled for batch in batches]),
        "training": mean(train),
        "publishing": publish,
    }
    busy = mean([batch.busy for batch in batches]) / (2 * servers)
    return Step(whole, 1 - busy / whole, 1 - mean(train) / whole, parts)


def draw(rates: Rates, generator: random.Random) -> Conversation:
    """A conversation with lengths and a latency drawn from the rates."""
    lengths = (rates.teacher_tokens, rates.student_tokens)
    messages = tuple(generator.choice(lengths[place % 2]) for place in range(rates.messages))
    return Conversation(rates.prompt_tokens, messages, generator.choice(rates.judge_s))


def read_rates(path: Path) -> Rates:
    """The rates in a YAML file."""
    return TypeAdapter(Rates).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    rates = read_rates(arguments.rates)
    for what, source in rates.sources.items():
        print(f"{what}: {source}")
    print("GPUs  schedule    max_staleness  servers   step s   engines idle   trainer idle   longest part")
    for gpus in arguments.gpus:
        servers = gpus // 2 // (2 * rates.engine_gpus)
        if servers == 0:
            print(f"{gpus:4}  too few for a server")
            continue
        for schedule, staleness in ((CONCURRENT, 0), (PHASED, 0), (CONCURRENT, 1)):
            step = simulate(rates, servers, gpus - servers * 2 * rates.engine_gpus, schedule, staleness)
            figures = f"{step.seconds:8.1f} {step.engines_idle:14.0%} {step.trainer_idle:14.0%}"
            print(f"{gpus:4}  {schedule:10} {staleness:14} {servers:8} {figures}   {step.bound}")


if __name__ == "__main__":
    main()
