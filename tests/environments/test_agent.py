"""A user's own program plays the policy through OpenAI's API: real HTTP server and clients, a scripted engine."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

import classroom_rl.server.app
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.chat_template import encode_chat
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.rows import rows_of
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal
from classroom_rl.rollout.trajectory import Trajectory
from classroom_rl.server.sampling_service import SamplingService
from tests.conftest import free_port
from tests.rollout.test_dialogue import halving
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import serving

AGENTS = ("--config-dir", str(ROOT / "tests/support/guessing"), "--config-name", "guessing", "environment=agent")
REQUEST = SampleRequest(problems=["odd"], answers=["5"], request_id="r", seed=1, step=0)
AGENT: list[Callable[[str, str, Problem], Any]] = []
"""What `play` does in this test."""
SAY_ONE = [{"role": "user", "content": "Say one."}]


def play(base_url: str, api_key: str, problem: Problem) -> Any:
    return AGENT[-1](base_url, api_key, problem)


def ask(base_url: str, messages: list, **more: Any) -> str:
    """A message of the policy."""
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return client.chat.completions.create(model="teacher", messages=messages, **more).choices[0].message.content


class Server:
    """A server of agents: its engine, and what it plays."""

    def __init__(self, tokenizer, folder: Path, script: Callable[[str], str], *overrides: str):
        self.engine, self.folder, self.port = ScriptedEngine(tokenizer, script), folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        base = (f"generation.server_port={self.port}", f"logging.save_dir={folder}", "generation.max_tokens_per_turn=9")
        self.config = load(TrainRLConfig, "train_rl", [*AGENTS, *base, *overrides])

    async def open_service(self, *_: object) -> SamplingService:
        """In place of the server's."""
        journal, roles = Journal(self.folder), Roles({"teacher": self.engine}, {"teacher": self.engine})
        weights = reward_weights(self.config)
        environment = environment_of(self.config).open_with(self.config, roles, journal, weights)
        return SamplingService(Runner(environment, journal, weights), journal)

    def post(self, path: str, body: Any = None) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=60)

    def sample(self, request: SampleRequest = REQUEST) -> list[Trajectory]:
        answer = self.post("/sample_conversations", request.model_dump())
        assert answer.status_code == 200, answer.text
        return [Trajectory.model_validate(record) for record in answer.json()["conversations"]]


