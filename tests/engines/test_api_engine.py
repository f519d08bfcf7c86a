"""The engine behind an API, over real HTTP on this machine."""

import asyncio
import json

import pytest

from classroom_rl import ApiEngine, Rollouts, RolloutSet
from classroom_rl.errors import ConfigError, RolloutsStopped
from classroom_rl.rollout.step import End
from tests.support.judge_endpoint import (
    Behaviour,
    Exchange,
    JudgeEndpoint,
    fails,
    judge_endpoint,
    no_choices,
    resets,
    says,
)


def play(endpoint: JudgeEndpoint, prompts=("hello",), **options) -> RolloutSet:
    functions = options.pop("functions", {})
    engine = ApiEngine("model", endpoint.url, None, **{"timeout_s": 60.0, "max_retries": 1} | options)
    runner = Rollouts(engine, temperature=0.5, top_p=0.9, top_k=5, max_tokens=33, system="Be brief.")
    return asyncio.run(runner.run(list(prompts), progress=False, **functions))


def message(**fields) -> Behaviour:
    """A reply with these fields in its message."""

    def act(exchange: Exchange) -> None:
        exchange.bill("some words")
        reply = {"index": 0, "message": {"role": "assistant", "content": None} | fields, "finish_reason": "stop"}
        exchange.send(200, {"choices": [reply], "usage": exchange.usage()})

    return act


def test_messages_go_out_and_text_comes_back() -> None:
    with judge_endpoint(lambda body, nth: says(f"<think>hm</think>answer {len(body['messages'])}")) as endpoint:
        functions = {"next_prompt": lambda rollout, step: "more" if step < 3 else None}
        (rollout,) = play(endpoint, functions=functions)
    assert [step.content for step in rollout.steps] == ["answer 2", "answer 4", "answer 6"]
    assert (
        rollout.steps[0].ids == ()
        and rollout.steps[0].tokens > 0
        and rollout.end == End("terminated", "no next prompt")
    )
    body = endpoint.calls[1].body
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "answer 2"},
        {"role": "user", "content": "more"},
    ]
    parameters = {name: body[name] for name in ("model", "temperature", "top_p", "top_k", "max_tokens", "seed")}
    assert parameters == {
        "model": "model",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 33,
        "seed": rollout.steps[1].seed,
    }


def test_a_cut_reply_is_no_answer() -> None:
    with judge_endpoint(lambda body, nth: says("the answ", finish_reason="length")) as endpoint:
        (rollout,) = play(endpoint)
    assert rollout.steps[0].finish_reason == "length" and rollout.end == End("truncated", "max_tokens")


@pytest.mark.parametrize(
    ("fields", "content", "thought", "state"),
    [
        ({"content": "4", "reasoning_content": "2 + 2"}, "4", "2 + 2", "closed"),
        ({"content": "4", "reasoning": "2 + 2"}, "4", "2 + 2", "closed"),
        ({"content": "", "reasoning_content": "2 + 2"}, "", "2 + 2", "cut"),
        ({"content": None}, "", None, "absent"),
        ({"content": "half \ud800"}, "half \ufffd", None, "absent"),
    ],
)
def test_a_thought_that_the_server_took_out_is_kept(fields, content, thought, state) -> None:
    with judge_endpoint(lambda body, nth: message(**fields)) as endpoint:
        ((step,),) = (rollout.steps for rollout in play(endpoint))
    assert (step.content, step.thought, step.thought_state) == (content, thought, state)


def test_a_template_that_opens_thoughts_is_told() -> None:
    with judge_endpoint(lambda body, nth: says("still thinking")) as endpoint:
        (rollout,) = play(endpoint, opens_thought=True)
    assert rollout.last.content == "" and rollout.last.thought_state == "cut"


def test_a_failure_that_passes_is_tried_again() -> None:
    with judge_endpoint(lambda body, nth: fails(500) if nth == 0 else says("yes")) as endpoint:
        (rollout,) = play(endpoint)
    assert rollout.terminated and len(endpoint.calls) == 2


@pytest.mark.parametrize(
    ("behaviour", "end", "words"),
    [
        (fails(500, retry_after="0"), ("failed", "error"), "status 500"),
        (fails(422), ("failed", "error"), "status 422"),
        (no_choices(), ("failed", "error"), "without a message"),
        (says("", finish_reason="content_filter"), ("failed", "error"), "content filter"),
        (message(refusal="I will not."), ("failed", "error"), "I will not."),
        (
            fails(400, {"code": "context_length_exceeded", "message": "This model's maximum context length is 10"}),
            ("truncated", "context full"),
            "maximum context length",
        ),
    ],
)
def test_a_failure_of_one_request_ends_one_rollout(behaviour: Behaviour, end: tuple[str, str], words: str) -> None:
    with judge_endpoint(
        lambda body, nth: behaviour if body["messages"][-1]["content"] == "bad" else says("yes")
    ) as endpoint:
        bad, good = play(endpoint, ["bad", "good"])
    assert (bad.end.state, bad.end.reason) == end and words in bad.end.detail
    assert good.terminated and good.answer == "yes"


@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_what_every_request_would_meet_stops_all(status: int) -> None:
    refused = pytest.raises(RolloutsStopped, match=f"status {status}")
    with judge_endpoint(lambda body, nth: fails(status, "no")) as endpoint, refused:
        play(endpoint)
    assert len(endpoint.calls) == 1, "it is not repeated"


def test_an_address_that_nobody_answers_at_stops_all() -> None:
    from classroom_rl.errors import RolloutsStopped

    with (
        judge_endpoint(lambda body, nth: resets()) as endpoint,
        pytest.raises(RolloutsStopped, match="cannot be reached"),
    ):
        play(endpoint, max_retries=0)


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    monkeypatch.delenv("NO_KEY", raising=False)
    with judge_endpoint(lambda body, nth: says("yes")) as endpoint:
        engine = ApiEngine("model", endpoint.url, "MY_KEY", send_seed=False)
        rollouts = asyncio.run(Rollouts(engine).run(["a"], progress=False))
        asyncio.run(Rollouts(engine).run(["b"], progress=False))  # another event loop
    assert [call.key for call in endpoint.calls] == ["sk-secret"] * 2
    assert "seed" not in endpoint.calls[0].body and "top_k" not in endpoint.calls[0].body
    assert "sk-secret" not in rollouts.save(tmp_path / "a.jsonl").read_text()
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])["settings"]["engine"] == "ApiEngine model"
    with pytest.raises(ConfigError, match="NO_KEY holds no key"):
        ApiEngine("model", endpoint.url, "NO_KEY")


def test_no_more_requests_than_allowed_are_in_flight() -> None:
    with judge_endpoint(lambda body, nth: says("yes")) as endpoint:
        play(endpoint, [f"p{n}" for n in range(20)], concurrency=4)
    assert endpoint.most_running <= 4 and len(endpoint.calls) == 20
