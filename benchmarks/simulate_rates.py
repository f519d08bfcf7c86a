"""Rates for benchmarks/simulate.py, measured with a run's models on this machine, and the simulation against that run.

    python -m benchmarks.simulate_rates measure RUN_FOLDER RATES.yaml [overrides of the training]
    python -m benchmarks.simulate_rates check RUN_FOLDER RATES.yaml [overrides of the training]

`measure` takes the run's models and conversations, but no time that the run took: it has both engines sample and read
at once, each so many sequences at a time, and trains on and publishes one batch as benchmarks/step_bound.py does. The
run needs an embedded judge, whose time is not measured.

`check` simulates each step of the run but the first, with the messages that were really said, and prints its seconds
beside those in metrics.jsonl. The exit status is 1 if a whole step is more than 15 % off.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch
import yaml
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from benchmarks.simulate import Conversation, EngineRates, Rates, play, read_rates
from benchmarks.step_bound import Message, Replayed, ReplayingEngine, batches_of, publish, train
from config.checks import check_train_rl
from config.load import load
from config.train_rl_model import TrainRLConfig
from src.results.run_folder import METRICS_NAME, read_lines
from src.rollout.engines import Sampling
from src.training.cpu import prepare_cpu

SEATS = ("teacher", "student")
LARGEST_ERROR = 0.15
_RUNNING = (1, 4, 16, 64)
"""How many sequences are sampled at once."""
_SAMPLED = 17
"""Tokens of each; the first is sampled with the reading."""
_READING = 8
"""Conversations whose messages are read, one after the other."""
_TIMES = 3


def growth(messages: Sequence[Message]) -> Iterator[int]:
    """How many tokens are new in the prompt of each message of one seat."""
    lengths = [0, *(len(message.prompt_ids) for message in messages)]
    return (after - before for before, after in pairwise(lengths))


def conversation_of(replayed: Replayed) -> Conversation:
    """A conversation as it is simulated.

    Raises:
        ValueError: if teacher and student do not take turns in it.
    """
    seats = [message.seat for message in replayed.messages]
    if seats != [SEATS[place % 2] for place in range(len(seats))]:
        raise ValueError(f"The simulation knows teacher and student in turns, not {seats}.")
    messages = tuple(message.tokens for message in replayed.messages)
    return Conversation(len(replayed.messages[0].prompt_ids), messages, 0.0)


def other_prompts(batch: Sequence[Replayed], seat: str, token: int) -> list[list[int]]:
    """The last prompts of a seat, each begun with another token, so that no engine has read it."""
    prompts = [[each for each in replayed.messages if each.seat == seat][-1].prompt_ids for replayed in batch]
    return [[token + place, *prompt] for place, prompt in enumerate(prompts)]


async def _generate(
    engine: ReplayingEngine, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int
) -> float:
    """Sample so many tokens after each prompt, all at once; returns the seconds."""
    started = time.perf_counter()
    limited = replace(sampling, max_tokens=tokens)
    await asyncio.gather(*(engine.generate(prompt, limited) for prompt in prompts))
    return time.perf_counter() - started


async def decode_rate(engine: ReplayingEngine, prompts: Sequence[list[int]], sampling: Sampling) -> float:
    """Tokens per second of all these sequences together."""
    found = []
    await _generate(engine, prompts, sampling, 1)  # from here on, the prompts are in the cache
    for _ in range(_TIMES):
        reading = await _generate(engine, prompts, sampling, 1)
        seconds = await _generate(engine, prompts, sampling, _SAMPLED) - reading
        found.append(len(prompts) * (_SAMPLED - 1) / seconds)
    return median(found)


async def reading_rate(engine: ReplayingEngine, seat: str, batch: Sequence[Replayed], sampling: Sampling) -> float:
    """Tokens per second that the engine reads of a seat's messages, turn by turn, each after what was said before."""
    seconds, tokens = 0.0, 0
    for replayed in batch:
        own = [message for message in replayed.messages if message.seat == seat]
        tokens += sum(growth(own))
        for message in own:
            seconds += await _generate(engine, [[replayed.ids[-1], *message.prompt_ids[1:]]], sampling, 1)
    return tokens / seconds


