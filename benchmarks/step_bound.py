"""The least that the steps of a run could have taken on this machine: the same messages in the same order straight on
the two engines, without server and journal, and a bare forward, backward, optimizer step and publication.

    python -m benchmarks.step_bound RUN_FOLDER [overrides of the training]

The journal of RUN_FOLDER says which messages were sampled. Each is sampled again with as many tokens, after the tokens
that it followed, when the message before it is there; conversations of a batch go on concurrently, as in the run. (What
is sampled now has other tokens than in the run, so an engine computes each message once more than it had to there.) No
judge is called. The trainer's part computes log-probs of the sampled tokens only, in micro-batches of the run's size
with rows of about one length. The engines have the cores of the configuration. Prints a line of JSON with the seconds
of each step and of its parts.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.models.policy_folder import policy_name, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.chat_template import encode_chat
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.store.journal import JOURNAL_NAME, begins_anew, read_journal, request_of
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.trainer.model_loading import prepare_cpu

if TYPE_CHECKING:
    from vllm import SamplingParams


class ReplayingEngine(VllmEngine):
    """An engine that samples exactly as many tokens as it is asked for."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of its prefix cache."""
        return self._engine.vllm_config.cache_config.block_size

    @property
    def pass_tokens(self) -> int:
        """The most tokens that it reads and samples in one pass."""
        return self._engine.vllm_config.scheduler_config.max_num_batched_tokens

    def _sampling_params(self, sampling: Sampling, room: int) -> "SamplingParams":
        params = super()._sampling_params(sampling, room)
        params.ignore_eos, params.stop_token_ids = True, []
        return params

    async def replay(self, message: "Message", sampling: Sampling) -> None:
        """Sample a message again, with log-probs if it is the teacher's, as in a training."""
        message_sampling = replace(sampling, max_tokens=message.tokens)
        await self._sample(message.prompt_ids, message_sampling, with_logprobs=message.role == "teacher")


@dataclass(frozen=True)
class Message:
    """A message to sample again: by whom, after which tokens, and of how many."""

    role: str
    prompt_ids: list[int]
    tokens: int


@dataclass
class Replayed:
    """A conversation of the run: its messages, its whole context, and which of its tokens the teacher sampled."""

    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)


def batches_of(run: Path, config: TrainRLConfig) -> dict[int, list[Replayed]]:
    """The conversations of each step of a training, in the order of the steps."""
    tokenizer = load_tokenizer("teacher_model", config.teacher_model.model_name_or_path)
    batches: dict[int, list[Replayed]] = defaultdict(list)
    for step, events in trained_on(run):
        *turns, last = events
        batches[step].append(_replayed(turns, last["record"], config, tokenizer))
    return dict(sorted(batches.items()))


def trained_on(run: Path) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """The step, and the messages and the end as events of the journal, of each conversation that a run was trained on:
    no evaluation on the same server, none that was played anew with other weights, and none that did not end."""
    training = f"{(run / 'run_id').read_text(encoding='utf-8')}-step"
    batch_events: dict[str, Mapping[str, Any]] = {}
    played: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for event in read_journal(run / JOURNAL_NAME):
        request = event.get("request") or request_of(event.get("conversation", ""))
        if not request.startswith(training):
            continue
        if event["event"] == "batch":
            before = batch_events.get(request)
            if before is None or begins_anew(before, event):
                played[request] = defaultdict(list)
            batch_events[request] = event
        elif event["event"] in ("turn", "conversation"):
            played[request][event["conversation"]].append(event)
    for request, conversations in played.items():
        for events in conversations.values():
            if events[-1]["event"] == "conversation":
                yield batch_events[request]["step"], events


