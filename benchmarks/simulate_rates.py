"""Rates for benchmarks/simulate.py, measured with a run's models on this machine, and the simulation against that run.

    python -m benchmarks.simulate_rates measure RUN_FOLDER RATES.yaml [--server-ms 0.43] [overrides of the training]
    python -m benchmarks.simulate_rates check RUN_FOLDER RATES.yaml [overrides of the training]

`measure` takes the run's models and conversations, but no time that the run took: it has both engines sample and read
at once, each so many sequences at a time, and trains on and publishes one batch as benchmarks/step_bound.py does. The
server's own milliseconds for a message are those that `benchmarks.conversations_at_once` printed. The run needs an
embedded judge, whose time is not measured.

`check` simulates each step of the run but the first, with the messages that were really said and the tokens that an
engine with a prefix cache has to read for each, and prints its seconds beside those in metrics.jsonl. The exit status
is 1 if a whole step is more than 15 % off.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import yaml
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from benchmarks import simulate
from benchmarks.simulate import ROLES, Conversation, EngineRates, Rates, play, read_rates
from benchmarks.step_bound import Message, Replayed, ReplayingEngine, batches_of, publish, train
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.models import VllmConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.results.run_folder import METRICS_NAME, read_lines
from classroom_rl.rollout.engine import Sampling
from classroom_rl.trainer.model_loading import prepare_cpu

LARGEST_ERROR = 0.15
_RUNNING = (1, 4, 16, 64)
"""How many sequences are sampled at once, besides as many as an engine takes."""
_SAMPLED = 17
"""Tokens of each; the first is sampled with the reading."""
_TIMES = 5


def tokens_to_read(batch: Sequence[Replayed], block: int) -> list[list[int]]:
    """How many tokens the engine of each message has to read before it, by conversation: those behind the last whole
    block that it has read or sampled already, in this conversation or in another one of the batch.

    Args:
        block: tokens in a block of the engines' prefix caches, which are empty in the beginning.
    """
    cached: dict[str, set[int]] = {role: set() for role in ROLES}
    all_reads: list[list[int]] = [[] for _ in batch]
    for index in range(max(len(replayed.messages) for replayed in batch)):
        for reads, replayed in zip(all_reads, batch, strict=True):
            if index < len(replayed.messages):
                message = replayed.messages[index]
                hits = 0
                for prefix in _prefixes(message.prompt_ids[:-1], block):  # the last token is always read
                    if prefix not in cached[message.role]:
                        break
                    hits += 1
                reads.append(len(message.prompt_ids) - hits * block)
                cached[message.role].update(_prefixes(_known_after(replayed.messages, index), block))
    return all_reads


def _prefixes(ids: Sequence[int], block: int) -> Iterator[int]:
    """A hash of each prefix of whole blocks."""
    prefix = 0
    for end in range(block, len(ids) + 1, block):
        prefix = hash((prefix, *ids[end - block : end]))
        yield prefix


def _known_after(messages: Sequence[Message], place: int) -> list[int]:
    """What an engine has in its cache of a conversation after a message: its prompt and, as far as the role's next
    prompt repeats them, the sampled tokens but the last one."""
    message = messages[place]
    following = [later.prompt_ids for later in messages[place + 1 :] if later.role == message.role]
    return following[0][: len(message.prompt_ids) + message.tokens - 1] if following else message.prompt_ids


def conversation_of(replayed: Replayed, reads: Sequence[int]) -> Conversation:
    """A conversation as it is simulated.

    Args:
        reads: the tokens to read before each of its messages.
    """
    messages = zip(replayed.messages, reads, strict=True)
    return Conversation(
        tuple(simulate.Message(message.role, read, message.tokens) for message, read in messages),
        len(replayed.ids),
        0.0,
    )


class Bench:
    """One engine that is measured while another one is at the same.

    Args:
        prompts: prompts of the engine's role, as long as they are in the run.
    """

    def __init__(self, engine: ReplayingEngine, role: str, options: VllmConfig, prompts: Sequence[Sequence[int]]):
        self._engine, self._role, self._sampling = engine, role, Sampling.of(options, 0)
        self._prompts, self._slots, self._new = prompts, options.max_num_seqs, count()

    def numbers(self, batch: int) -> list[int]:
        """How many sequences are sampled at once, one after the other."""
        most = min(self._slots, batch)
        return sorted({*(running for running in _RUNNING if running < most), most})

    def fresh(self, running: int) -> list[list[int]]:
        """So many prompts that the engine has not read: each begins with two tokens like no other."""
        prefixes = [divmod(next(self._new), 100) for _ in range(running)]
        chosen = [self._prompts[index % len(self._prompts)] for index in range(running)]
        return [[10 + first, 10 + second, *ids] for (first, second), ids in zip(prefixes, chosen, strict=True)]

    async def seconds(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """Sample so many tokens after each prompt, all at once."""
        started = time.perf_counter()
        messages = [Message(self._role, prompt, tokens) for prompt in prompts]
        await asyncio.gather(*(self._engine.replay(message, self._sampling) for message in messages))
        return time.perf_counter() - started

    async def first(self, running: int) -> tuple[float, int]:
        """The seconds until so many sequences with fresh prompts have their first tokens, and the tokens read."""
        prompts = self.fresh(running)
        return await self.seconds(prompts, 1), sum(map(len, prompts))

    async def sampled(self, prompts: Sequence[list[int]]) -> tuple[float, float]:
        """Tokens per second of these sequences together, and the seconds of their first tokens, with prompts that are
        in the cache up to their last blocks."""
        first = await self.seconds(prompts, 1)
        total = await self.seconds(prompts, _SAMPLED)
        return len(prompts) * (_SAMPLED - 1) / max(total - first, 1e-9), first

    def not_cached(self, prompts: Sequence[list[int]]) -> int:
        """How many tokens of prompts that were read already are read again."""
        block = self._engine.block_tokens
        return sum(len(ids) - (len(ids) - 1) // block * block for ids in prompts)

    def rates(self, decode: Mapping[int, float], firsts: Sequence[tuple[int, int, float]]) -> EngineRates:
        """What the measured seconds, as `fit` takes them, say of the engine."""
        token_s, message_s, latency_s = fit(firsts, decode)
        return EngineRates(
            dict(decode),
            prefill=round(1 / max(token_s, 1e-9), 1),
            slots=self._slots,
            message_s=round(message_s, 6),
            pass_tokens=self._engine.pass_tokens,
            latency_s=round(latency_s, 6),
        )


def fit(firsts: Sequence[tuple[int, int, float]], decode: Mapping[int, float]) -> tuple[float, float, float]:
    """The seconds for each token that is read, for each message that begins, and those of a request on its way, by
    least squares of the relative errors; none is below 0.

    Args:
        firsts: messages that began at once, the tokens that were read before them, and the seconds until each had its
            first token.
        decode: tokens per second of so many sequences together.
    """
    rows = np.array([(tokens / seconds, messages / seconds, 1 / seconds) for messages, tokens, seconds in firsts])
    targets = np.array([1 - messages / decode[messages] / seconds for messages, _, seconds in firsts])
    free = [0, 1, 2]
    while True:
        coefficients = np.zeros(3)
        coefficients[free] = np.linalg.lstsq(rows[:, free], targets, rcond=None)[0]
        if (coefficients >= 0).all():
            return tuple(float(value) for value in coefficients)
        free.remove(int(coefficients.argmin()))


async def engine_rates(benches: Mapping[str, Bench], batch: int) -> dict[str, EngineRates]:
    """The rates of both engines, each measured while the other one works as much."""
    decode: dict[str, dict[int, float]] = {role: {} for role in benches}
    firsts: dict[str, list[tuple[int, int, float]]] = {role: [] for role in benches}
    numbers = {role: bench.numbers(batch) for role, bench in benches.items()}
    for bench in benches.values():
        await bench.sampled(bench.fresh(max(bench.numbers(batch))))  # warms up
    for index in range(max(map(len, numbers.values()))):
        running = {role: counts[min(index, len(counts) - 1)] for role, counts in numbers.items()}
        fresh = {role: partial(bench.first, running[role]) for role, bench in benches.items()}
        for role, results in (await _side_by_side(fresh)).items():
            seconds, tokens = (median(values) for values in zip(*results, strict=True))
            firsts[role].append((running[role], tokens, seconds))
        prompts = {role: bench.fresh(running[role]) for role, bench in benches.items()}
        for role, bench in benches.items():
            await bench.seconds(prompts[role], 1)  # from here on they are in the cache
        measured = {role: partial(bench.sampled, prompts[role]) for role, bench in benches.items()}
        for role, results in (await _side_by_side(measured)).items():
            decode[role][running[role]] = round(median(rate for rate, _ in results), 1)
            reread = benches[role].not_cached(prompts[role])
            firsts[role].append((running[role], reread, median(first for _, first in results)))
    return {role: bench.rates(decode[role], firsts[role]) for role, bench in benches.items()}


async def _side_by_side(measures: Mapping[str, Callable[[], Awaitable[Any]]]) -> dict[str, list[Any]]:
    """What each measures `_TIMES` times; who is done first goes on, so that the others are never alone."""
    results: dict[str, list[Any]] = {name: [] for name in measures}

    async def repeat(name: str) -> None:
        while any(len(values) < _TIMES for values in results.values()):
            results[name].append(await measures[name]())

    await asyncio.gather(*map(repeat, measures))
    return {name: values[:_TIMES] for name, values in results.items()}


async def measure(run: Path, config: TrainRLConfig, server_s: float) -> Rates:
    """The rates of a run's models on this machine."""
    batch = next(iter(batches_of(run, config).values()))
    prepare_cpu(config.train.dtype)
    models = {"teacher": config.teacher_model, "student": config.student_model}
    engines = {
        role: await ReplayingEngine.start(model, config.seed, config.generation) for role, model in models.items()
    }
    messages_by_role = {
        role: [message for replayed in batch for message in replayed.messages if message.role == role] for role in ROLES
    }
    try:
        benches = {
            role: Bench(
                engines[role], role, models[role].vllm, [message.prompt_ids for message in messages_by_role[role]]
            )
            for role in ROLES
        }
        rates = await engine_rates(benches, len(batch))
        model = AutoModelForCausalLM.from_pretrained(
            config.teacher_model.model_name_or_path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
        with tempfile.TemporaryDirectory() as folder:
            published = [await publish(model, engines["teacher"], Path(folder), version) for version in range(_TIMES)]
        block_tokens = engines["teacher"].block_tokens
        train(batch, model, optimizer, config.train)  # asks for memory
        trained = train(batch, model, optimizer, config.train)
    finally:
        for engine in engines.values():
            engine.shutdown()
    gigabytes = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values()) / 1e9
    first_messages = {
        role: [next(message for message in replayed.messages if message.role == role) for replayed in batch]
        for role in ROLES
    }
    return Rates(
        **rates,
        train_tokens_s=round(sum(len(replayed.ids) for replayed in batch) / trained, 1),
        judge_s=[0.0],
        weights_gb=round(gigabytes, 4),
        publish_gb_s=round(gigabytes / median(published), 3),
        conversations=len(batch),
        messages=round(fmean(len(replayed.messages) for replayed in batch)),
        teacher_tokens=[message.tokens for message in messages_by_role["teacher"]],
        student_tokens=[message.tokens for message in messages_by_role["student"]],
        prompt_tokens={
            role: round(fmean(len(message.prompt_ids) for message in messages))
            for role, messages in first_messages.items()
        },
        engine_gpus=1,
        sources={
            "engines, training, publishing": f"measured with the models of {run}",
            "server": "given",
            "judge": "embedded; its time was not measured",
            "lengths": f"of the first batch of {run}",
        },
        server_s=server_s,
        block_tokens=block_tokens,
    )


