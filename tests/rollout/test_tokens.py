"""Token in, token out, on a real engine: the server returns exactly the tokens that the engine was given and sampled.

The model has random weights and a chat template that drops thoughts from history, and it is made to think often.
"""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python
from transformers import AutoModelForCausalLM, AutoTokenizer

from classroom_rl.config.load import load
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.engines.vllm.engine import VllmEngine
from classroom_rl.environments.classroom.config import classroom_rules
from classroom_rl.environments.classroom.environment import Classroom
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.rollout import tokens
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import Journal
from classroom_rl.rollout.thoughts import visible_text
from classroom_rl.rollout.tokens import AuxSample, TokenBuffer, Turn
from classroom_rl.rollout.tools.tool import ToolCall
from classroom_rl.server.sampling_service import SamplingService
from tests.conftest import GPU_SHARE
from tests.server.test_sampling_service import logprob_differences, request_for
from tests.support.scripted_engine import ScriptedEngine

_FORGETFUL_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'].split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


class _Listener:
    """Passes everything on to the real engine and keeps what went in and came out."""

    def __init__(self, engine: VllmEngine):
        self._engine = engine
        self.calls: list[tuple[list[int], Completion]] = []

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self._engine.generate(prompt_ids, sampling)
        self.calls.append((list(prompt_ids), completion))
        return completion