def _replayed(
    turns: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
    config: TrainRLConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Replayed:
    replayed = Replayed()
    dialogue = [{"role": turn["role"], "content": turn["text"]} for turn in record["turns"] if turn["given"]]
    for event in turns:
        turn = event["turn"]
        if turn["role"] == "teacher":
            if not replayed.ids:
                replayed.ids, replayed.mask = list(event["prompt_ids"]), [0] * len(event["prompt_ids"])
            replayed.messages.append(Message("teacher", list(replayed.ids), turn["tokens"]))
        else:
            replayed.messages.append(
                Message("student", _student_prompt(turn, dialogue, record, config, tokenizer), turn["tokens"])
            )
        replayed.ids += event["ids"]
        replayed.mask += [1] * len(event["logprobs"]) + [0] * (len(event["ids"]) - len(event["logprobs"]))
        dialogue.append({"role": turn["role"], "content": visible_text(turn["text"])})
    return replayed


def _student_prompt(
    turn: Mapping[str, Any],
    said: Sequence[dict[str, str]],
    record: Mapping[str, Any],
    config: TrainRLConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    generation = config.generation
    named = {"student_name": record["student_name"], "problem": record["problem"]}
    persona = generation.student_personas_prompts_paths[turn["persona"]]
    messages = [{"role": "system", "content": render(persona, **named, include_thinking=generation.use_thinking)}]
    for message in said:
        text = message["content"].replace(END_OF_CONVERSATION, "").strip()
        messages.append({"role": "user" if message["role"] == "teacher" else "assistant", "content": text})
    return encode_chat(tokenizer, messages)


async def play(batch: Sequence[Replayed], engines: Mapping[str, ReplayingEngine], config: TrainRLConfig) -> float:
    """Sample all messages of a batch again; returns the seconds."""
    samplings = {
        "teacher": Sampling.of(config.teacher_model.vllm, 0),
        "student": Sampling.of(config.student_model.vllm, 0),
    }

    async def converse(conversation: Replayed) -> None:
        for message in conversation.messages:
            await engines[message.role].replay(message, samplings[message.role])

    started = time.perf_counter()
    await asyncio.gather(*map(converse, batch))
    return time.perf_counter() - started


def train(
    batch: Sequence[Replayed], model: PreTrainedModel, optimizer: torch.optim.Optimizer, options: TrainConfig
) -> float:
    """A bare policy-gradient step on the sampled tokens; returns the seconds."""
    started = time.perf_counter()
    for rows in _micro_batches(batch, options.per_device_train_batch_size):
        width = max(len(row.ids) for row in rows)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            mask[index, : len(row.mask)] = torch.tensor(row.mask, dtype=torch.bool)
        # The hidden state at a position predicts the token at the next one.
        sampled = mask[:, 1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][sampled]
            logits = model.lm_head(hidden)
        cross_entropy(logits.float(), ids[:, 1:][sampled], reduction="sum").div(1000).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started


def _micro_batches(batch: Sequence[Replayed], size: int) -> Iterator[Sequence[Replayed]]:
    by_length = sorted(batch, key=lambda row: len(row.ids))
    for start in range(0, len(batch), size):
        yield by_length[start : start + size]


async def publish(model: PreTrainedModel, engine: ReplayingEngine, folder: Path, version: int) -> float:
    """Write the weights and have the teacher's engine load them; returns the seconds."""
    started = time.perf_counter()
    policy = PolicyVersion("bound", version)
    target = folder / policy_name(version)
    write_policy(target, policy, model.save_pretrained)
    await engine.load_policy(target, policy, timeout_s=60)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


async def measure(run: Path, config: TrainRLConfig) -> dict[str, list[float]]:
    """The seconds of each step's parts."""
    batches = list(batches_of(run, config).values())
    prepare_cpu(config.train.dtype)
    engines = {
        "teacher": await ReplayingEngine.start(config.teacher_model, config.seed, config.generation),
        "student": await ReplayingEngine.start(config.student_model, config.seed, config.generation),
    }
    model = AutoModelForCausalLM.from_pretrained(
        config.teacher_model.model_name_or_path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    parts: dict[str, list[float]] = defaultdict(list)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for version, batch in enumerate(batches):
                parts["publish"].append(await publish(model, engines["teacher"], Path(folder), version))
                parts["rollout"].append(await play(batch, engines, config))
                parts["train"].append(train(batch, model, optimizer, config.train))
    finally:
        for engine in engines.values():
            engine.shutdown()
    parts["step"] = [sum(parts_of_step) for parts_of_step in zip(*parts.values(), strict=True)]
    return parts


def main() -> None:
    """Measure, and print the seconds."""
    run, overrides = Path(sys.argv[1]), sys.argv[2:]
    config = load(TrainRLConfig, "train_rl", overrides, check_train_rl)
    print(json.dumps(asyncio.run(measure(run, config))))


if __name__ == "__main__":
    main()
