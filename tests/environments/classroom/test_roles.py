"""Students, teachers and supervisors behind real HTTP: what they are sent, what is stored and paid for once, and what
stops a batch; how roles are opened.

The clock of pauses and deadlines is turned (tests/support/turned_clock.py).
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT
from classroom_rl.config.models import ApiModelConfig, ModelConfig, SupervisorModelConfig, VllmConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi
from classroom_rl.errors import ConfigError, DataError, ProviderFailure, SpendingCapReached
from classroom_rl.judges.model_judge import ApiChatEngine, KeptReplies
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.rollout.supervision import REPLACE
from classroom_rl.rollout.tokens import approximate_tokens
from classroom_rl.server.sampling_service import SamplingService
from classroom_rl.supervision.model_supervisor import ModelSupervisor
from tests.support.chat_client import PRICES, timed_api
from tests.support.judge_endpoint import JudgeEndpoint, fails, judge_endpoint, says
from tests.support.scripted_room import Room
from tests.support.supervised_room import CORRECTION, supervising
from tests.support.turned_clock import run

REQUEST = SampleRequest(
    problems=["fractions", "fractions", "sums"], answers=["1/2", "1/2", "7"], request_id="r", seed=1, step=0
)
SUPERVISORS_PROMPT = str(ROOT / "prompt_templates/supervisors/maths_tutor.txt")


class Server:
    """What a server is, but for engines: opened on a run folder with some roles behind `url`, asked, closed."""

    def __init__(
        self,
        room: Room,
        generation: GenerationConfig,
        url: str,
        *roles: str,
        **options,
    ):
        self.room, self.generation = room, generation
        config_of = {"supervisor": SupervisorModelConfig}
        options = {"deadline_s": 60.0} | options
        self.configs = {
            role: config_of.get(role, ApiModelConfig)(model_name_or_path=f"a-{role}", base_url=url, **options)
            for role in roles
        }

    def run(self, work: Callable[[SamplingService], Awaitable]):
        async def whole():
            apis = {role: self._api(role, config) for role, config in self.configs.items()}
            for role, api in apis.items():
                setattr(self.room, role, self._model(role, api))
            service = self.room.open(self.generation)
            service.environment.roles.apis |= apis
            try:
                return await work(service)
            finally:
                for api in apis.values():
                    await api.drain()
                    await api._client.close()
                    api.ledger.close()
                service.journal.close()

        return run(whole())

    def _api(self, role: str, config: ApiModelConfig) -> ChatApi:
        ledger = CallLedger(self.room.folder / f"{role}_calls.sqlite", config.max_cost_usd)
        return timed_api(config, ledger, role)

    def _model(self, role: str, api: ChatApi) -> ApiChatEngine | ModelSupervisor:
        config = self.configs[role]
        if role != "supervisor":
            return ApiChatEngine(config, api)
        return ModelSupervisor(config, self.generation.supervisor, KeptReplies(config, api.ledger, api))

    def sample(self, request: SampleRequest = REQUEST) -> SampleResponse:
        request = request.model_copy(update={"supervised": "supervisor" in self.configs})
        return self.run(lambda service: service.sample(request))


LEAK = json.dumps({"critique": "It tells.", "category": "leak", "valid": False, "correction": CORRECTION})


def numbered(body: dict, nth: int):
    """Each answer is another one, also to the same question; a supervisor corrects every message."""
    return says(LEAK if body["model"] == "a-supervisor" else f"{body['model']} says {nth}")


def sent(endpoint: JudgeEndpoint) -> list[list[tuple[str, str]]]:
    return [[(message["role"], message["content"]) for message in call.body["messages"]] for call in endpoint.calls]


# The student --------------------------------------------------------------------------------------------------------


def test_a_student_behind_an_api_speaks_and_solves_as_one_on_an_engine(room: Room, maths: GenerationConfig) -> None:
    with judge_endpoint(lambda body, nth: says(rf"I think \boxed{{1/2}} {nth}")) as endpoint:
        server = Server(room, maths, endpoint.url, "student")
        response = server.sample()
    fractions, again, sums = response.conversations
    assert [turn.role for turn in fractions.turns] == ["student", "teacher"] * 3
    assert fractions.turns[0].text.startswith(r"I think \boxed{1/2}")
    assert fractions.turns[0].text != again.turns[0].text, "each conversation of a group draws its own attempt"
    grades = [solution.grade for record in response.conversations for solution in record.solutions]
    assert grades == [1.0] * 4 + [0.0] * 2
    assert all(len({solution.text for solution in record.solutions}) == 2 for record in response.conversations)
    prompts = sent(endpoint)
    assert prompts.count([("user", "Attempt: fractions")]) == 2 and prompts.count([("user", "Attempt: sums")]) == 1
    name = fractions.student_name or "someone"
    persona = {"correct_student": f"You are {name}.", "error_student": "Make an error."}[fractions.turns[2].persona]
    attempt = [("user", "Attempt: fractions"), ("assistant", fractions.turns[0].text)]
    assert [("system", persona), *attempt, ("user", "Say hello.")] in prompts
    # What the student says is given, what the teacher says is sampled, token by token.
    trained = [token for token, bit in zip(fractions.completion_ids, fractions.mask, strict=True) if bit]
    assert room.tokenizer.decode(trained) == "Say hello.<|im_end|>" * 3
    assert all("seed" not in call.body for call in endpoint.calls)
    assert response.usage["student"].calls == len(endpoint.calls) == 3 * (3 + 2) and "judge" not in response.usage
    assert response.usage["student"].cost_usd == pytest.approx(endpoint.billed_usd)
    assert fractions.turns[0].tokens == endpoint.calls[0].completion_tokens


@pytest.mark.parametrize("roles", ["student", "teacher student", "supervisor"])
@pytest.mark.parametrize("kind", ["generation", "maths"])
def test_whatever_line_a_kill_leaves_nothing_is_paid_for_twice(
    request: pytest.FixtureRequest, room: Room, kind: str, roles: str
) -> None:
    """The journal is cut at every line; what it lost of models behind APIs is in their ledgers."""
    generation = supervising(request.getfixturevalue(kind), prompt_path=SUPERVISORS_PROMPT, on_invalid=REPLACE)
    if "teacher" in roles:
        generation = replace(generation, max_tokens_in_conversation=80)
    with judge_endpoint(numbered) as endpoint:
        expected = Server(room, generation, endpoint.url, *roles.split()).sample().conversations
        calls, lines = len(endpoint.calls), (room.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
        for count in range(len(lines)):
            (room.folder / JOURNAL_NAME).write_bytes(b"".join(lines[:count]))
            assert Server(room, generation, endpoint.url, *roles.split()).sample().conversations == expected
        assert len(endpoint.calls) == calls
        if roles == "student":
            Server(room, generation, endpoint.url, roles).sample(REQUEST.model_copy(update={"request_id": "another"}))
            assert len(endpoint.calls) == 2 * calls, "another step of a training draws anew"
    if roles == "supervisor":
        assert any(turn.replaced for record in expected for turn in record.turns)


def test_a_student_that_stays_away_stops_the_batch_and_a_new_server_goes_on(room: Room, generation) -> None:
    """It is gone once it has answered in each conversation: nobody waits alone, and nobody is answered meanwhile."""
    away, openings, heard_all = True, [], threading.Event()

    def script(body: dict, nth: int):
        if len(body["messages"]) == 2:
            openings.append(body)
            if len(openings) == 3:
                heard_all.set()
        elif away:
            heard_all.wait(60)
            return fails(503, "maintenance")
        return numbered(body, nth)

    with judge_endpoint(script) as endpoint:
        message = "The student a-student .*student_model.deadline_s = 60 s.*maintenance"
        with pytest.raises(ProviderFailure, match=message):
            Server(room, generation, endpoint.url, "student").sample()
        teacher_calls = len(room.teacher.calls)
        away = False
        response = Server(room, generation, endpoint.url, "student").sample()
    assert len(endpoint.of("says")) == 6, "two student turns in each of three conversations, none paid for twice"
    assert len(room.teacher.calls) == 9 and teacher_calls < 9, "nor did the teacher say anything twice"
    assert [record.reward for record in response.conversations] == [0.7] * 3


def test_the_cap_of_the_student_is_its_own(room: Room, generation) -> None:
    with judge_endpoint(numbered) as endpoint:
        with pytest.raises(SpendingCapReached, match=r"student_model.max_cost_usd = 0.0002 is reached"):
            Server(room, generation, endpoint.url, "student", max_cost_usd=0.0002, **PRICES).sample()
        spent = endpoint.billed_usd
        assert 0 < spent <= 0.0002
        server = Server(room, generation, endpoint.url, "student", max_cost_usd=0.1, **PRICES)
        response = server.sample()
    assert len(endpoint.calls) == 6 and response.usage["student"].cost_usd == pytest.approx(endpoint.billed_usd)


@pytest.mark.parametrize("when", ["opening", "dialogue", "solutions"])
def test_what_a_provider_refuses_costs_one_conversation_and_not_the_batch(
    room: Room, maths: GenerationConfig, when: str, tmp_path
) -> None:
    refused = {"opening": 1, "dialogue": 4, "solutions": 8}[when]

    def script(body: dict, nth: int):
        about_sums = "sums" in json.dumps(body)
        return fails(403, "flagged by moderation") if about_sums and len(body["messages"]) >= refused else says("Hm.")

    with judge_endpoint(script) as endpoint:
        response = Server(room, maths, endpoint.url, "student").sample()
        *fine, failed = response.conversations
        assert [record.failure for record in fine] == [None, None] and None not in [record.reward for record in fine]
        assert "The student a-student" in failed.failure and "flagged by moderation" in failed.failure
        assert failed.reward is None and set(failed.rewards.values()) == {None} and failed.state == "END"
        assert failed.prompt_ids and failed.completion_ids, "a trainer takes no conversation without tokens"
        assert len(failed.completion_ids) == len(failed.mask) == len(failed.logprobs)
        message = len(room.tokenizer.encode("Say hello.")) + 1
        assert sum(failed.mask) == {"opening": 0, "dialogue": 1, "solutions": 3}[when] * message
        write_records(tmp_path / "records.parquet", response.conversations)
        assert read_records(tmp_path / "records.parquet")[2].failure == failed.failure
        calls = len(endpoint.calls)
        restarted = Server(room, maths, endpoint.url, "student")
        assert restarted.sample().conversations == response.conversations and len(endpoint.calls) == calls
        assert restarted.run(lambda service: as_coroutine(service.record(failed.id))) == failed
        refused = 10**6  # the provider thought better of it
        retried = Server(room, maths, endpoint.url, "student").sample(REQUEST.model_copy(update={"judge_again": True}))
    assert retried.conversations[:2] == fine and retried.conversations[2].failure is None
    assert retried.conversations[2].reward is not None
    if when != "opening":
        assert retried.conversations[2].completion_ids[: len(failed.completion_ids)] == failed.completion_ids
    teacher_calls = len(room.teacher.calls)
    assert Server(room, maths, endpoint.url, "student").sample().conversations == retried.conversations
    assert len(room.teacher.calls) == teacher_calls


async def as_coroutine(value):
    return value


# The teacher --------------------------------------------------------------------------------------------------------


def test_a_teacher_behind_an_api_teaches_without_tokens(room: Room, generation: GenerationConfig) -> None:
    with judge_endpoint(numbered) as endpoint:
        response = Server(room, generation, endpoint.url, "teacher", "student", max_concurrent_requests=1).sample()
    record = response.conversations[2]
    assert [turn.role for turn in record.turns] == ["teacher", "student"] * 2 + ["teacher"]
    assert record.prompt_ids == record.completion_ids == record.mask == record.logprobs == []
    assert record.reward == 0.7 and record.turns[0].span is None and record.turns[0].tokens > 0
    prompt = f"Teach sums to {record.student_name or 'someone'}."
    texts = [turn.text for turn in record.turns]
    # The user speaks first, which some APIs insist on.
    assert [("user", prompt)] in sent(endpoint)
    assert [("user", prompt), ("assistant", texts[0]), ("user", texts[1])] in sent(endpoint)
    assert response.usage["teacher"].calls == 9 and response.usage["student"].calls == 6
    lines = list(read_journal(room.folder / JOURNAL_NAME))
    assert next(line for line in lines if line["event"] == "batch")["weights"].startswith("those of a-teacher at http")


def test_an_attempt_reaches_a_teacher_behind_an_api_as_the_users_message(room: Room, maths: GenerationConfig) -> None:
    with judge_endpoint(numbered) as endpoint:
        record = Server(room, maths, endpoint.url, "teacher").sample().conversations[0]
    name = record.student_name or "someone"
    assert [("system", f"Teach fractions to {name}."), ("user", "I tried: Hello.")] in sent(endpoint)


def test_thoughts_stay_with_the_teacher_alone(room: Room, generation: GenerationConfig) -> None:
    with judge_endpoint(lambda body, nth: says("<think>It is easy.</think>Go on.")) as endpoint:
        record = Server(room, generation, endpoint.url, "teacher").sample().conversations[0]
    assert all("easy" not in room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls)
    assert ("assistant", "<think>It is easy.</think>Go on.") in sent(endpoint)[-1]
    assert record.turns[0].text == "<think>It is easy.</think>Go on."


def test_a_conversation_without_tokens_ends_by_messages_and_by_an_approximate_count(room: Room, generation) -> None:
    prompt = approximate_tokens("Teach sums to someone.")
    assert prompt == 6 and approximate_tokens("é" * 6) == 3 and approximate_tokens("") == 0
    generation = replace(generation, student_names=[None], max_tokens_in_conversation=6 + 25 + 25 + 3)
    with judge_endpoint(lambda body, nth: says("word " * 20)) as endpoint:
        record = Server(room, generation, endpoint.url, "teacher", "student").sample().conversations[2]
        assert [turn.role for turn in record.turns] == ["teacher", "student", "teacher"], "then two tokens were left"
        limits = [
            call.body["max_tokens"] for call in endpoint.calls if call.body["messages"][0]["content"].endswith("e.")
        ]
        assert {48, 2} <= set(limits)
        with pytest.raises(DataError, match="max_tokens_in_conversation"):
            long = REQUEST.model_copy(update={"problems": ["word " * 400] * 3, "request_id": "long"})
            Server(room, generation, endpoint.url, "teacher").sample(long)


def test_a_measurement_with_fixed_seeds_finds_its_replies_again_under_another_request(room: Room, generation) -> None:
    """An evaluation that was stopped names its requests anew: what it paid for is found all the same."""
    requests = [
        REQUEST.model_copy(update={"request_id": name, "fixed_seeds": True, "greedy": True}) for name in ("a", "b")
    ]
    with judge_endpoint(numbered) as endpoint:
        first, second = (Server(room, generation, endpoint.url, "teacher", "student").sample(body) for body in requests)
        assert [record.turns for record in first.conversations] == [record.turns for record in second.conversations]
        assert len(endpoint.calls) == 15
        assert {call.body["temperature"] for call in endpoint.calls if call.body["model"] == "a-teacher"} == {0.0}
        other = requests[0].model_copy(update={"request_id": "c", "seed": 2})
        Server(room, generation, endpoint.url, "teacher", "student").sample(other)
        assert len(endpoint.calls) > 15


# How roles are opened -----------------------------------------------------------------------------------------------


def test_all_roles_behind_apis_are_opened_without_an_engine_and_shown(
    tmp_path, prompts, generation, monkeypatch
) -> None:
    from classroom_rl.server.sampling_service import open_service

    monkeypatch.setenv("OPENROUTER_API_KEY", "a key")
    monkeypatch.setenv("GEMINI_API_KEY", "another")
    rule = tmp_path / "rule.txt"
    rule.write_text("Judge this lesson: {{ conversation }}")
    config = EvalConfig(generation=replace(generation, judges_rules_prompts_paths={"pedagogical_eval": str(rule)}))
    config.teacher_model = ApiModelConfig(model_name_or_path="openai/gpt-4o", use_openrouter=True)
    config.student_model = ApiModelConfig(model_name_or_path="gemini-2.5-flash", use_gemini=True)
    config.judge_model.model_name_or_path, config.judge_model.base_url = "judge", "http://127.0.0.1:9/v1"

    async def opened():
        service = await open_service(config, {"pedagogical": 1.0}, run_folder=tmp_path / "run")
        service.environment.roles.shutdown()
        return service.environment.roles

    roles = asyncio.run(opened())
    assert {role: (health.model, health.engine, health.engine_version) for role, health in roles.health().items()} == {
        "teacher": ("openai/gpt-4o", "api", "https://openrouter.ai/api/v1/"),
        "student": ("gemini-2.5-flash", "api", "https://generativelanguage.googleapis.com/v1beta/openai/"),
        "judge": ("judge", "api", "http://127.0.0.1:9/v1/"),
    }
    assert roles.engines == {} and not roles.teacher_has_tokens
    assert roles.supervisor is None, "an evaluation has none"
    assert {path.name for path in (tmp_path / "run").glob("*_calls.sqlite")} == {
        f"{role}_calls.sqlite" for role in ("teacher", "student", "judge")
    }
    monkeypatch.delenv("GEMINI_API_KEY")
    with pytest.raises(ConfigError, match="set the environment variable GEMINI_API_KEY"):
        asyncio.run(opened())


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_an_answer_without_figures_is_counted_approximately_also_when_it_is_found_again(
    tmp_path, finish_reason
) -> None:
    """A student's message, asked for again after a restart; its provider counts no tokens."""

    def without_usage(exchange) -> None:
        exchange.bill()
        exchange.send(200, {"choices": [{"message": {"content": "eight ch"}, "finish_reason": finish_reason}]})

    async def ask(config: ApiModelConfig, ledger: CallLedger) -> Completion:
        api = timed_api(config, ledger, "student")
        try:
            return await ApiChatEngine(config, api).chat([{"role": "user", "content": "?"}], Sampling(1.0))
        finally:
            await api._client.close()
            ledger.close()

    with judge_endpoint(lambda body, nth: without_usage) as endpoint:
        config = ApiModelConfig(model_name_or_path="m", base_url=endpoint.url)
        first, again = (run(ask(config, CallLedger(tmp_path / "calls.sqlite"))) for _ in range(2))
    assert first == again and (first.tokens, first.ended) == (2, finish_reason == "stop")
    assert len(endpoint.calls) == 1


def test_options_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from classroom_rl.engines.vllm import engine

    captured = []
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments, **_: captured.append(arguments))
    options = VllmConfig(
        max_length=3072,
        max_num_seqs=17,
        gpu_memory_utilization=0.37,
        number_of_gpus_per_instance=2,
        enforce_eager=True,
        dtype="float16",
    )
    engine.VllmEngine._load(ModelConfig("some/model", options), seed=11, sleep_mode=False)
    (arguments,) = captured
    assert (arguments.model, arguments.seed, arguments.dtype) == ("some/model", 11, "float16")
    assert (arguments.max_model_len, arguments.max_num_seqs) == (3072, 17)
    assert (arguments.gpu_memory_utilization, arguments.tensor_parallel_size) == (0.37, 2)
    assert arguments.enforce_eager and not arguments.enable_sleep_mode
    assert not arguments.trust_remote_code and arguments.load_format == "safetensors"
    assert arguments.logprobs_mode == "processed_logprobs", "those of the distribution that was sampled"


def test_temperature_and_truncation_are_each_models_own() -> None:
    sampling = Sampling.of(VllmConfig(temperature=0.3, top_p=0.8, top_k=40), max_tokens=7)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.3, 0.8, 40, 7)
