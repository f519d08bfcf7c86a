"""Simulates steps of a training from rates: how long a step takes, which GPUs wait, and what bounds the step.

    python -m benchmarks.simulate benchmarks/rates_7b_assumed.yaml [--gpus 4 8 16 32 64]

The file holds the rates of two engines, of the trainer, of the judge and of publishing, and the lengths of
conversations (`Rates`). A server has a teacher's and a student's engine, each on GPUs of its own; half of all GPUs
train, the others are divided between as many servers as they hold, and GPUs that are left over train, too. Rates of a
trainer are per GPU, and grow in proportion to the GPUs: real ones grow by less.

An engine works in passes, as vLLM does: a pass samples one token of each running message, and reads the new tokens of
those that have waited for its begin, as many as it has room for. The schedules:

    concurrent                        each conversation goes its own way (`generation.schedule`), and so does its judge
    phased                            so do the dialogues, but the judge reads them all when the last one has ended
    lockstep                          as trainers without a scheduler: all take a turn before any takes the next one
    concurrent with max_staleness 1   a batch begins once the messages of the one before it are sampled and the weights
                                      trained on the one before that are published, while the judge still reads

The second table has server and trainer on the same GPUs, in turns: both engines on the first GPU and at most four
processes of the trainer, as before engines were placed by a plan; then both engines and a process on each GPU.
"""

import argparse
import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import TypeAdapter

CONCURRENT, PHASED, LOCKSTEP = "concurrent", "phased", "lockstep"
ROLES = ("teacher", "student")
_STEPS = 6
"""The steps simulated; the first ones, in which batches do not overlap yet, are left out of the means."""


@dataclass(frozen=True)
class EngineRates:
    """`decode`: tokens per second of all sequences together, by how many are running; between two numbers it is
    interpolated, beyond the largest it stays. `prefill`: tokens read per second, by which a pass becomes longer, and
    `message_s`: the seconds by which it does for each message that begins in it. `slots`: the most messages that run
    at once. `pass_tokens`: the most tokens that are read in a pass of several messages. `latency_s`: seconds from a
    request to the engine, and from there back, in which the engine works for others."""

    decode: dict[int, float]
    prefill: float
    slots: int
    message_s: float = 0.0
    pass_tokens: int = 8192
    latency_s: float = 0.0

    def together(self, running: int) -> float:
        """Tokens per second of so many running sequences together."""
        counts = sorted(self.decode)
        index = bisect_left(counts, running)
        if index == len(counts) or counts[index] == running:
            return self.decode[counts[min(index, len(counts) - 1)]]
        if index == 0:
            return self.decode[counts[0]] * running / counts[0]
        low, high = counts[index - 1], counts[index]
        share = (running - low) / (high - low)
        return (1 - share) * self.decode[low] + share * self.decode[high]

    def pass_s(self, running: int, read: int, begun: int) -> float:
        """Seconds of a pass for so many running sequences, of which some begin and have their tokens read."""
        return running / self.together(running) + read / self.prefill + begun * self.message_s


@dataclass(frozen=True)
class Rates:
    """What a step is made of. `engine_gpus`: the GPUs of one engine. `train_tokens_s`: tokens trained on per second
    and GPU. `judge_s`: latencies of a judge, each as likely. `weights_gb`, `publish_gb_s`: what is published, and
    how fast. `server_s`: seconds of the server itself for a message, one after the other. `conversations` a step,
    with `messages` each, by turns of teacher and student, of `teacher_tokens` and `student_tokens` tokens, each as
    likely; `prompt_tokens` before the first one of either. `block_tokens`: those in a block of the engines' prefix
    caches. `sources` says where each rate is from, and whether it is measured or assumed."""

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
    prompt_tokens: dict[str, int]
    engine_gpus: int
    sources: dict[str, str]
    server_s: float = 0.0
    block_tokens: int = 16


