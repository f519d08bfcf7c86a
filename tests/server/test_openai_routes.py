"""OpenAI's API on the teacher: real clients with real engines, and answers that training does not wait for."""

import asyncio
import json
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import requests
import torch
import yaml
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.engines.vllm.weights_gate import WeightsGate
from classroom_rl.environments.toy_language.corpus import DRILL_PROMPT
from classroom_rl.environments.toy_language.grammar import find_slips
from classroom_rl.environments.toy_language.scripts import hint
from classroom_rl.evaluation.run import evaluate
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.chat_template import ReplyFrame, encode_chat
from classroom_rl.server.openai_routes import OnePolicyPerAnswer, _GatedEngine
from tests.conftest import ROOT, RunningServer
from tests.server.test_sampling_service import publish_random_weights, request_for
from tests.support.configs import loaded
from tests.support.mathtutorbench import make_clone
from tests.support.published_rows import mathdial_flat
from tests.support.tutor_messages import write_rows

SAY_HELLO = [{"role": "system", "content": "You teach."}, {"role": "user", "content": "Say hello."}]
ROUTES = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.client.url}/v1", api_key="none", max_retries=0, timeout=120)


def model_name(server: RunningServer) -> str:
    prefix = "teacher_model.model_name_or_path="
    return next(override.removeprefix(prefix) for override in server.overrides if override.startswith(prefix))


