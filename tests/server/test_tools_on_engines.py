"""Tools on real engines: a tiny tutor that has learned to call the calculator, on a vllm_server.py of its own, and a
training on what it said. What is trained on is what the engine sampled, with its log-probs; results have mask 0."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from classroom_rl.config.base import ToolLimitsConfig
from classroom_rl.rollout.chat_template import ReplyFrame, encode_text
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.tools.calculator import built_in_toolbox
from classroom_rl.rollout.tools.formats import CLOSE, OPEN, ToolFrame
from classroom_rl.rollout.tools.tool import ToolLimits
from tests.conftest import ROOT, RunningServer, free_port, quickstart_overrides, server_with
from tests.server.test_sampling_service import logprob_differences, request_for

pytestmark = pytest.mark.full  # a model is trained, and a server started; scripted engines play the same in make test

CALL = f"{OPEN}{json.dumps({'name': 'calculator', 'arguments': {'expression': '6*7'}})}{CLOSE}"
AFTER = "It is 42. Where do you go?"
CONTEXT = 1024
TOOLS = [
    "generation.teacher_tools=[calculator]",
    f"generation.max_tokens_in_conversation={CONTEXT}",
    "generation.max_tokens_per_turn=160",
    f"teacher_model.vllm.max_length={CONTEXT}",
]


def write_caller(blank: Path, folder: Path, tokenizer: PreTrainedTokenizerBase, lessons: list[str]) -> None:
    """A model that calls the calculator at the beginning of every message, and then says what it got."""
    limits = ToolLimitsConfig()
    toolbox = built_in_toolbox(["calculator"], ToolLimits(limits.calls, limits.seconds, limits.characters))
    frame = ToolFrame(tokenizer, ReplyFrame(tokenizer), toolbox.schemas())
    reply = [*encode_text(tokenizer, CALL), frame.turn_end_id, *frame.results(["42"])]
    reply += [*encode_text(tokenizer, AFTER), frame.turn_end_id]
    rng, words = Random(1), " ".join(lessons).split()
    shutil.copytree(blank, folder)
    model = AutoModelForCausalLM.from_pretrained(blank, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):  # after whatever stands before it: prompts, and what students say
        context = " ".join(rng.choices(words, k=rng.randrange(200)))
        row = [*frame.encode_chat([{"role": rng.choice(["system", "user"]), "content": context}]), *reply]
        logits = model(torch.tensor([row])).logits[0, -len(reply) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(reply))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.02, "it has learned its lines"
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def caller(
    world: Path, tokenizer, lessons: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    run_folder = tmp_path_factory.mktemp("tools")
    write_caller(world / "blank", run_folder / "caller", tokenizer, lessons)
    port = free_port()
    overrides = [*quickstart_overrides(run_folder, world / "blank", world, port), *TOOLS]
    overrides.append(f"teacher_model.model_name_or_path={run_folder / 'caller'}")
    with server_with(overrides, run_folder, port) as running:
        yield running


def test_what_is_trained_on_is_what_the_engine_sampled(caller: RunningServer, lessons: list[str], tokenizer) -> None:
    response = caller.client.sample(request_for(lessons, "tools"))
    calls = [call for record in response.conversations for turn in record.turns for call in turn.tool_calls]
    answered = 0
    assert {call.result for call in calls if not call.error} == {"42"}
    differences = logprob_differences(caller.run_folder / "caller", response)
    assert len(differences) > 200 and differences.abs().max() < 2e-3
    for record in response.conversations:
        (row, *_) = rows_of(record)
        assert row.mask == record.mask and len(row.mask) == len(row.completion_ids)
        for turn in record.turns:
            if not turn.tool_calls:
                continue
            succeeded = [call for call in turn.tool_calls if not call.error]
            answered += len(succeeded)
            ids, mask = (list(values[slice(*turn.span)]) for values in (record.completion_ids, record.mask))
            sampled = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
            inserted = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if not bit])
            assert all(call.raw in sampled for call in succeeded) and OPEN not in inserted
            assert all(call.result in inserted for call in turn.tool_calls)
            assert sum(mask) == turn.tokens
    assert answered >= len(response.conversations)


def test_a_training_steps_on_them(caller: RunningServer) -> None:
    """Trainer and engine agree about every sampled token, also behind results."""
    result = subprocess.run(
        [sys.executable, "train_rl.py", *caller.overrides, "train.max_steps=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in (caller.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.002 for line in lines)
    assert all(line["tools/calls_per_conversation"] >= 1 for line in lines)