@dataclass(frozen=True)
class Message:
    """A message to simulate: whose it is, how many tokens its engine has to read before it, and how many it has."""

    role: str
    read: int
    sample: int


@dataclass(frozen=True)
class Conversation:
    """A conversation to simulate: its messages, the tokens that are trained on with it, its context included, and the
    seconds that its judge takes."""

    messages: tuple[Message, ...]
    tokens: int
    judge_s: float


@dataclass(frozen=True)
class Batch:
    """When, in seconds from the batch's start, all messages are sampled and all conversations judged; the seconds for
    which the engines worked, teacher's and student's of all servers together."""

    sampled: float
    judged: float
    busy: float


class Engine:
    """An engine at work. `busy` counts the seconds of its passes."""

    def __init__(self, rates: EngineRates):
        self._rates = rates
        self._waiting: deque[tuple[int, int, int]] = deque()  # name, tokens to read, tokens to sample
        self._running: list[tuple[int, int]] = []  # after how many passes each is done, name
        self._passes = 0
        self._ends: float | None = None  # when the pass ends that is under way
        self.busy = 0.0

    def ask(self, now: float, name: int, message: Message) -> None:
        """A message to begin with the next pass."""
        self._waiting.append((name, message.read, message.sample))
        if self._ends is None:
            self._begin(now)

    def next_event(self) -> float:
        """When the pass ends that is under way; infinite if nothing is asked."""
        return float("inf") if self._ends is None else self._ends

    def advance(self, now: float) -> list[int]:
        """Go on until a time that is not after the next event. Returns the names of the messages that are done."""
        done: list[int] = []
        if self._ends is None or self._ends > now:
            return done
        self._passes += 1
        while self._running and self._running[0][0] <= self._passes:
            done.append(heapq.heappop(self._running)[1])
        self._ends = None
        self._begin(now)
        return done

    def _begin(self, now: float) -> None:
        read = begun = 0
        while self._waiting and len(self._running) < self._rates.slots:
            name, new, sample = self._waiting[0]
            if begun and read + new > self._rates.pass_tokens:
                break
            self._waiting.popleft()
            heapq.heappush(self._running, (self._passes + sample, name))  # the pass that reads samples the first
            read, begun = read + new, begun + 1
        if self._running:
            seconds = self._rates.pass_s(len(self._running), read, begun)
            self._ends, self.busy = now + seconds, self.busy + seconds


def play(rates: Rates, conversations: Sequence[Conversation], servers: int, schedule: str = CONCURRENT) -> Batch:
    """Play a batch on so many servers, which get the conversations in turns."""
    parts = [_play_on_one(rates, conversations[server::servers], schedule) for server in range(servers)]
    return Batch(
        max(part.sampled for part in parts), max(part.judged for part in parts), sum(part.busy for part in parts)
    )


