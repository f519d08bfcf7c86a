"""The phased schedule: which episodes may go on, which engines are awake meanwhile, and that no episode waits
forever."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.conversation import State
from classroom_rl.environments.classroom.environment import PHASES
from classroom_rl.errors import EngineFailure, GpuFull, ProviderFailure
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.scheduler import PhasedSchedule, YieldGate, phase_of
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.server.engine_sleep import EngineSleep, this_process
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import Room, untimed
from tests.support.turned_clock import run
from tests.trainer.test_resume import judge_that_accepts

DIALOGUE, JUDGING, SOLUTIONS, REWARDS = (phase.roles for phase in PHASES)
REQUEST = SampleRequest(
    problems=["fractions", "fractions", "sums"], answers=["1/2", "1/2", "7"], request_id="r", seed=1, step=0
)


def test_every_state_that_takes_work_belongs_to_one_phase() -> None:
    for state in set(State) - {State.START, State.END}:
        assert sum(state in phase.states for phase in PHASES) == 1 and state in phase_of(PHASES, state).states


# The schedule -------------------------------------------------------------------------------------------------------


class Watched:
    """A phased schedule whose engines take a moment to change, and what is done under it."""

    def __init__(self) -> None:
        self.awake: tuple[str, ...] = DIALOGUE
        self.changing = False
        self.woken: list[tuple[str, ...]] = []
        self.failure: Exception | None = None
        self.schedule = PhasedSchedule(self.wake_only, PHASES)
        self._draw = random.Random(0)

    async def wake_only(self, roles: tuple[str, ...]) -> None:
        self.changing = True
        await asyncio.sleep(0.001)
        self.changing = False
        if self.failure is not None:
            raise self.failure
        self.awake = roles
        self.woken.append(roles)

    async def work(self, registration, states: list[State], seconds: float = 0.0) -> None:
        for state in states:
            await registration.wait_for_phase(state)
            assert self.awake == phase_of(PHASES, state).roles and not self.changing
            await asyncio.sleep(seconds)
            assert self.awake == phase_of(PHASES, state).roles and not self.changing, (
                "engines changed under a conversation"
            )
        registration.deregister_one()

    async def request(self, *conversations: list[State]) -> None:
        with self.schedule.register(len(conversations)) as registration:
            async with asyncio.TaskGroup() as group:
                for states in conversations:
                    group.create_task(self.work(registration, states, self._draw.random() / 500))


def test_a_phase_waits_for_the_slowest_of_all_requests() -> None:
    states = [State.TEACHER_TURN, State.STUDENT_TURN, State.TEACHER_TURN, State.JUDGE_TURN, State.GENERATE_SOLUTION]

    async def scenario() -> Watched:
        watched = Watched()
        await asyncio.gather(watched.request(states, states[2:]), watched.request(states * 1), watched.request(states))
        await settle(watched)
        return watched

    watched = run(scenario())
    assert watched.woken == [JUDGING, SOLUTIONS, DIALOGUE], "one round for all, and back when all are done"


def test_a_request_that_comes_later_waits_for_its_phase_to_come_round() -> None:
    async def scenario() -> Watched:
        watched = Watched()
        first = asyncio.create_task(watched.request([State.TEACHER_TURN, State.JUDGE_TURN, State.GENERATE_SOLUTION]))
        while watched.awake != JUDGING:
            await asyncio.sleep(0.001)
        await asyncio.gather(first, watched.request([State.TEACHER_TURN, State.JUDGE_TURN]))
        await settle(watched)
        return watched

    assert run(scenario()).woken == [JUDGING, SOLUTIONS, DIALOGUE, JUDGING, DIALOGUE]


async def settle(watched: Watched) -> None:
    while watched.schedule._switch is not None or watched.awake != DIALOGUE:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("seed", range(20))
def test_no_mixture_of_requests_blocks(seed: int) -> None:
    """Sixteen requests at once, each of up to six conversations that need any phases in any order; some are cancelled,
    also before they have begun."""
    draw = random.Random(seed)
    states = [State.TEACHER_TURN, State.STUDENT_TURN, State.JUDGE_TURN, State.GENERATE_SOLUTION, State.REWARD_TURN]

    async def scenario() -> None:
        watched = Watched()

        async def come_and_go(number: int) -> None:
            await asyncio.sleep(draw.random() / 50)
            conversations = [draw.choices(states, k=draw.randint(0, 7)) for _ in range(draw.randint(1, 6))]
            request = asyncio.create_task(watched.request(*conversations))
            if number % 3 == 0:
                await asyncio.sleep(draw.choice([0, 0.005]))
                request.cancel()
            await asyncio.wait([request])
            assert request.cancelled() or request.exception() is None

        async with asyncio.timeout(60):
            await asyncio.gather(*(come_and_go(number) for number in range(16)))
            await settle(watched)

    run(scenario())


def test_engines_that_cannot_get_ready_fail_who_waits_for_them_and_are_tried_again() -> None:
    async def scenario() -> None:
        watched = Watched()
        watched.failure = GpuFull("no room")
        with pytest.raises(BaseExceptionGroup) as caught:
            await watched.request([State.JUDGE_TURN], [State.JUDGE_TURN])
        assert all(isinstance(error, GpuFull) for error in caught.value.exceptions)
        while watched.schedule._switch is not None:
            await asyncio.sleep(0.001)
        watched.failure = None
        await watched.request([State.TEACHER_TURN])
        assert watched.woken == [DIALOGUE]

    run(asyncio.wait_for(scenario(), 60))


# Conversations under it ---------------------------------------------------------------------------------------------


@pytest.fixture
def maths(generation: GenerationConfig) -> GenerationConfig:
    return replace(
        generation,
        schedule="phased",
        forced_conversation_type="attempt",
        judges_rules_prompts_paths={"does_not_leak_answer": "scripted", "follows_pedagogical_values": "scripted"},
        number_judge_attempts=2,
    )


def scripted(room: Room) -> Room:
    """What is said depends on the prompt alone."""
    room.teacher = ScriptedEngine(room.tokenizer, lambda prompt: f"Say hello {len(prompt) % 7}.")
    room.student = ScriptedEngine(room.tokenizer, lambda prompt: f"Hello {len(prompt) % 5}.")
    room.judge = ScriptedJudge(judge_that_accepts)
    return room


def phases_in(room: Room) -> list[str]:
    """The phases as the journal shows them, repetitions taken together."""
    phases = {
        "turn": "dialogue",
        "verdict": "judging",
        "solutions": "solutions",
        "grades": "rewards",
        "rewards": "rewards",
    }
    events = [event["event"] for event in read_journal(room.folder / JOURNAL_NAME)]
    return [phase for phase, _ in groupby(phases[event] for event in events if event in phases)]


class GradesByLength:
    """A reward model, which keeps what was awake when it was asked."""

    model_name = "a reward model"

    def __init__(self, room: Room):
        self.room, self.woken = room, []

    async def score(self, messages: list[dict[str, str]]) -> float:
        self.woken.append(self.room.woken[-1])
        return len(messages[-1]["content"]) / 100


def uneven(room: Room) -> Room:
    """One conversation is done long before the others."""
    room = scripted(room)
    room.teacher = ScriptedEngine(
        room.tokenizer, lambda prompt: "Bye. <end_of_conversation>" if "Teach a to" in prompt else "Say hello."
    )
    return room


PROBLEMS = {"problems": ["a", "bb", "ccc"], "answers": ["1", "2", "3"]}


def test_all_conversations_finish_a_phase_before_the_next_begins(tokenizer, tmp_path, maths) -> None:
    room = uneven(Room(tokenizer, tmp_path))
    room.reward = GradesByLength(room)
    records = room.play(maths, **PROBLEMS)
    assert phases_in(room) == ["dialogue", "judging", "solutions", "rewards"]
    assert room.woken[:3] == [JUDGING, SOLUTIONS, REWARDS]
    assert all(record.reward is not None for record in records)
    solutions = [solution for record in records for solution in record.solutions]
    assert [solution.grade for solution in solutions] == [len(solution.text) / 100 for solution in solutions]
    assert set(room.reward.woken) == {REWARDS}, "it grades when all solutions are written"


def test_without_phases_conversations_do_different_things_at_a_time(tokenizer, tmp_path, maths) -> None:
    room = uneven(Room(tokenizer, tmp_path))
    room.play(replace(maths, schedule="concurrent"), **PROBLEMS)
    assert room.woken == [] and len(phases_in(room)) > 4


def test_a_batch_that_was_stopped_in_any_phase_goes_on_there(tokenizer, tmp_path, maths) -> None:
    """The journal is cut at every line, and taken up under either schedule."""
    uncut = scripted(Room(tokenizer, tmp_path / "whole"))
    expected = untimed(asyncio.run(uncut.open(maths).sample(REQUEST)))
    lines = (uncut.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        room = scripted(Room(tokenizer, tmp_path / f"cut{count}"))
        room.folder.mkdir()
        (room.folder / JOURNAL_NAME).write_bytes(b"".join(lines[:count]))
        schedule = "concurrent" if count % 3 == 0 else "phased"
        answer = asyncio.run(room.open(replace(maths, schedule=schedule)).sample(REQUEST))
        assert untimed(answer) == expected, count
        events = [json.loads(line)["event"] for line in (room.folder / JOURNAL_NAME).read_bytes().splitlines()]
        assert len(events) - events.count("batch") == len(lines) - 1, "nothing was done twice"


def test_a_request_that_fails_leaves_the_others_and_the_clock_alone(tokenizer, tmp_path, maths) -> None:
    room = scripted(Room(tokenizer, tmp_path / "run"))

    def judge(rule: str, conversation: list, attempt: int) -> str:
        if len(failed) < 1:
            failed.append(rule)
            raise ProviderFailure("the judge is gone")
        return judge_that_accepts(rule, conversation, attempt)

    failed: list[str] = []
    room.judge = ScriptedJudge(judge)

    async def scenario() -> None:
        service = room.open(maths)
        requests = [REQUEST.model_copy(update={"request_id": name}) for name in ("a", "b", "c")]
        outcomes = await asyncio.gather(*map(service.sample, requests), return_exceptions=True)
        assert sum(isinstance(outcome, ProviderFailure) for outcome in outcomes) == 1
        retried = await asyncio.gather(*map(service.sample, requests))
        assert all(record.reward is not None for response in retried for record in response.conversations)

    run(asyncio.wait_for(scenario(), 60))


# Which engines are awake --------------------------------------------------------------------------------------------


class Sleeper:
    """An engine that is awake, and at most one of a group that has to take turns."""

    def __init__(self, name: str, events: list[str]):
        self.name, self.events, self.asleep, self.failure = name, events, False, None

    async def sleep(self, timeout_s: float) -> None:
        if not self.asleep:
            self.asleep = True
            self.events.append(f"-{self.name}")

    async def wake_up(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.asleep:
            self.asleep = False
            self.events.append(f"+{self.name}")


def three_engines() -> tuple[EngineSleep, dict[str, Sleeper], list[str]]:
    """As after a start with the phased schedule: each fell asleep when it was loaded, then the first phase's woke."""
    events: list[str] = []
    engines = {name: Sleeper(name, events) for name in ("teacher", "student", "judge")}
    engine_sleep = EngineSleep(engines, 1.0, wanted=DIALOGUE)
    engines["judge"].asleep = True
    return engine_sleep, engines, events