async def engine_rates(
    engine: ReplayingEngine, seat: str, batch: Sequence[Replayed], config: TrainRLConfig
) -> EngineRates:
    """The rates of one engine, while the other one works as much."""
    options = config.teacher_model.vllm if seat == "teacher" else config.student_model.vllm
    sampling = Sampling.of(options, 0)
    decode = {}
    for number, running in enumerate(count for count in _RUNNING if count <= options.max_num_seqs):
        prompts = other_prompts((list(batch) * (running // len(batch) + 1))[:running], seat, 10 + 100 * number)
        decode[running] = round(await decode_rate(engine, prompts, sampling), 1)
    prefill = await reading_rate(engine, seat, batch[:_READING], sampling)
    return EngineRates(decode, round(prefill, 1), options.max_num_seqs, reading_holds_up=True)


async def measure(run: Path, config: TrainRLConfig) -> Rates:
    """The rates of a run's models on this machine."""
    batches = batches_of(run, config)
    batch = batches[0]
    prepare_cpu(config.train.dtype)
    engines = {
        seat: await ReplayingEngine.start(getattr(config, f"{seat}_model"), config.seed, config.generation)
        for seat in SEATS
    }
    try:
        found = await asyncio.gather(*(engine_rates(engines[seat], seat, batch, config) for seat in SEATS))
        model = AutoModelForCausalLM.from_pretrained(
            config.teacher_model.model_name_or_path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
        with tempfile.TemporaryDirectory() as folder:
            published = [await publish(model, engines["teacher"], Path(folder), version) for version in range(_TIMES)]
        train(batch[: config.train.per_device_train_batch_size], model, optimizer, config.train)  # asks for memory
        trained = train(batch, model, optimizer, config.train)
    finally:
        for engine in engines.values():
            engine.shutdown()
    conversations = [conversation_of(each) for each in batch]
    gigabytes = sum(each.numel() * each.element_size() for each in model.state_dict().values()) / 1e9
    lengths = {seat: [m.tokens for each in batch for m in each.messages if m.seat == seat] for seat in SEATS}
    return Rates(
        teacher=found[0],
        student=found[1],
        train_tokens_s=round(sum(each.tokens for each in conversations) / trained, 1),
        judge_s=[0.0],
        weights_gb=round(gigabytes, 4),
        publish_gb_s=round(gigabytes / median(published), 3),
        conversations=len(batch),
        messages=round(fmean(len(each.messages) for each in conversations)),
        teacher_tokens=lengths["teacher"],
        student_tokens=lengths["student"],
        prompt_tokens=round(fmean(each.prompt for each in conversations)),
        engine_gpus=1,
        sources={
            "engines, training, publishing": f"measured with the models of {run}",
            "judge": "embedded; its time was not measured",
            "lengths": f"of the first batch of {run}",
        },
    )


def predicted(batch: Sequence[Replayed], rates: Rates) -> dict[str, float]:
    """The simulated seconds of a step that plays this batch on one server and trains on it."""
    conversations = [conversation_of(each) for each in batch]
    parts = {
        "rollout": play(rates, conversations, servers=1).judged,
        "train": sum(each.tokens for each in conversations) / rates.train_tokens_s,
        "publish": rates.weights_gb / rates.publish_gb_s,
    }
    return parts | {"step": sum(parts.values())}


def compare(
    batches: Sequence[Sequence[Replayed]], lines: Sequence[Mapping[str, float]], rates: Rates
) -> dict[str, tuple[float, float]]:
    """By part of a step: its simulated and its measured seconds, medians over all steps but the first.

    Args:
        lines: those of the run's metrics, one for each batch.
    """
    simulated = [predicted(batch, rates) for batch in batches[1:]]
    took = [
        {part: line[f"seconds/{part}"] for part in ("rollout", "train", "publish")}
        | {"step": line["time"] - before["time"]}
        for before, line in pairwise(lines)
    ]
    return {part: (median(e[part] for e in simulated), median(e[part] for e in took)) for part in simulated[0]}


def main() -> int:
    """Measure or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "check"))
    parser.add_argument("run", type=Path)
    parser.add_argument("rates", type=Path)
    parser.add_argument("overrides", nargs="*")
    options, overrides = parser.parse_known_args()
    config = load(TrainRLConfig, "train_rl", [*overrides, *options.overrides], check_train_rl)
    if options.command == "measure":
        rates = TypeAdapter(Rates).dump_python(asyncio.run(measure(options.run, config)))
        options.rates.write_text(yaml.safe_dump(rates, sort_keys=False, default_flow_style=None), encoding="utf-8")
        print(f"{options.rates} is written")
        return 0
    lines = [line for line in read_lines(options.run / METRICS_NAME) if "reward" in line]
    found = compare(batches_of(options.run, config), lines, read_rates(options.rates))
    print("| seconds | simulated | measured | ratio |\n|---|---|---|---|")
    for part, (simulated, took) in found.items():
        print(f"| {part} | {simulated:.2f} | {took:.2f} | {simulated / took:.2f} |")
    return int(abs(found["step"][0] / found["step"][1] - 1) > LARGEST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