def predicted(batch: Sequence[Replayed], rates: Rates) -> dict[str, float]:
    """The simulated seconds of a step that plays this batch on one server and trains on it."""
    reads = tokens_to_read(batch, rates.block_tokens)
    conversations = [conversation_of(*pair) for pair in zip(batch, reads, strict=True)]
    parts = {
        "rollout": play(rates, conversations, servers=1).judged,
        "train": sum(conversation.tokens for conversation in conversations) / rates.train_tokens_s,
        "publish": rates.weights_gb / rates.publish_gb_s,
    }
    return parts | {"step": sum(parts.values())}


def compare(
    batches: Mapping[int, Sequence[Replayed]], lines: Sequence[Mapping[str, float]], rates: Rates
) -> dict[str, tuple[float, float]]:
    """By part of a step: its simulated and its measured seconds, medians over all steps but the first.

    Args:
        lines: those of the run's metrics, whose `step` is the number of batches that were trained on by then.
    """
    pairs = []
    for before, line in pairwise(lines):
        step = max(step for step in batches if step < line["step"])
        took = {part: line[f"seconds/{part}"] for part in ("rollout", "train", "publish")}
        pairs.append((predicted(batches[step], rates), took | {"step": line["time"] - before["time"]}))
    return {
        part: (median(simulated[part] for simulated, _ in pairs), median(measured[part] for _, measured in pairs))
        for part in pairs[0][0]
    }


def main() -> int:
    """Measure or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "check"))
    parser.add_argument("run", type=Path)
    parser.add_argument("rates", type=Path)
    parser.add_argument("--server-ms", type=float, default=0.43)
    parser.add_argument("overrides", nargs="*")
    options, overrides = parser.parse_known_args()
    config = load(TrainRLConfig, "train_rl", [*overrides, *options.overrides], check_train_rl)
    if options.command == "measure":
        measured_rates = asyncio.run(measure(options.run, config, options.server_ms / 1000))
        rates = TypeAdapter(Rates).dump_python(measured_rates)
        options.rates.write_text(yaml.safe_dump(rates, sort_keys=False, default_flow_style=None), encoding="utf-8")
        print(f"{options.rates} is written")
        return 0
    lines = [line for line in read_lines(options.run / METRICS_NAME) if "reward" in line]
    compared = compare(batches_of(options.run, config), lines, read_rates(options.rates))
    print("| seconds | simulated | measured | ratio |\n|---|---|---|---|")
    for part, (simulated, took) in compared.items():
        print(f"| {part} | {simulated:.2f} | {took:.2f} | {simulated / took:.2f} |")
    return int(abs(compared["step"][0] / compared["step"][1] - 1) > LARGEST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