def _play_on_one(rates: Rates, conversations: Sequence[Conversation], schedule: str) -> Batch:
    engines = {"teacher": Engine(rates.teacher), "student": Engine(rates.student)}
    latency_s = {"teacher": rates.teacher.latency_s, "student": rates.student.latency_s}
    turn, ends = [0] * len(conversations), [0.0] * len(conversations)
    asleep: list[int] = []  # in lockstep: those that wait for the others
    requests: list[tuple[float, int]] = []  # when a conversation's next message reaches its engine
    now = free = 0.0  # `free`: when the server has done what it was given

    def ask(name: int) -> None:
        nonlocal free
        free = max(free, now) + rates.server_s
        heapq.heappush(requests, (free + latency_s[conversations[name].messages[turn[name]].role], name))

    def go_on(name: int) -> None:
        if turn[name] == len(conversations[name].messages):
            ends[name] = now
        elif schedule == LOCKSTEP:
            asleep.append(name)
        else:
            ask(name)

    for name in range(len(conversations)):
        go_on(name)
    while True:
        event = min([engine.next_event() for engine in engines.values()] + [at for at, _ in requests[:1]])
        if event == float("inf"):
            if not asleep:
                break
            waiting, asleep[:] = list(asleep), []
            for name in waiting:
                ask(name)
            continue
        now = event
        for name in [name for engine in engines.values() for name in engine.advance(now)]:
            turn[name] += 1
            go_on(name)
        while requests and requests[0][0] <= now:
            name = heapq.heappop(requests)[1]
            message = conversations[name].messages[turn[name]]
            engines[message.role].ask(now, name, message)
    sampled = max(ends, default=0.0)
    judge_starts = ends if schedule == CONCURRENT else [sampled] * len(ends)
    judged = max(
        (at + conversation.judge_s for at, conversation in zip(judge_starts, conversations, strict=True)), default=0.0
    )
    return Batch(sampled, judged, sum(engine.busy for engine in engines.values()))


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
    batches = [play(rates, conversations, servers, schedule) for conversations in drawn]
    train = [
        sum(conversation.tokens for conversation in conversations) / (rates.train_tokens_s * train_gpus)
        for conversations in drawn
    ]
    publish = rates.weights_gb / rates.publish_gb_s
    ends = steps(batches, train, publish, staleness)
    step_s = (ends[-1] - ends[1]) / (_STEPS - 2)
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
    return Step(step_s, 1 - busy / step_s, 1 - mean(train) / step_s, parts)


def sharing(rates: Rates) -> Rates:
    """The rates of two engines on one GPU, each at half its speed. It is the worst case: an engine alone is faster."""

    def halved(engine: EngineRates) -> EngineRates:
        decode = {running: tokens / 2 for running, tokens in engine.decode.items()}
        return replace(engine, decode=decode, prefill=engine.prefill / 2)

    return replace(rates, teacher=halved(rates.teacher), student=halved(rates.student))


def simulate_in_turns(rates: Rates, gpus: int, copies: int, ranks: int) -> tuple[Step, float]:
    """Steps of a training whose server and trainer use the same GPUs in turns: both engines on so many of them, the
    trainer on so many. Returns a step, and the share of it in which a GPU does nothing."""
    step = simulate(sharing(rates), copies, ranks, CONCURRENT, staleness=0)
    busy = (1 - step.engines_idle) * copies + (1 - step.trainer_idle) * ranks
    return step, 1 - busy / gpus


def draw(rates: Rates, generator: random.Random) -> Conversation:
    """A conversation with lengths and a latency drawn from the rates. What a role has said and read is in its engine's
    cache; it reads its prompt and what the other one said."""
    lengths = {"teacher": rates.teacher_tokens, "student": rates.student_tokens}
    messages: list[Message] = []
    for index in range(rates.messages):
        role = ROLES[index % 2]
        read = (messages[-1].sample if messages else 0) + (rates.prompt_tokens[role] if index < 2 else 0)
        messages.append(Message(role, read, generator.choice(lengths[role])))
    tokens = rates.prompt_tokens["teacher"] + sum(message.sample for message in messages)
    return Conversation(tuple(messages), tokens, generator.choice(rates.judge_s))


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
        for schedule, staleness in ((CONCURRENT, 0), (PHASED, 0), (LOCKSTEP, 0), (CONCURRENT, 1)):
            step = simulate(rates, servers, gpus - servers * 2 * rates.engine_gpus, schedule, staleness)
            figures = f"{step.seconds:8.1f} {step.engines_idle:14.0%} {step.trainer_idle:14.0%}"
            print(f"{gpus:4}  {schedule:10} {staleness:14} {servers:8} {figures}   {step.bound}")
    print("GPUs  in turns, engines on   trainer on   step s   a GPU idle   longest part")
    for gpus in arguments.gpus:
        for copies, ranks in ((1, min(4, gpus)), (gpus, gpus)):
            step, idle = simulate_in_turns(rates, gpus, copies, ranks)
            print(f"{gpus:4} {copies:21} {ranks:12} {step.seconds:8.1f} {idle:12.0%}   {step.bound}")


if __name__ == "__main__":
    main()