def drain(events: list[str]) -> list[str]:
    drained, events[:] = list(events), []
    return drained


def test_engines_sleep_before_others_wake() -> None:
    engine_sleep, _, events = three_engines()

    async def scenario() -> None:
        for roles, changes in (
            (JUDGING, ["-teacher", "-student", "+judge"]),
            (SOLUTIONS, ["-judge", "+student"]),
            (REWARDS, []),  # no engine of this server
            (DIALOGUE, ["+teacher"]),
            (DIALOGUE, []),
        ):
            await engine_sleep.wake_only(roles)
            assert drain(events) == changes

    asyncio.run(scenario())


def test_a_trainer_gets_all_engines_and_only_those_of_the_phase_come_back() -> None:
    engine_sleep, engines, events = three_engines()

    async def scenario() -> None:
        await engine_sleep.sleep([this_process()])
        assert drain(events) == ["-teacher", "-student"]
        await engine_sleep.wake_up()
        assert drain(events) == ["+teacher", "+student"]
        await engine_sleep.wake_only(JUDGING)
        drain(events)
        await engine_sleep.sleep([this_process()])
        await engine_sleep.wake_only(SOLUTIONS)  # nothing wakes on the trainer's GPU
        assert drain(events) == ["-judge"] and all(engine.asleep for engine in engines.values())
        await engine_sleep.wake_up()
        assert drain(events) == ["+student"]
        engine_sleep.close()

    asyncio.run(scenario())