def thoughtful_model(blank: Path, folder: Path) -> Path:
    """The untrained model with `<think>` and `</think>` as tokens that it is likely to sample."""
    shutil.copytree(blank, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = _FORGETFUL_TEMPLATE
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    loud = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
    with torch.no_grad():
        ids = tokenizer("<|im_start|>system\nYou teach English.<|im_end|>", return_tensors="pt").input_ids
        hidden = model.model(ids).last_hidden_state[0].mean(0)
        model.get_input_embeddings().weight[loud] = 4.5 * hidden / hidden.square().sum()
    model.save_pretrained(folder)
    return folder


async def not_cached(engine: VllmEngine, prompt_ids: list[int]) -> int:
    """How many of a prompt's tokens the engine would read again."""
    from vllm.sampling_params import SamplingParams

    request = engine.client.generate({"prompt_token_ids": prompt_ids}, SamplingParams(max_tokens=1), "again")
    (output,) = [output async for output in request]
    return len(prompt_ids) - output.num_cached_tokens


def service_of(config: TrainRLConfig, folder: Path, teacher: Any, student: Any, max_tokens: int) -> SamplingService:
    """A classroom in which these engines talk."""
    sampling = Sampling(1.0, max_tokens=max_tokens)
    roles = Roles(teacher, sampling, student, sampling, RubricJudge(), {"teacher": teacher})
    weights, journal = reward_weights(config), Journal(folder)
    rules = classroom_rules(config.generation, weights, 1024, config.reward_model.grades)
    classroom = Classroom(config.generation, roles, journal, weights, rules)
    return SamplingService(Runner(classroom, journal, weights), journal)


async def play(
    model_folder: Path, run_folder: Path, request: SampleRequest
) -> tuple[list[ConversationRecord], list, int, Completion]:
    options = {"max_length": 1024, "gpu_memory_utilization": GPU_SHARE, "enforce_eager": True, "cpu_cores": "0"}
    model = ModelConfig(str(model_folder), VllmConfig(1.0, dtype="float32", **options))
    config = load(TrainRLConfig, "train_rl", ["generation.max_turns=7", "generation.max_tokens_per_turn=16"])
    engine = await VllmEngine.start(model, 5, config.generation)
    try:
        teacher = _Listener(engine)
        service = service_of(config, run_folder, teacher, engine, max_tokens=16)
        records = (await service.sample(request)).conversations
        longest = max((prompt for prompt, _ in teacher.calls), key=len)
        chat_answer = await engine.chat([{"role": "user", "content": "Say hello."}], Sampling(1.0, max_tokens=16))
        return records, teacher.calls, await not_cached(engine, longest), chat_answer
    finally:
        engine.shutdown()


@pytest.mark.gpu
@pytest.mark.engines
def test_tokens_are_those_of_the_engine(world: Path, lessons: list[str], tmp_path: Path) -> None:
    folder = thoughtful_model(world / "blank", tmp_path / "model")
    request = request_for(lessons, "tokens", groups=4, size=6)
    records, calls, read_again, chat_answer = asyncio.run(play(folder, tmp_path / "run", request))
    assert read_again <= 32, "old turns would be read again at each turn"
    assert chat_answer.tokens > 0 and chat_answer.logprobs == (), "what nobody trains on costs no log-probs"

    by_prompt = {(tuple(prompt), completion.ids): completion for prompt, completion in calls}
    turns = 0
    for record in records:
        for turn in record.turns:
            if turn.role != "teacher":
                continue
            first, last = turn.span
            prompt = tuple(record.prompt_ids + record.completion_ids[:first])
            completion = by_prompt[prompt, tuple(record.completion_ids[first:last])]
            assert record.logprobs[first:last] == list(completion.logprobs)
            assert record.mask[first:last] == [1] * (last - first)
            turns += 1
        sampled = {i for turn in record.turns if turn.span for i in range(*turn.span)}
        assert [i for i, bit in enumerate(record.mask) if bit] == sorted(sampled)
        assert all(record.logprobs[i] == 0.0 for i, bit in enumerate(record.mask) if not bit)
    assert turns == len(calls)

    thoughts = [
        turn.text for record in records for turn in record.turns if turn.role == "teacher" and "<think>" in turn.text
    ]
    assert len(thoughts) >= 5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    thoughtful = [
        record
        for record in records
        if any("</think>" in turn.text for turn in record.turns[:-1] if turn.role == "teacher")
    ]
    assert thoughtful and all("</think>" in tokenizer.decode(record.completion_ids) for record in thoughtful)
    cut = [turn for record in records for turn in record.turns if turn.role == "teacher" and not turn.ended]
    assert cut and all(turn.tokens == 16 for turn in cut)

    class Response:
        conversations = records

    differences = logprob_differences(folder, Response)
    assert differences.abs().max() < 0.02 and differences.abs().mean() < 0.002
    entropy = -sum(
        logprob for record in records for logprob, bit in zip(record.logprobs, record.mask, strict=True) if bit
    ) / len(differences)
    assert entropy > 1.0, "certain tokens would agree whatever was wrong"


def test_thoughts_are_hidden_from_the_student(world: Path, lessons: list[str], tmp_path: Path) -> None:
    """Reads the journal's turns against what the student's prompt may hold; the engine is scripted here."""
    tokenizer = AutoTokenizer.from_pretrained(world / "blank")
    lines = iter(["<think>secret plan</think>Say hello.", "Now go.<think>it is the secret", "Fine."])
    teacher = ScriptedEngine(tokenizer, lambda _: next(lines))
    student = ScriptedEngine(tokenizer, lambda _: "Hello.")
    config = load(TrainRLConfig, "train_rl", ["generation.max_turns=5"])
    service = service_of(config, tmp_path, teacher, student, max_tokens=48)
    record = asyncio.run(service.sample(request_for(lessons, "hidden", groups=1, size=1))).conversations[0]
    prompts = [tokenizer.decode(prompt) for prompt, _, _ in student.calls]
    assert len(prompts) == 2 and "Say hello." in prompts[0] and "Now go." in prompts[1]
    assert not any("secret" in prompt for prompt in prompts)
    assert "secret plan" in tokenizer.decode(teacher.calls[1][0])
    assert [visible_text(turn.text) for turn in record.turns] == ["Say hello.", "Hello.", "Now go.", "Hello.", "Fine."]
    assert "secret" not in json.dumps(record.model_dump()["verdicts"])


IDS = st.lists(st.integers(0, 1000), max_size=5)

PIECES = st.lists(st.tuples(st.booleans(), IDS), max_size=10)


def test_sampled_tokens_are_masked_in_and_given_ones_are_not():
    buffer = TokenBuffer([1, 2])
    assert buffer.append_sampled([10, 11], [-0.25, -1.5]) == (0, 2)
    buffer.append_given([90, 91, 92])
    assert buffer.append_sampled([12], [-3.0]) == (5, 6)
    assert buffer.prompt_ids == [1, 2]
    assert buffer.completion_ids == [10, 11, 90, 91, 92, 12]
    assert buffer.mask == [1, 1, 0, 0, 0, 1]
    assert buffer.logprobs == [-0.25, -1.5, 0.0, 0.0, 0.0, -3.0]
    assert buffer.ids == [1, 2, 10, 11, 90, 91, 92, 12]
    assert len(buffer) == 8


@pytest.mark.parametrize(("ids", "logprobs"), [([1, 2], [-0.1]), ([1], [-0.1, -0.2]), ([], [-0.1]), ([1], [])])
def test_unequal_lengths_are_refused_and_leave_the_buffer_alone(ids, logprobs):
    buffer = TokenBuffer([1])
    with pytest.raises(ValueError, match=f"{len(ids)} sampled tokens came with {len(logprobs)} log-probs"):
        buffer.append_sampled(ids, logprobs)
    assert (buffer.completion_ids, buffer.mask, buffer.logprobs) == ([], [], [])


@given(prompt=IDS, pieces=PIECES)
def test_ids_mask_and_logprobs_stay_the_same_length_whatever_is_appended(prompt, pieces):
    buffer = TokenBuffer(prompt)
    expected_ids, expected_mask = [], []
    for sampled, ids in pieces:
        if sampled:
            start, end = buffer.append_sampled(ids, [-float(i + 1) for i in ids])
            assert buffer.completion_ids[start:end] == ids
        else:
            buffer.append_given(ids)
        expected_ids += ids
        expected_mask += [int(sampled)] * len(ids)
    assert buffer.ids == prompt + expected_ids
    assert buffer.mask == expected_mask
    assert buffer.logprobs == [-float(i + 1) * m for i, m in zip(expected_ids, expected_mask, strict=True)]
    assert len(buffer) == len(prompt) + len(expected_ids)


def test_the_buffer_keeps_no_hold_of_the_lists_it_was_given():
    prompt, ids = [1], [2]
    buffer = TokenBuffer(prompt)
    buffer.append_given(ids)
    prompt.append(9)
    ids.append(9)
    assert buffer.ids == [1, 2]


def test_a_message_without_calls_is_written_as_before_there_were_tools():
    fields = "role text persona tokens ended span policy given review drafts replaced".split()
    assert list(to_jsonable_python(Turn("teacher", "Hello."))) == fields
    assert "mask" not in to_jsonable_python(AuxSample("draft", 0, 0, (1,)))
    call = ToolCall("1", "shop", {"item": "tea"}, "raw", "tea", None, 0.5, 3, 1)
    written = to_jsonable_python({"turn": Turn("teacher", "Hello.", tool_calls=(call,))})["turn"]
    assert list(written) == [*fields, "tool_calls"]
    assert TypeAdapter(Turn).validate_python(written) == Turn("teacher", "Hello.", tool_calls=(call,))


def test_the_former_name_of_auxiliary_samples_forwards_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Branch is called AuxSample now"):
        assert tokens.Branch is AuxSample