def scored_chat(
    client: openai.OpenAI, seed: int, max_tokens: int = 24
) -> tuple[str, torch.Tensor, list[int], list[int]]:
    """The policy that answered, the log-probs of its tokens, the ids of the prompt and of the answer."""
    raw = client.chat.completions.with_raw_response.create(
        model="teacher",
        messages=SAY_HELLO,
        seed=seed,
        max_tokens=max_tokens,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    body = json.loads(raw.text)
    choice = body["choices"][0]
    logprobs = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
    return raw.headers["x-policy-version"], logprobs, body["prompt_token_ids"], choice["token_ids"]


def difference(folder: Path, logprobs: torch.Tensor, prompt_ids: list[int], ids: list[int]) -> float:
    """Largest difference of an answer's log-probs from those of transformers with the weights in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        all_logprobs = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
    return (all_logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0] - logprobs).abs().max().item()


def test_models_are_the_teacher_and_its_configured_name(server: RunningServer, client: openai.OpenAI) -> None:
    response = client.models.with_raw_response.list()
    assert [model.id for model in response.parse()] == ["teacher", model_name(server)]
    assert response.headers["x-policy-version"] == str(server.client.health().policy)
    assert response.parse().data[0].max_model_len == 1024


def benchmark_of(server: RunningServer, name: str, path: str, folder: Path, *overrides: str) -> EvalConfig:
    arguments = [f"benchmark.path={path}", f"server_url={server.client.url}", "generation.max_tokens_per_turn=16"]
    arguments += [f"logging.save_dir={folder}", "teacher_model.vllm.temperature=1.0", *overrides]
    return loaded("eval", "--config-name", name, *arguments)


def test_published_benchmarks_are_answered_by_the_servers_tutor(server: RunningServer, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mathdial.jsonl", [mathdial_flat(number) for number in range(2)])
    figures = evaluate(benchmark_of(server, "mathdial", str(path), tmp_path / "mathdial"))
    assert set(figures["failures"]) <= {"empty"}, "random weights may say nothing; no request is refused"
    assert figures["turns"] == 6 and figures["answered"] > 0 and figures["policy"] == str(server.client.health().policy)
    copies = ", ".join(f"{name}: {path}" for name, path in make_clone(tmp_path / "clone", rows=1).items())
    names = ("solution_correctness", "mistake_location", "mistake_correction", "scaffolding_generation")
    options = (f"benchmark.tasks=[{','.join(names)}]", "score_using_pedagogical_reward=false")
    for is_chat in ("false", "true"):
        more = (*options, f"benchmark.datasets={{{copies}}}", f"benchmark.is_chat={is_chat}")
        folder = tmp_path / f"tasks-{is_chat}"
        tasks = evaluate(benchmark_of(server, "mathtutorbench", str(tmp_path / "clone"), folder, *more))["tasks"]
        assert [(task["asked"], task["answered"]) for task in tasks.values()] == [(2, 2), (2, 2), (1, 1), (1, 1)]


def test_a_chat_is_a_turn_of_the_teacher(
    server: RunningServer, client: openai.OpenAI, world: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The prompt, the weights and the log-probs are those of a conversation."""
    policy = PolicyVersion("chat-test", 1)
    folder = publish_random_weights(server, world, policy, seed=5, shards=False)
    server.client.load_weights(policy, folder)
    served_by, logprobs, prompt_ids, ids = scored_chat(client, seed=3)
    assert served_by == str(policy)
    assert prompt_ids == encode_chat(tokenizer, SAY_HELLO)
    assert len(ids) == len(logprobs) > 8
    assert difference(folder, logprobs, prompt_ids, ids) < 1e-3
    assert difference(world / "blank", logprobs, prompt_ids, ids) > 0.05
    assert scored_chat(client, seed=3)[3] == ids != scored_chat(client, seed=4)[3]


def test_both_names_and_streaming_give_the_same_answer(server: RunningServer, client: openai.OpenAI) -> None:
    def ask(model: str, **more):
        return client.chat.completions.create(model=model, messages=SAY_HELLO, temperature=0, max_tokens=16, **more)

    answer = ask("teacher")
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 16
    assert ask(model_name(server)).choices[0].message.content == answer.choices[0].message.content
    chunks = list(ask("teacher", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content and len(chunks) > 3
    assert chunks[-1].usage == answer.usage


def test_completions_continue_texts_and_score_them(client: openai.OpenAI) -> None:
    """Scoring is what log-likelihood tasks ask for: a prompt sent back with its log-probs."""

    def complete(prompt, **more):
        extra = {"return_token_ids": True}
        return client.completions.create(model="teacher", prompt=prompt, temperature=0, extra_body=extra, **more)

    answers = complete(["Say hello.", "Where is it?"], max_tokens=8, logprobs=1)
    assert [choice.index for choice in answers.choices] == [0, 1] and answers.choices[0].text
    streamed = complete("Say hello.", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answers.choices[0].text
    first_choice = answers.choices[0].model_dump()
    ids = first_choice["prompt_token_ids"] + first_choice["token_ids"]
    scored = complete(ids, max_tokens=1, logprobs=1, echo=True, seed=1234).choices[0].logprobs
    assert len(scored.token_logprobs) == len(ids) + 1 and scored.token_logprobs[0] is None
    scores = scored.token_logprobs[len(first_choice["prompt_token_ids"]) : -1]
    assert scores == pytest.approx(first_choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert scores == [max(top.values()) for top in scored.top_logprobs[-len(scores) - 1 : -1]]


def test_curl_chats_and_streams(server: RunningServer) -> None:
    def curl(body: dict) -> str:
        command = ["curl", "-sSN", "-i", f"{server.client.url}/v1/chat/completions", "-d", json.dumps(body)]
        result = subprocess.run(
            [*command, "-H", "Content-Type: application/json"], capture_output=True, text=True, timeout=600, check=True
        )
        return result.stdout.replace("\r\n", "\n")

    body = {"model": "teacher", "messages": SAY_HELLO, "max_tokens": 12, "temperature": 0}
    head, answer = curl(body).split("\n\n", 1)
    assert head.startswith("HTTP/1.1 200") and "\nx-policy-version: " in head
    text = json.loads(answer)["choices"][0]["message"]["content"]
    events = curl(body | {"stream": True}).split("\n\n", 1)[1].strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text


def test_what_cannot_be_answered_is_refused_as_openai_does(server: RunningServer, client: openai.OpenAI) -> None:
    def error(kind: type[openai.APIStatusError], **body) -> dict:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": "teacher", "messages": SAY_HELLO, "max_tokens": 8} | body)
        assert set(caught.value.body) >= {"message", "type", "code"}
        return caught.value.body

    assert "`gpt-4o` does not exist" in error(openai.NotFoundError, model="gpt-4o")["message"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/model")
    assert "`some/model` does not exist" in caught.value.body["message"]
    for name in ("teacher", model_name(server)):
        assert client.models.retrieve(name).id == name
    too_long = [{"role": "user", "content": "word " * 2000}]
    assert "1024" in error(openai.BadRequestError, messages=too_long)["message"]
    assert "1024" in error(openai.BadRequestError, max_tokens=5000)["message"]
    assert "temperature" in error(openai.BadRequestError, temperature=-1)["message"]
    assert error(openai.BadRequestError, messages="hello")["param"]
    for route in ROUTES:
        answer = requests.post(server.client.url + route, data="{", headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert requests.get(f"{server.client.url}/v1/nothing", timeout=60).status_code == 404
    ours = requests.post(f"{server.client.url}/load_weights", json={"version": 1}, timeout=60)
    assert ours.status_code == 422 and set(ours.json()) == {"detail"}
    unknown = requests.get(f"{server.client.url}/conversations/none", timeout=60)
    assert unknown.status_code == 404 and set(unknown.json()) == {"detail"}
    assert server.client.health().status == "ok"


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": "root ::= root"},
        {"grammar": "root ::= a\na ::= root"},
        {"json": {"$ref": "#"}},
        {"json": {"anyOf": [{"$ref": "#"}]}},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    ],
)
def test_a_grammar_without_any_text_is_the_guest_s_fault(client: openai.OpenAI, form: dict) -> None:
    extra = {"structured_outputs": form}
    with pytest.raises(openai.BadRequestError, match="no text that fits the grammar or schema"):
        client.chat.completions.create(model="teacher", messages=SAY_HELLO, max_tokens=8, extra_body=extra)
    with pytest.raises(openai.BadRequestError, match="has no end: give it another branch"):
        client.completions.create(model="teacher", prompt="Hi", max_tokens=8, extra_body=extra)


def test_a_recursive_grammar_with_an_end_is_followed(client: openai.OpenAI) -> None:
    for grammar in ('root ::= root "a" | "b"', 'root ::= "(" root ")" | "x"'):
        answer = client.completions.create(
            model="teacher", prompt="Hi", max_tokens=8, extra_body={"structured_outputs": {"grammar": grammar}}
        )
        assert set(answer.choices[0].text) <= set("ab(x)") and answer.choices[0].text


def test_a_guest_may_ask_for_text_beyond_the_end_of_a_turn(
    client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
) -> None:
    turn_end = {"logit_bias": {str(ReplyFrame(tokenizer).turn_end_id): 100}, "temperature": 0, "max_tokens": 12}
    for extra, tokens in (({}, 1), ({"ignore_eos": True}, 12)):
        answer = client.chat.completions.create(model="teacher", messages=SAY_HELLO, extra_body=extra, **turn_end)
        assert answer.usage.completion_tokens == tokens
        assert answer.choices[0].finish_reason == ("length" if extra else "stop")


def test_weights_are_published_while_guests_chat(
    server: RunningServer, client: openai.OpenAI, world: Path, lessons: list[str]
) -> None:
    """Every answer is wholly of the policy that it names, while conversations are played, too."""
    policies = [PolicyVersion("guests-test", version) for version in (1, 2, 3)]
    folders = {
        str(policy): publish_random_weights(server, world, policy, policy.version, shards=False) for policy in policies
    }
    server.client.load_weights(policies[0], folders[str(policies[0])])
    stopped = threading.Event()

    def chat(seed: int) -> list[tuple]:
        answers = []
        while not stopped.is_set():
            answers.append(scored_chat(client, seed * 1000 + len(answers), max_tokens=100))
        return answers

    with ThreadPoolExecutor(9) as pool:
        guests = [pool.submit(chat, i) for i in range(8)]
        try:
            for policy in policies[1:]:
                batch = pool.submit(server.client.sample, request_for(lessons, f"beside-{policy.version}"))
                assert batch.result(120).conversations[0].state == "END"
                server.client.load_weights(policy, folders[str(policy)])
            server.client.sample(request_for(lessons, "beside-last"))
        finally:
            stopped.set()
    answers = [answer for guest in guests for answer in guest.result()]
    assert {answer[0] for answer in answers} == set(folders)
    for served_by, *answer in answers:
        assert difference(folders[served_by], *answer) < 1e-3


def test_a_guest_that_goes_away_holds_up_nothing(server: RunningServer, client: openai.OpenAI, world: Path) -> None:
    """Its work in the engine ends, too: `load_weights` would find it there and fail."""
    for version in (1, 2, 3):
        body = {"model": "teacher", "prompt": ["Say hello."] * 16, "max_tokens": 900, "stream": True}
        stream = client.completions.create(**body, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        policy = PolicyVersion("gone-test", version)
        folder = publish_random_weights(server, world, policy, seed=version, shards=False)
        loaded = server.client.load_weights(policy, folder)
        assert loaded.policy == policy
    assert scored_chat(client, seed=1)[0] == str(policy)


def test_the_tasks_for_lm_eval_want_the_hints_that_the_rules_of_the_language_find() -> None:
    rows = [json.loads(line) for line in (ROOT / "docs/lm_eval/slips.jsonl").read_text().splitlines()]
    for row in rows:
        slips = find_slips(row["sentence"])
        assert row["hints"][row["right"]] == (hint(slips[0]) if slips else "Good!")
        assert len(set(row["hints"])) == 6
    assert Counter(row["right"] for row in rows) == dict.fromkeys(range(6), 12)
    for name in ("quickstart_hints", "quickstart_hints_said"):
        task = yaml.safe_load((ROOT / f"docs/lm_eval/{name}.yaml").read_text())
        assert task["task"] == name and (ROOT / task["dataset_kwargs"]["data_files"]["test"]).is_file()
        assert task["description"] == DRILL_PROMPT


# An answer that is cut off ---------------------------------------------------------------------------------------


def guarded(app: Callable | FastAPI, gate: WeightsGate, longest_s: float) -> OnePolicyPerAnswer:
    return OnePolicyPerAnswer(app, SimpleNamespace(gate=gate, policy=PolicyVersion("run", 3)), longest_s)


async def post(app: Callable, reads: Callable[[dict], Awaitable[None]] | None = None, body=b"{}") -> list[dict]:
    """What a client gets that stays to the end; `reads` may keep the sender waiting."""
    messages: list[dict] = []
    requested = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict:
        message = next(requested, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message: dict) -> None:
        messages.append(message)
        if reads is not None:
            await reads(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat", "app_root_path": "", "headers": headers}
    await app({**scope, "query_string": b"", "root_path": "/v1"}, receive, send)
    return messages


async def endless(ended: asyncio.Event) -> AsyncIterator[bytes]:
    try:
        while True:
            yield b"data: {}\n\n"
            await asyncio.sleep(0.01)
    finally:
        ended.set()


async def test_a_stream_without_end_is_cut_off_with_an_error_event() -> None:
    gate, ended = WeightsGate(), asyncio.Event()
    guest = asyncio.create_task(post(guarded(StreamingResponse(endless(ended)), gate, longest_s=0.3)))
    await asyncio.sleep(0.1)
    async with gate.closed(30):
        assert ended.is_set()
    start, *body = await asyncio.wait_for(guest, 60)
    assert start["status"] == 200 and (b"x-policy-version", b"run v3") in start["headers"]
    assert body[-1]["more_body"] is False and len(body) > 5
    error = json.loads(body[-1]["body"].removeprefix(b"data: "))["error"]
    assert error["code"] == 504 and "may take 0.3 s" in error["message"]


async def test_an_answer_that_takes_too_long_is_504_and_its_work_ends() -> None:
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation

    ended, app, gate = [], FastAPI(), WeightsGate()

    @app.post("/v1/chat")
    @with_cancellation
    async def chat(request: dict, raw_request: Request):  # as vLLM's routes are made
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(request)

    start, body = await asyncio.wait_for(post(guarded(app, gate, longest_s=0.2)), 50)
    async with gate.closed(1):
        assert ended == [{}]
    assert start["status"] == 504 and "half of the server's" in json.loads(body["body"])["error"]["message"]


async def test_a_reader_that_stops_reading_does_not_keep_the_gate() -> None:
    gate = WeightsGate()

    async def stops(message: dict) -> None:
        if message.get("body"):
            await asyncio.Event().wait()

    stream = StreamingResponse(endless(asyncio.Event()))
    guest = asyncio.create_task(post(guarded(stream, gate, longest_s=0.2), stops))
    await asyncio.sleep(0.05)
    async with gate.closed(30):
        assert not guest.done()
    await asyncio.wait_for(guest, 30)


async def test_the_gate_is_held_until_the_engine_has_let_go() -> None:
    """A client that has gone away ends its request before the engine has heard of it."""
    gate, engine_done = WeightsGate(), asyncio.Event()

    async def generate(prompt: str, _params: SimpleNamespace, lora_request: str) -> AsyncIterator[str]:
        assert lora_request == "the adapter"
        try:
            while True:
                yield prompt
                await asyncio.sleep(0.01)
        finally:
            await asyncio.sleep(0.05)  # the message to the engine
            engine_done.set()

    async with gate.turn():
        teacher = SimpleNamespace(client=SimpleNamespace(generate=generate), gate=gate, adapter="the adapter")
        params = SimpleNamespace(ignore_eos=False, structured_outputs=None)
        outputs = _GatedEngine(teacher).generate("a", params)
        assert await anext(outputs) == "a"
        closing = asyncio.create_task(outputs.aclose())
        await asyncio.sleep(0)
    async with gate.closed(5):
        assert engine_done.is_set()
    await closing