def test_weights_are_loaded_in_the_middle_of_another_phase() -> None:
    engine_sleep, engines, events = three_engines()

    async def load() -> None:
        async with engine_sleep.room_for_loading("teacher"):
            assert engines["student"].asleep and engines["judge"].asleep
            await engines["teacher"].wake_up()

    async def scenario() -> None:
        await engine_sleep.wake_only(JUDGING)
        drain(events)
        await load()
        assert drain(events) == ["-judge", "+teacher", "-teacher", "+judge"]
        await engine_sleep.sleep([this_process()])
        drain(events)
        await load()
        assert drain(events) == ["+teacher", "-teacher"], "the GPU is the trainer's"
        await engine_sleep.wake_up()
        assert drain(events) == ["+judge"]
        engine_sleep.close()

    asyncio.run(scenario())


def test_a_loan_that_fails_wakes_what_was_awake() -> None:
    engine_sleep, engines, events = three_engines()

    async def refuse(timeout_s: float) -> None:
        raise EngineFailure("it is dead")

    engines["student"].sleep = refuse

    async def scenario() -> None:
        with pytest.raises(EngineFailure):
            await engine_sleep.sleep([this_process()])
        assert drain(events) == ["-teacher", "+teacher"] and engines["judge"].asleep

    asyncio.run(scenario())