@pytest.fixture
def serve(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`serve(script, override, …)` serves until the end of the block."""
    monkeypatch.syspath_prepend(ROOT / "examples")

    @contextmanager
    def serving_agents(script: Callable[[str], str], *overrides: str, agent: str | None = None) -> Iterator[Server]:
        name = agent or f"{__name__}:play"
        server = Server(tokenizer, tmp_path / "run", script, f"generation.agent={name}", *overrides)
        monkeypatch.setattr(classroom_rl.server.app, "open_service", server.open_service)
        app = classroom_rl.server.app.create_app(server.config, server.folder)
        with serving(app, server.port):
            yield server

    return serving_agents


def test_the_example_s_game_is_one_row_of_what_was_sampled(serve, tokenizer) -> None:
    with serve(halving, agent="openai_agent:play") as server:
        odd, even = server.sample(REQUEST.model_copy(update={"problems": ["odd", "even"], "answers": ["5", "2"]}))
        assert [turn.text for turn in odd.turns] == ["3", "Higher.", "5"] and even.reward == 1.5
        assert [turn.text for turn in even.turns if turn.role == "teacher"] == ["3", "1", "2"]
        assert odd.prompt_ids == encode_chat(
            tokenizer, [{"role": "user", "content": "Guess a number from 0 to 7: odd"}]
        )
        [row] = rows_of(even)
        for turn in (turn for turn in even.turns if turn.role == "teacher"):
            prompt = row.prompt_ids + row.completion_ids[: turn.span[0]]
            sampled = [
                answer for context, _, answer in server.engine.calls if context == prompt and answer.text == turn.text
            ]
            ids, logprobs = row.completion_ids[slice(*turn.span)], row.logprobs[slice(*turn.span)]
            assert any((list(answer.ids), list(answer.logprobs)) == (ids, logprobs) for answer in sampled)
        assert sum(row.mask) == sum(turn.tokens for turn in even.turns)
        assert server.post("/get_posted_reward", {"conversations": [odd.id]}).json()["rewards"] == [1.5]


def test_an_edited_history_is_a_row_of_its_own(serve, tokenizer) -> None:
    summary = [
        {"role": "developer", "content": "You said one."},
        {"role": "user", "content": [{"type": "text", "text": "Say two."}]},
    ]
    replies = []

    async def agent(base_url: str, api_key: str, problem: Problem) -> float:
        history = list(SAY_ONE)
        history.append({"role": "assistant", "content": ask(base_url, history, max_tokens=2)})
        replies.append(ask(base_url, summary, temperature=1.0))
        history.append({"role": "user", "content": "Say three."})
        replies.append(ask(base_url, history))
        stripped = [*history[:1], {"role": "assistant", "content": "on"}, history[-1]]
        replies.append(ask(base_url, stripped))
        return 0.5

    AGENT.append(agent)
    answers = iter(["one one one", "two", "three", "four"])
    with serve(lambda _: next(answers)) as server:
        [record] = server.sample()
        environment = environment_of(server.config)
    assert replies == ["two", "three", "four"] and record.reward == 0.5 and record.failure is None
    rows, calls = rows_of(record), server.engine.calls
    assert [row.message for row in rows] == [None, 1, 3]
    spelled = [{"role": "system", "content": "You said one."}, {"role": "user", "content": "Say two."}]
    assert rows[1].prompt_ids == encode_chat(tokenizer, spelled) == calls[1][0]
    for row, call in ((rows[1], calls[1]), (rows[2], calls[3])):
        assert row.prompt_ids == call[0] and row.mask == [1] * len(row.completion_ids)
        assert (tuple(row.completion_ids), tuple(row.logprobs)) == (call[2].ids, call[2].logprobs)
    assert rows[0].prompt_ids + rows[0].completion_ids == [*calls[2][0], *calls[2][2].ids], "without the summary"
    assert not record.turns[0].ended and record.turns[0].tokens == 2
    assert sum(rows[0].mask) == len(calls[0][2].ids) + len(calls[2][2].ids)
    figures = environment.batch_metrics([record])
    assert figures == {"agent/messages_per_episode": 4.0, "agent/own_prompt_share": 0.5}


WRONG_CALLS: list[tuple[dict, int, str]] = [
    ({"temperature": 0.2}, 400, "temperature is '0.2'. The policy is sampled as its training needs it: temperature 1"),
    ({"stream": True}, 400, "no stream"),
    ({"n": 2}, 400, "n is '2'"),
    ({"tools": [{"type": "function"}]}, 400, "no tools"),
    ({"seed": 1}, 400, "seed is '1'"),
    ({"model": "gpt-5"}, 400, "There is no model 'gpt-5' here; the policy is called 'teacher'"),
    ({"messages": [*SAY_ONE, {"role": "assistant", "content": "o"}]}, 400, "The last message is the assistant's"),
    ({"messages": [{"role": "user", "content": "o", "tool_calls": [1]}]}, 400, "messages.0.tool_calls is '[1]'"),
    ({"messages": [{"role": "tool", "content": "o"}]}, 422, "body.messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "body.messages.0.content"),
    ({"messages": [{"role": "user", "content": "o" * 999}]}, 400, "context_length_exceeded: the prompt of a call has"),
    ({"max_tokens": 0}, 422, "body.max_tokens"),
]


def test_a_call_that_cannot_be_answered_says_why(serve) -> None:
    answers = []

    def agent(base_url: str, api_key: str, problem: Problem) -> float:
        body = {"model": "teacher", "messages": SAY_ONE, "user": "me", "n": 1, "stop": None}
        url = f"{base_url}/chat/completions"
        early = requests.post(f"{base_url[:-3]}/reward", json={"reward": 1.0}, timeout=60)
        answers.append((early.status_code, early.text))
        for change, *_ in WRONG_CALLS:
            answer = requests.post(url, json=body | change, timeout=60)
            answers.append((answer.status_code, answer.text))
        for _ in range(3):
            answer = requests.post(url, json=body, timeout=60)
        answers.append((answer.status_code, answer.text))
        for value in (float("nan"), 0.25, 0.5):
            content = f'{{"reward": {value}}}'.replace("nan", "NaN")
            headers = {"Content-Type": "application/json"}
            answer = requests.post(f"{base_url[:-3]}/reward", data=content, headers=headers, timeout=60)
            answers.append((answer.status_code, answer.text))
        answers.append((requests.post(url, json=body, timeout=60).status_code, ""))
        return 0.75

    AGENT.append(agent)
    expected = [
        (400, "before the policy's first message"),
        *(call[1:] for call in WRONG_CALLS),
        *((400, "generation.max_turns = 3"), (422, "body.reward"), (204, ""), (404, "its reward was given"), (404, "")),
    ]
    with serve(lambda _: "one", "generation.max_turns=3") as server:
        [record] = server.sample()
        assert record.reward == 0.25 and record.overflow is None, "a later message fitted"
        deadline = time.monotonic() + 60
        while len(answers) < len(expected) and time.monotonic() < deadline:  # the agent goes on for a little
            time.sleep(0.02)
        unknown = server.post("/agent/nobody/v1/chat/completions", {"model": "teacher", "messages": SAY_ONE})
        assert unknown.status_code == 404 and "No episode nobody is being played" in unknown.text
    for (status, text), (wanted_status, words) in zip(answers, expected, strict=True):
        assert status == wanted_status and words in text, (status, text, words)


FAILING: dict[str, tuple[Callable[..., Any], str, int]] = {
    "crash": (lambda _: 1 / 0, f"The agent {__name__}:play raised ZeroDivisionError: division by zero", 0),
    "silence": (lambda _: 1.0, "The agent gave a reward before the policy's first message", 0),
    "nothing": (lambda url: ask(url, SAY_ONE) and None, "The agent returned without a reward", 1),
    "infinite": (lambda url: ask(url, SAY_ONE) and float("inf"), "The agent's reward is inf.", 1),
    "text": (lambda url: ask(url, SAY_ONE), "raised TypeError: must be real number, not str", 1),
    "hangs": (lambda url: ask(url, SAY_ONE) and time.sleep(8), "gave no reward in 4 s (generation.agent_timeout_s)", 1),
    "long": (lambda url: ask(url, [{"role": "user", "content": "o" * 999}]), "raised BadRequestError", 0),
}


def test_an_agent_that_fails_gives_an_episode_without_reward(serve) -> None:
    AGENT.append(lambda url, _, problem: FAILING[problem.text][0](url))
    request = REQUEST.model_copy(update={"problems": list(FAILING), "answers": [""] * len(FAILING)})
    with serve(lambda _: "one", "generation.agent_timeout_s=4") as server:
        records = server.sample(request)
    for record, (_, reason, messages) in zip(records, FAILING.values(), strict=True):
        assert record.failure is not None and reason in record.failure and record.unrewarded
        assert len(record.turns) == messages == bool(sum(record.mask)) and record.prompt_ids and record.completion_ids
        assert (record.overflow is not None) == (record.problem == "long")
    AGENT.append(lambda url, *_: ask(url, SAY_ONE) and 1.0)
    with serve(lambda _: "one", "generation.agent_timeout_s=4") as restarted:
        assert restarted.sample(request) == records, "from the journal"
        retried = restarted.sample(request.model_copy(update={"judge_again": True}))
    assert all(record.reward == 1.0 and len(record.turns) == 1 for record in retried)


def test_whatever_line_a_kill_leaves_finished_episodes_stay(serve) -> None:
    request = REQUEST.model_copy(update={"problems": ["odd", "even"], "answers": ["5", "2"]})
    with serve(halving, agent="openai_agent:play") as server:
        expected = server.sample(request)
    journal = server.folder / JOURNAL_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    for count in (len(lines) - 1, 4, None):  # None: the journal of the try before, which played an episode twice
        if count is not None:
            journal.write_bytes(b"".join(lines[:count]))
        ended = journal.read_bytes().count(b'{"event": "rewards"')
        with serve(halving, agent="openai_agent:play") as restarted:
            assert restarted.sample(request) == expected
            for record in expected:
                stored = requests.get(f"{restarted.url}/conversations/{record.id}", timeout=60).json()
                assert Trajectory.model_validate(stored) == record
        assert bool(restarted.engine.calls) == (ended < 2)


def test_an_agent_elsewhere_takes_episodes_by_their_urls(serve) -> None:
    """Plain HTTP, as any framework in any language sends it."""
    with serve(lambda _: "one", agent="null") as server:
        answer = asyncio.run(_play_elsewhere(server))
        assert answer.reward == 0.7 and [turn.text for turn in answer.turns] == ["one"]
        assert server.post("/agent/next").json() is None


async def _play_elsewhere(server: Server) -> Trajectory:
    sampled = asyncio.create_task(asyncio.to_thread(server.sample))
    async with asyncio.timeout(60):
        while (task := (await asyncio.to_thread(server.post, "/agent/next")).json()) is None:
            await asyncio.sleep(0.02)
    assert (task["problem"], task["answer"]) == ("odd", "5") and task["base_url"].startswith(f"{server.url}/agent/r-")
    body = {"model": "teacher", "messages": SAY_ONE}
    reply = await asyncio.to_thread(requests.post, f"{task['base_url']}/chat/completions", json=body, timeout=60)
    assert reply.json()["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "stop"}
    ]
    posted = await asyncio.to_thread(requests.post, task["reward_url"], json={"reward": 0.7}, timeout=60)
    assert posted.status_code == 204
    return (await sampled)[0]


def test_a_message_that_nobody_waited_for_is_dropped(serve) -> None:
    def agent(base_url: str, api_key: str, problem: Problem) -> float:
        with pytest.raises(openai.APITimeoutError):
            ask(base_url, SAY_ONE, timeout=0.2)
        assert ask(base_url, SAY_ONE) == "two"
        return 1.0

    AGENT.append(agent)
    answers = iter(["one", "two"])
    with serve(lambda _: next(answers)) as server:
        generate = server.engine.generate

        async def slow(*arguments: Any) -> Any:
            await asyncio.sleep(0.6 if not server.engine.calls else 0)
            return await generate(*arguments)

        server.engine.generate = slow
        [record] = server.sample()
    assert [turn.text for turn in record.turns] == ["two"] and record.reward == 1.0


def test_other_weights_end_the_batch_and_the_episode(serve) -> None:
    statuses = []

    def agent(base_url: str, api_key: str, problem: Problem) -> float:
        ask(base_url, SAY_ONE)
        server.engine.weights = "others"
        statuses.append(
            requests.post(
                f"{base_url}/chat/completions", json={"model": "teacher", "messages": SAY_ONE}, timeout=60
            ).status_code
        )
        return 1.0

    AGENT.append(agent)
    with serve(lambda _: "one") as server:
        version = {"run_id": server.engine.policy.run_id, "policy_version": server.engine.policy.version}
        answer = server.post("/sample_conversations", REQUEST.model_copy(update=version).model_dump())
        assert answer.status_code == 409 and "Other weights were loaded" in answer.text
    assert statuses == [409]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generation.agent=openai_agent:plays", "did you mean play?"),
        ("generation.agent=no_such_agent:play", "there is no module no_such_agent"),
        ("train.reward_weights={tests.support.own_rewards:brevity: 1}", "there are: posted."),
        ("train.algorithm=ppo", "An agent may go back to an earlier prompt"),
    ],
)
def test_a_configuration_that_cannot_be_played_is_refused(override: str, message: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load(TrainRLConfig, "train_rl", [*AGENTS, override], check_train_rl)
