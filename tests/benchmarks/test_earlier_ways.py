"""The ways of earlier trainers: each does what it says, and the report sets each beside this project."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

import classroom_rl.engines.vllm.engine
import classroom_rl.server.app
import classroom_rl.server.open_models
import classroom_rl.server.sampling_service
from benchmarks import earlier_trainer
from benchmarks.earlier_launch import LOCKSTEP, NO_CACHE, RESTART, RESTART_ALL, TEXT, WAYS, server_command, ways_of
from benchmarks.earlier_server import RestartedEngine, TextLookup, switch_on
from benchmarks.earlier_trainer import BEFORE_BATCH_S, OTHER_PROCESSES_S, EarlierPlayer
from benchmarks.earlier_ways import ARMS, TOGETHER, report
from benchmarks.rounds import Round
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.engine import EmbeddedJudge
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.group_variance import PlayedBatch
from classroom_rl.trainer.sample_batch import BatchPlayer
from tests.conftest import free_port, quickstart_overrides
from tests.models.test_policy_folder import save_model
from tests.support.configs import loaded
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import SCORES, serving

SWITCHED = (
    (classroom_rl.server.sampling_service, "ConcurrentSchedule"),
    (classroom_rl.server.sampling_service, "Runner"),
    (classroom_rl.server.app, "create_app"),
    (classroom_rl.server.open_models, "_start_engines"),
    (classroom_rl.engines.vllm.engine, "load_engine"),
)
LINES = {
    "teacher": ("Good. What do you do at home today?", "Almost. Look at the last word.", "Well done!"),
    "student": ("I cook soup at home today.", "She go to school."),
}


class UnevenEngine(ScriptedEngine):
    """A scripted engine whose answers are all different, and of which some take longer than others."""

    def __init__(self, role: str, model: str, begun: list[str]):
        numbers, chance = count(), random.Random(role)
        super().__init__(load_tokenizer(role, model), lambda _: f"Number {next(numbers)}. {chance.choice(LINES[role])}")
        self._role, self._begun, self._chance = role, begun, chance

    async def generate(self, prompt_ids, sampling):
        self._begun.append(self._role)
        await asyncio.sleep(self._chance.choice((0.0, 0.02)))
        return await super().generate(prompt_ids, sampling)


class CountingJudge(EmbeddedJudge):
    """Scores a conversation by the number in its first message, so that rewards differ."""

    async def judge(self, rule, conversation, problem, attempt, facts) -> str:
        number = int(conversation[0]["content"].split()[1].strip("."))
        return json.dumps(SCORES | {"task_final_score": 1 - number / 100})


@pytest.fixture
def begun() -> list[str]:
    """The roles of all messages, in the order in which they were begun."""
    return []


@pytest.fixture
def room(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[str]) -> TrainRLConfig:
    """The configuration of a server with scripted engines; what a test switches on is switched off after it."""
    for module, name in SWITCHED:
        monkeypatch.setattr(module, name, getattr(module, name))

    async def start(wanted, *_):
        return {role: UnevenEngine(role, model.model_name_or_path, begun) for role, model in wanted.items()}

    monkeypatch.setattr(classroom_rl.server.open_models, "_start_engines", start)
    monkeypatch.setattr(classroom_rl.server.open_models, "embedded_judge", lambda *_: CountingJudge())
    overrides = quickstart_overrides(tmp_path / "run", world / "blank", world, free_port())
    return loaded("train_rl", *overrides, "generation.max_tokens_per_turn=40")


def play(config: TrainRLConfig, lessons: Sequence[str], then: Callable = lambda client, answer: None) -> list:
    """Play a batch on a server with the ways that are switched on; returns its conversations."""
    folder, port = Path(config.logging.save_dir), config.generation.server_port
    folder.mkdir(parents=True)
    problems = [lesson for lesson in lessons[:3] for _ in range(4)]
    request = SampleRequest(problems=problems, answers=[""] * 12, request_id="r", seed=1, step=0)
    with serving(classroom_rl.server.app.create_app(config, folder), port) as url:
        client = ClassroomClient(url)
        answer = client.sample(request)
        then(client, answer)
    return answer.conversations


def session(config: TrainRLConfig, client: ClassroomClient | None = None) -> SimpleNamespace:
    """What a player needs of a training that is about to begin."""
    client = client or ClassroomClient("http://nowhere")
    return SimpleNamespace(config=config, problems=[], client=client, gpus=None, run_folder=Path(), run_id="run")


# Lockstep -------------------------------------------------------------------------------------------------------------


def test_in_lockstep_all_take_their_turns_together_and_judging_waits_for_all(room, lessons, begun) -> None:
    switch_on(frozenset({LOCKSTEP}))
    play(room, lessons)
    runs = [(role, len(list(group))) for role, group in groupby(begun)]
    assert runs == [("teacher", 12), ("student", 12), ("teacher", 12), ("student", 12), ("teacher", 12)]
    events = [event["event"] for event in read_journal(Path(room.logging.save_dir) / JOURNAL_NAME)]
    assert max(index for index, name in enumerate(events) if name == "turn") < events.index("verdict")


def test_without_lockstep_nobody_waits(room, lessons, begun) -> None:
    play(room, lessons)
    assert len(list(groupby(begun))) > 5


# Rewards by text ------------------------------------------------------------------------------------------------------


def test_rewards_by_text_are_those_of_the_conversations(room, lessons, monkeypatch) -> None:
    switch_on(frozenset({TEXT}))
    batches = []

    def ask(client, answer) -> None:
        first, *others = answer.conversations
        changed = first.model_copy(update={"reward": -1.0})
        monkeypatch.setattr(BatchPlayer, "play", lambda *_: PlayedBatch([changed, *others], [], []))
        player = EarlierPlayer(session(room, client), frozenset({TEXT}))
        batches.append(player.play(PolicyVersion("run", 1), 0, 1, None))

    records, (batch,) = play(room, lessons, ask), batches
    assert batch.records == records and len({record.reward for record in records}) > 1
    assert batch.figures["by_text/wrong_rewards"] == 1, "the one that was changed on the way"


def test_a_text_is_taken_for_the_conversation_with_most_of_its_characters() -> None:
    lookup = TextLookup([["plan", "Hello.", "Hi."], ["plan", "Hello.", "Good day.", "Bye."], ["other", "Good day."]])
    assert lookup.find("<s>plan</s>Hello.</s>Good day.</s>Bye.</s>") == 1
    assert lookup.find("<s>other</s>Good day.</s>") == 2
    assert lookup.find("<s>plan</s>Hello.</s>") == 0, "among equals the first"


def test_looking_all_up_costs_the_square_of_their_number() -> None:
    def comparisons(conversations: int) -> int:
        batch = [[f"prompt {index}", "Hello.", f"Number {index}."] for index in range(conversations)]
        lookup = TextLookup(batch)
        assert [lookup.find("".join(messages)) for messages in batch] == list(range(conversations))
        return lookup.comparisons

    assert [comparisons(number) for number in (1, 4, 8)] == [3, 3 * 16, 3 * 64]


# No prefix cache ------------------------------------------------------------------------------------------------------


@pytest.mark.engines
def test_engines_without_a_prefix_cache_differ_in_nothing_else(room, monkeypatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments, **_: arguments)
    with_cache = classroom_rl.engines.vllm.engine.VllmEngine._load(room.teacher_model, 1, False)
    switch_on(frozenset({NO_CACHE}))
    without = classroom_rl.engines.vllm.engine.VllmEngine._load(room.teacher_model, 1, False)
    assert (with_cache.enable_prefix_caching, without.enable_prefix_caching) == (True, False)
    assert replace(without, enable_prefix_caching=True) == with_cache


# Engines that are started again ---------------------------------------------------------------------------------------


class Process:
    """An engine without a model, which can be started and ended. `happened` is what happened to all of them: the model
    of each that was started, and None for each that was ended."""

    happened: ClassVar[list[str | None]] = []

    def __init__(self, model: str):
        self.model, self.ended, self.pid = model, False, len(self.happened)
        self.happened.append(model)

    @classmethod
    async def start(cls, model, seed, generation):
        return cls(model.model_name_or_path)

    def shutdown(self) -> None:
        self.ended = True
        self.happened.append(None)

    def check_alive(self) -> None:
        assert not self.ended, "it died"

    def health(self):
        return SimpleNamespace(pids=[self.pid])


@pytest.mark.parametrize("way", [RESTART, RESTART_ALL])
def test_publishing_ends_engines_and_starts_others(way, room, world, tmp_path, monkeypatch) -> None:
    async def start(wanted, *_):
        return {role: Process(model.model_name_or_path) for role, model in wanted.items()}

    monkeypatch.setattr(Process, "happened", [])
    monkeypatch.setattr(classroom_rl.server.open_models, "_start_engines", start)
    switch_on(frozenset({way}))
    policy, folder = PolicyVersion("run", 1), policy_path(tmp_path, 1)
    write_policy(folder, policy, save_model)
    models = {"teacher": room.teacher_model, "student": room.student_model}

    async def publish():
        engines = await classroom_rl.server.open_models._start_engines(models, room.generation, 1)
        before = {role: engine.health().pids for role, engine in engines.items()}
        await engines["teacher"].load_policy(folder, policy, 1.0)
        return engines, before

    engines, before = asyncio.run(publish())
    blank = str(world / "blank")
    restarts = {RESTART: [None, str(folder)], RESTART_ALL: [None, None, str(folder), blank]}[way]
    assert Process.happened == [blank, blank, *restarts]
    changed = {role for role, engine in engines.items() if engine.health().pids != before[role]}
    assert changed == ({"teacher"} if way == RESTART else {"teacher", "student"})
    assert engines["teacher"].policy == policy


def test_an_engine_that_is_being_started_again_does_not_count_as_dead(room, monkeypatch) -> None:
    monkeypatch.setattr(Process, "happened", [])
    process = Process("model")
    engine = RestartedEngine(process, room.teacher_model, 1, room.generation)
    engine.end()
    engine.check_alive()
    engine.shutdown()
    assert process.ended and Process.happened == ["model", None], "ended once, also if the server ends now"
    asyncio.run(engine.start_again())
    engine._engine.ended = True
    with pytest.raises(AssertionError, match="it died"):
        engine.check_alive()


# Fixed sleeps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "slept"), [(True, [BEFORE_BATCH_S]), (False, [BEFORE_BATCH_S, 110.0])])
def test_processes_sleep_around_a_batch(first: bool, slept: list[float], room, monkeypatch) -> None:
    """A batch of ten seconds: the others of a machine have slept two minutes when it has been there for long."""
    now, sleeps = [0.0], []
    clock = SimpleNamespace(sleep=sleeps.append, monotonic=lambda: now[0])
    monkeypatch.setattr(earlier_trainer, "time", clock)
    monkeypatch.setattr(BatchPlayer, "play", lambda *_: now.append(now.pop() + 10.0))
    player = EarlierPlayer(session(room), frozenset({"sleeps"}))
    player.play(PolicyVersion("run", 1), 0, 1, SimpleNamespace(is_local_main_process=first))
    assert sleeps == slept and OTHER_PROCESSES_S == 120.0


# Arms and report ------------------------------------------------------------------------------------------------------


def test_every_way_is_an_arm_and_all_of_them_but_the_sleeps_are_one() -> None:
    assert set(ARMS) >= {"none", *WAYS} and all(ways_of(arm) <= set(WAYS) for arm in ARMS)
    assert ways_of("none") == frozenset()
    assert ways_of(TOGETHER) == {LOCKSTEP, NO_CACHE, RESTART, TEXT}
    assert server_command(TOGETHER, ["seed=1"])[1:] == ["-m", "benchmarks.earlier_server", TOGETHER, "seed=1"]
    with pytest.raises(SystemExit, match="no way slowly"):
        ways_of("lockstep+slowly")


def test_the_report_gives_each_arm_the_median_of_its_ratios() -> None:
    rounds = {
        "none": [Round(2.0, 0.5, 400), Round(4.0, 0.5, 500), Round(2.0, 0.5, 500)],
        "text": [Round(6.0, 0.5, 400), Round(4.0, 0.5, 500), Round(4.4, 0.5, 500)],
    }
    lines = {line.split()[0]: line.split() for line in report(rounds).splitlines()[1:]}
    assert lines["none"][-3] == "1.00" and lines["text"][-4:-2] == ["4.4", "2.20"]