async def go_through(count: int, per_pass: int, rounds: int, cancelled: set[int]) -> list[tuple[int, int]]:
    """Each of `count` coroutines goes through the gate `rounds` times. Returns (coroutine, pass) in order."""
    gate, loop, now, passes = YieldGate(per_pass), asyncio.get_running_loop(), 0, []

    def count_passes() -> None:
        nonlocal now
        now += 1
        loop.call_soon(count_passes)

    async def walk(name: int) -> None:
        for _ in range(rounds):
            await gate.go_through()
            passes.append((name, now))

    loop.call_soon(count_passes)
    tasks = [asyncio.create_task(walk(name)) for name in range(count)]
    await asyncio.sleep(0)
    for name in cancelled & set(range(count)):
        tasks[name].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    return passes


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4), st.sets(st.integers(0, 59), max_size=20))
def test_everybody_goes_through_and_few_at_a_time(count, per_pass, rounds, cancelled):
    passes = run(go_through(count, per_pass, rounds, cancelled))
    times = Counter(name for name, _ in passes)
    assert all(times[name] == rounds for name in range(count) if name not in cancelled)
    assert all(number <= 2 * per_pass for number in Counter(now for _, now in passes).values())


@given(st.integers(1, 60), st.integers(1, 9))
def test_who_comes_first_goes_first(count, per_pass):
    passes = run(go_through(count, per_pass, 1, set()))
    assert [name for name, _ in passes] == list(range(count))
    assert passes[-1][1] - passes[0][1] >= (count - 1) // per_pass - 1


def test_it_works_again_after_a_rest():
    async def twice() -> list[int]:
        gate, passed = YieldGate(2), []

        async def walk(name: int) -> None:
            await gate.go_through()
            passed.append(name)

        for _ in range(2):
            await asyncio.gather(*map(walk, range(7)))
            await asyncio.sleep(0.01)
        return passed

    assert run(twice()) == [*range(7)] * 2
