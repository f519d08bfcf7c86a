"""Keys and tokens stay in the environment: none is in what programs print or refuse, in what a run leaves, or in what a
server answers, even if a provider repeats them or a configuration holds them."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load, record_run
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError, ProviderFailure
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.system.keys import FormatterWithoutKeys, is_variable_name, keys, without_keys
from tests.support.judge_endpoint import Behaviour, fails, judge_endpoint, says
from tests.support.judged_room import GOOD, Server, judged_by, write_rule
from tests.support.programs import run_program
from tests.support.scripted_room import application

PLANTED = {
    "OPENROUTER_API_KEY": "sk-or-v1-0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    TOKEN_VARIABLE: "3f9c1d7be0a24c55a6b8d9e0f1a2b3c4d5e6f708",
    "HF_TOKEN": "hf_QwErTyUiOpAsDfGhJkLzXcVbNm12345678",
    "JUDGE_CREDENTIAL": "jc-77aa66bb55cc44dd33ee22ff",
}
"""The variables of a run; the last has a name that does not tell that it holds a key."""
PROVIDER, JUDGE = PLANTED["OPENROUTER_API_KEY"], PLANTED["JUDGE_CREDENTIAL"]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)


def assert_none_in(text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    leaked = [name for name, value in PLANTED.items() if value.encode() in data]
    assert not leaked, data[:2000]


def assert_none_below(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert_none_in(path.read_bytes())


# Texts --------------------------------------------------------------------------------------------------------------


def test_keys_are_found_by_the_names_of_their_variables_and_are_no_short_words(monkeypatch):
    monkeypatch.setenv("LOCAL_API_KEY", "none")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "x" * 20)
    assert {*PLANTED} - {*keys()} == {"JUDGE_CREDENTIAL"} and {*PLANTED} <= {*keys("JUDGE_CREDENTIAL")}
    assert not {"LOCAL_API_KEY", "TOKENIZERS_PARALLELISM"} & {*keys()}
    assert without_keys(f"a{PROVIDER}b, none") == "a[OPENROUTER_API_KEY]b, none"


def test_a_key_that_holds_another_is_taken_out_as_a_whole(monkeypatch):
    monkeypatch.setenv("LONGER_KEY", f"{PROVIDER}-and-more")
    assert without_keys(f"{PROVIDER}-and-more {PROVIDER}") == "[LONGER_KEY] [OPENROUTER_API_KEY]"


@pytest.mark.parametrize("text", [*(value for value in PLANTED.values() if not value.isdigit()), "my_key", ""])
def test_a_key_is_no_name_of_a_variable(text: str):
    assert not is_variable_name(text) and is_variable_name("MY_KEY_2")


def test_a_log_record_and_its_traceback_hold_no_key():
    try:
        raise ValueError(f"refused: {PROVIDER}")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "asked with %s", (PROVIDER,), (type(error), error, None))
    line = FormatterWithoutKeys("%(message)s").format(record)
    assert line.count("[OPENROUTER_API_KEY]") == 2
    assert_none_in(line)


# Configurations -----------------------------------------------------------------------------------------------------

MISTAKES = [
    (f"judge_model.api_key_env={PROVIDER}", "holds what the environment variable OPENROUTER_API_KEY holds"),
    ("judge_model.api_key_env=sk-or-of-another-house", "api_key_env is not the name of an environment variable"),
    (f"judge_model.base_url=http://127.0.0.1:9/{PROVIDER}/v1", "holds what the environment variable"),
    ("judge_model.base_url='http://me:of-another-house@127.0.0.1:9/v1'", "base_url has an @, a . or a #"),
    ("judge_model.base_url='http://127.0.0.1:9/v1?key=of-another-house'", "base_url has an @, a . or a #"),
    ("+judge_model.base_url='http://127.0.0.1:9/${oc.env:HF_TOKEN}'", "holds what the environment variable HF_TOKEN"),
    (f"logging.wandb_run_name=run-{PLANTED['HF_TOKEN']}", "logging.wandb_run_name holds what the environment variable"),
    ("+judge_model.api_key=sk-or-of-another-house", "There is no config key judge_model.api_key"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_key_in_a_configuration_is_refused_and_not_repeated(mistake: str, message: str, capsys):
    with pytest.raises(ConfigError, match=message) as refused:
        load(TrainRLConfig, "train_rl", ["--config-name", "quickstart", mistake], check_train_rl)
    assert_none_in(str(refused.value))
    assert "of-another-house" not in str(refused.value)


def test_a_key_of_a_tutor_is_refused_and_not_repeated():
    tutor = "{name: a, model_name_or_path: m, base_url: 'http://x:1/v1', api_key_env: sk-or-of-another-house}"
    with pytest.raises(ConfigError, match="api_key_env of the tutor a is not the name") as refused:
        load(EvalConfig, "eval", ["--config-name", "quickstart", f"tutors=[{tutor}]"], check_eval)
    assert "of-another-house" not in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        ["vllm_server.py", "--config-name", "quickstart", "dry_run=true"],
        ["train_rl.py", "--config-name", "quickstart", "dry_run=true"],
        ["vllm_server.py", "--config-name", "quickstart", f"train.mu={PROVIDER}"],
        ["vllm_server.py", "--config-name", PROVIDER],
        ["classroom_rl.launch.cli", "--config-name", "quickstart", f"judge_model.api_key_env={PROVIDER}"],
    ],
    ids=["server, dry_run", "trainer, dry_run", "wrong type", "no such file", "launcher"],
)
def test_no_program_prints_a_key(command: list[str]):
    result = run_program(*command)
    assert result.returncode == (0 if "dry_run=true" in command else 2), result.stderr
    assert_none_in(result.stdout + result.stderr)


# A run --------------------------------------------------------------------------------------------------------------


def repeats_the_key(body: dict, nth: int) -> Behaviour:
    """A provider that repeats the key in its errors, in an unusable answer and in the reasons of its verdict."""
    if nth < 4:
        return (fails(500, f"bad {JUDGE}"), fails(429, {"raw": JUDGE}), says(f"prose {JUDGE}"), garbled)[nth]
    return says(GOOD.replace("as it was", f"as {JUDGE} was"))


def garbled(exchange) -> None:
    exchange.send(200, f"<html>{JUDGE}</html>")


def test_nothing_that_a_run_leaves_holds_a_key_that_its_provider_repeats(room, generation, tmp_path, caplog):
    judged = judged_by(write_rule(tmp_path), generation)
    with judge_endpoint(repeats_the_key) as endpoint:
        server = Server(room, judged, endpoint.url, api_key_env="JUDGE_CREDENTIAL")
        response = server.sample(["one", "two"])
    assert {call.key for call in endpoint.calls} == {JUDGE}, "the key was sent"
    assert [record.reward is not None for record in response.conversations] == [True, True]
    assert_none_in(response.model_dump_json())
    config = TrainRLConfig(judge_model=server.config, generation=judged)
    config.logging.save_dir = str(room.folder)
    record_run(config, "vllm_server")
    assert {"journal.jsonl", "judge_calls.sqlite", "config"} <= {path.name for path in room.folder.iterdir()}
    assert_none_below(room.folder)
    assert_none_in(caplog.text)


def test_no_error_of_a_provider_holds_the_key_that_it_repeats(room, generation, tmp_path):
    judged = judged_by(write_rule(tmp_path), generation)
    with judge_endpoint(lambda body, nth: fails(401, f"Incorrect API key provided: {JUDGE}")) as endpoint:
        server = Server(room, judged, endpoint.url, api_key_env="JUDGE_CREDENTIAL")
        with pytest.raises(ProviderFailure, match=r"Incorrect API key provided: \[JUDGE_CREDENTIAL\]"):
            server.sample(["one"])
    assert_none_below(room.folder)


def test_no_answer_of_a_server_holds_its_token(room, generation, monkeypatch):
    make: Callable = application(room, generation, monkeypatch)
    token, right = PLANTED[TOKEN_VARIABLE], {"Authorization": f"Bearer {PLANTED[TOKEN_VARIABLE]}"}

    def fail(*_: object) -> None:
        raise KeyError(f"unexpected: {token}")

    with TestClient(make(), base_url="http://127.0.0.1:8005", raise_server_exceptions=False) as http:
        for path in ("/health", "/metrics", "/openapi.json", "/api/run", "/api/metrics", "/wait_batch?request_id=x"):
            for headers in ({}, {"Authorization": f"Bearer {token[:-1]}x"}, right):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401 or headers == right
                assert_none_in(answer.content + repr(answer.headers).encode())
        monkeypatch.setattr(type(http.app.state.service), "record", fail)
        answer = http.get("/conversations/x", headers=right)
        assert answer.status_code == 500 and "[CLASSROOM_TOKEN]" in answer.text
        assert_none_in(answer.content)
