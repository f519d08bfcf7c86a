"""Server and trainer compare everything that a conversation depends on."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from classroom_rl.config.base import GenerationConfig, ServerConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.server.agreement import conversation_keys, digest_of, refuse_other_play
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.resume import keys_of
from classroom_rl.trainer.servers import AssignedServer
from classroom_rl.trainer.session import connect
from tests.conftest import free_port
from tests.server.conftest import BODY
from tests.support.configs import training
from tests.support.scripted_room import Room, application, serving

_OF_THE_TRAINER = (
    "train",
    "dataset",
    "guards",
    "evaluation",
    "huggingface",
    "logging",
    "skip_first_samples",
    "dry_run",
)
_OF_NO_CONVERSATION = {"generation.answer_timeout_s", "generation.student_attempt_prompt_path"}
_OF_A_MODEL_THAT_RUNS = (
    "max_num_seqs gpu_memory_utilization number_of_gpus_per_instance data_parallel_size gpus enforce_eager "
    "cpu_kvcache_gib cpu_cores api_key_env max_concurrent_requests requests_per_minute tokens_per_minute "
    "request_timeout_s deadline_s usd_per_million_prompt_tokens usd_per_million_completion_tokens max_cost_usd "
    "max_failed_share dropout"
).split()


def test_every_key_is_compared_or_named_as_one_that_no_conversation_depends_on():
    """A new key of the schema has to be put into one of these places."""
    config = training(
        "--config-name=7b",
        "supervisor_model.model_name_or_path=rules",
        "generation.teacher_tools=[calculator]",
        "generation.readers_path=readers",
        "generation.quote_teacher=true",
        "generation.level.of_lessons=A2",
        "generation.post_test.enable=true",
        *(
            f"{role}_model.vllm.{key}={{seed: 1}}"
            for role in ("teacher", "student", "judge", "reward", "supervisor")
            for key in ("extra", "chat_template_kwargs")
        ),
    )
    config.generation.trained_role = "student"  # which has not all of these
    compared = {key.removeprefix("the content of ") for key in conversation_keys(config)}
    servers_own = {f"generation.{field.name}" for field in fields(ServerConfig)}
    for key in keys_of(TrainRLConfig):
        if key == "train.turn_credit.rewards":  # the one key of `train` that says what a server computes
            assert key in compared
            continue
        is_named = key.partition(".")[0] in _OF_THE_TRAINER or key in servers_own | _OF_NO_CONVERSATION
        is_named = is_named or (
            key.partition(".")[0].endswith("_model") and key.rpartition(".")[2] in _OF_A_MODEL_THAT_RUNS
        )
        is_compared = any(compared_key == key or compared_key.startswith(f"{key}.") for compared_key in compared)
        assert is_named != is_compared, f"{key} is {'in both places' if is_named else 'compared by nobody'}"


@dataclass
class Playing:
    """A server with scripted engines, and the configuration of a trainer that agrees with it."""

    url: str
    config: TrainRLConfig

    def connect(self, change: Callable[[TrainRLConfig], None] = lambda config: None) -> ClassroomClient:
        config = copy.deepcopy(self.config)
        change(config)
        return connect(config, AssignedServer(0, self.url, True))


@contextmanager
def playing(room: Room, generation: GenerationConfig, monkeypatch: pytest.MonkeyPatch, port: int) -> Iterator[Playing]:
    app = application(room, generation, monkeypatch)(port=port, tells=True)
    with serving(app, port) as url:
        yield Playing(url, app.state.config)


@pytest.fixture
def server(room: Room, generation: GenerationConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playing]:
    with playing(room, generation, monkeypatch, free_port()) as running:
        yield running


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generation.max_turns", 3),
        ("generation.max_tokens_per_turn", 7),
        ("generation.student_error_rate", 0.9),
        ("generation.judges_rules_prompts_paths", {"pedagogical_eval": "rules"}),
        ("generation.student_names", ["Kim"]),
        ("generation.low_score_threshold", 0.9),
        ("generation.teacher_prompt_path", "prompt_templates/quickstart/student_correct.txt"),
        ("teacher_model.vllm.temperature", 0.3),
        ("student_model.model_name_or_path", "another"),
        ("student_model.vllm.top_p", 0.5),
        ("judge_model.replies_per_attempt", 9),
        ("judge_model.model_name_or_path", "rules"),
        ("judge_model.rubric", "criteria.yaml"),
        ("reward_model.model_name_or_path", "None"),
        ("train.turn_credit.mode", "immediate"),
        ("seed", 5),
    ],
)
def test_a_trainer_that_a_server_does_not_play_for_is_refused_with_the_key(server: Playing, key: str, value: Any):
    def change(config: TrainRLConfig) -> None:
        group, _, name = key.rpartition(".")
        setattr(_group(config, group), name, value)

    compared = "train.turn_credit.rewards" if key == "train.turn_credit.mode" else key
    with pytest.raises(ConfigError, match=rf"would hold other conversations .*{compared}.* is .* there and .* here"):
        server.connect(change)


def _group(config: Any, dotted: str) -> Any:
    for part in filter(None, dotted.split(".")):
        config = getattr(config, part)
    return config


def test_both_values_and_what_to_do_are_said(server: Playing):
    turns = server.config.generation.max_turns
    with pytest.raises(ConfigError) as refused:
        server.connect(lambda config: setattr(config.generation, "max_turns", 3))
    assert f"generation.max_turns is {turns} there and 3 here. Start the server again with" in str(refused.value)
    assert server.url in str(refused.value)


def test_what_says_only_how_fast_and_where_may_differ(server: Playing):
    def change(config: TrainRLConfig) -> None:
        config.generation.sample_timeout_s = 77.0
        config.generation.server_start_timeout_s = 33.0
        config.teacher_model.vllm.max_num_seqs = 3
        config.teacher_model.vllm.gpu_memory_utilization = 0.1
        config.judge_model.max_cost_usd = 1.0
        config.train.learning_rate = 1.0
        config.train.max_steps = 1

    assert server.connect(change).url == server.url


def test_a_template_that_was_changed_since_the_server_read_it_is_named(server: Playing):
    path = Path(server.config.generation.teacher_prompt_path)
    original = path.read_text()
    assert server.connect()
    path.write_text(f"{original}\nBe brief.")
    with pytest.raises(ConfigError, match=rf'"{path}" has changed since the server read it\. Start the server again'):
        server.connect()
    path.write_text(original)
    assert server.connect()


def test_a_supervisor_that_one_side_lacks_is_one_difference():
    with pytest.raises(ConfigError) as refused:
        refuse_other_play(
            conversation_keys(training()),
            conversation_keys(training("supervisor_model.model_name_or_path=rubric")),
            "there",
        )
    assert 'for: supervisor_model is null there and "rubric" here. Start' in str(refused.value)


def test_a_server_that_comes_back_with_another_configuration_is_refused_with_its_next_batch(
    room: Room, generation: GenerationConfig, monkeypatch: pytest.MonkeyPatch
):
    port = free_port()
    with playing(room, generation, monkeypatch, port) as first:
        client = first.connect()
        assert client.sample(SampleRequest(**BODY)).conversations
    other = r"generation\.max_turns is 3 there and \d+ here"
    with (
        playing(room, replace(generation, max_turns=3), monkeypatch, port),
        pytest.raises(ConfigError, match=other),
    ):
        client.sample(SampleRequest(**BODY | {"request_id": "second"}))


def test_a_server_that_does_not_say_what_it_plays_is_taken(server: Playing):
    refuse_other_play({}, {}, server.url)
    client = ClassroomClient(server.url)
    assert client.sample(SampleRequest(**BODY)).plays


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (["teacher_model.model_name_or_path=models/a"], ["teacher_model.model_name_or_path=./models/a/"]),
        (["teacher_model.model_name_or_path=models/a"], ["teacher_model.model_name_or_path={cwd}/models/a"]),
        (
            ["generation.teacher_prompt_path=prompt_templates/quickstart/teacher.txt"],
            ["generation.teacher_prompt_path={cwd}/prompt_templates/quickstart/teacher.txt"],
        ),
        (
            ["logging.save_dir=runs/a", "student_model.model_name_or_path=runs/a/model"],
            ["logging.save_dir={cwd}/runs/a", "student_model.model_name_or_path=runs/a/model"],
        ),
        (
            ["logging.save_dir=./runs/a", "student_model.model_name_or_path=runs/a/model"],
            ["logging.save_dir=runs/a/", "student_model.model_name_or_path={cwd}/runs/a/model"],
        ),
    ],
)
def test_a_path_may_be_spelled_in_another_way(there: list[str], here: list[str]) -> None:
    theirs, ours = (
        conversation_keys(training(*(override.format(cwd=Path.cwd()) for override in overrides)))
        for overrides in (there, here)
    )
    assert digest_of(theirs) == digest_of(ours)
    refuse_other_play(theirs, ours, "http://server")


def test_another_folder_of_the_same_name_is_another_model() -> None:
    theirs, ours = (
        conversation_keys(training(f"teacher_model.model_name_or_path={name}")) for name in ("a/model", "/a/model")
    )
    with pytest.raises(ConfigError, match="teacher_model.model_name_or_path"):
        refuse_other_play(theirs, ours, "http://server")
