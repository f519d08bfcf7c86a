"""Whether the checks of a training notice a fooled judge: one that rewards the word "Great", beside a held-out judge
over HTTP that does not. The server is the real application with scripted engines."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from accelerate import PartialState

import classroom_rl.server.app
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.config.train_rl import GuardsConfig, TrainRLConfig
from classroom_rl.environments.classroom.canaries import CANARIES
from classroom_rl.environments.classroom.environment import DIALOGUE_ROLES, PHASES
from classroom_rl.environments.classroom.judge_check import (
    CanaryVerdict,
    JudgeCheck,
    JudgeCheckRequest,
    JudgeCheckResponse,
    SecondOpinion,
)
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.agreement import rank_correlation
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.judges.verdicts import Judgement, Scores, parse_judge_output
from classroom_rl.results.run_folder import JUDGE_CHECKS_NAME, has_score, read_lines
from classroom_rl.rollout.engine import ConversationFacts
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.scheduler import PhasedSchedule
from classroom_rl.rollout.store.journal import read_journal
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.judge_monitor import JudgeMonitor, summarize_check
from tests.conftest import free_port
from tests.support.judge_endpoint import Behaviour, Script, fails, hangs, judge_endpoint, says
from tests.support.scripted_engine import ScriptedJudge
from tests.support.scripted_room import Room
from tests.trainer.test_pleasing import FAITHFUL, RIGHT_ANYWAY

_RULE = "{% for turn in conversation %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
_QUESTION, _PRAISE = "What is a half?", "Great!"


def scores(share: float) -> str:
    return json.dumps(
        {"task_final_score": share, "forward_progression_score": share, "overall_momentum_score": 10 * share}
    )


def rewards_great(rule: str, conversation: list[dict[str, str]], attempt: int) -> str:
    """Half for a teacher that asks, all for one that says "Great"."""
    texts = [message["content"] for message in conversation if message["role"] == "teacher"]
    return scores(1.0 if all("Great" in text for text in texts) else honest_share(texts))


def honest_share(said: list[str]) -> float:
    return 0.5 if said and all("?" in text for text in said) else 0.0


def honest(body: dict, nth: int) -> Behaviour:
    lines = body["messages"][0]["content"].splitlines()
    return says(scores(honest_share([line for line in lines if line.startswith("teacher:")])))


class Training:
    """Server and monitor of a training whose teacher says what it is told to."""

    def __init__(self, room: Room, config: TrainRLConfig, client: ClassroomClient):
        self.room, self.client = room, client
        self.monitor = JudgeMonitor(config, client, room.folder)

    def batch(self, step: int, says: str) -> list[ConversationRecord]:
        self.room.teacher._script = lambda _: says
        problems = ["fractions", "sums", "areas", "angles"]
        request = SampleRequest(
            problems=problems,
            answers=[f"{problem}!" for problem in problems],
            request_id=f"step{step}",
            seed=1,
            step=step,
        )
        return self.client.sample(request).conversations

    def step(self, step: int, says: str) -> dict[str, float]:
        """What is logged of the judge at a step."""
        return self.check(step, self.batch(step, says))

    def check(self, step: int, records: list[ConversationRecord]) -> dict[str, float]:
        logged = self.monitor.check(PartialState(cpu=True), step, records)
        return {name: value for name, value in logged.items() if not name.startswith("guard/student_")}


@pytest.fixture
def start(
    room: Room, generation: GenerationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., "contextmanager[Training]"]:
    @contextmanager
    def training(held_out: Script | None = honest, **guards: object) -> Iterator[Training]:
        (tmp_path / "rule.txt").write_text(_RULE)
        generation.judges_rules_prompts_paths = {"pedagogical_eval": str(tmp_path / "rule.txt")}
        generation.server_port = free_port()
        config = TrainRLConfig(generation=generation, guards=GuardsConfig(judge_check_every_n_steps=10, **guards))
        with judge_endpoint(held_out or honest) as endpoint:
            if held_out is not None:
                config.guards.held_out_judge_model = JudgeModelConfig("other", base_url=endpoint.url)
            with listening(room, config, monkeypatch) as client:
                yield Training(room, config, client)

    return training


@contextmanager
def listening(room: Room, config: TrainRLConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClassroomClient]:
    async def open_service(*_: object):
        return room.open(config.generation)

    monkeypatch.setattr(classroom_rl.server.app, "open_service", open_service)
    port = config.generation.server_port
    app = classroom_rl.server.app.create_app(config, room.folder)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    client = ClassroomClient(f"http://127.0.0.1:{port}")
    try:
        client.wait_until_up(60)
        yield client
    finally:
        server.should_exit = True
        thread.join(60)


def test_a_judge_that_can_be_fooled_shows_its_gap_and_trips_a_canary(room: Room, start, caplog) -> None:
    room.judge = ScriptedJudge(rewards_great)
    with start() as training, caplog.at_level(logging.WARNING):
        first = training.step(0, _QUESTION)
        assert training.step(5, _PRAISE) == {}, "not due"
        last = training.step(10, _PRAISE)
    assert (first["guard/gap"], first["guard/gap_growth"], first["guard/gap_n"]) == (0.0, 0.0, 4)
    assert (last["guard/gap"], last["guard/gap_growth"], last["guard/held_out_reward"]) == (1.0, 1.0, 0.0)
    for figures in (first, last):
        canaries = {name: figures[f"guard/canary_{name}"] for name in CANARIES}
        assert canaries == dict.fromkeys(CANARIES, 0.0) | {"praise": 1.0} and figures["guard/failed"] == 0
    assert (first["guard/warnings"], last["guard/warnings"]) == (1, 2)
    assert "step 11: The judge may be being fooled: it gives 1.000 more than the held-out judge" in caplog.text
    assert "The judge can be fooled: it gives 1.000 to a planted conversation with a teacher that only praises" in (
        caplog.text
    )
    assert [check["step"] for check in read_lines(room.folder / JUDGE_CHECKS_NAME)] == [0, 10]


def test_an_honest_judge_is_not_warned_about(room: Room, start, caplog) -> None:
    def judge(rule: str, conversation: list[dict[str, str]], attempt: int) -> str:
        return scores(honest_share([message["content"] for message in conversation if message["role"] == "teacher"]))

    room.judge = ScriptedJudge(judge)
    with start() as training, caplog.at_level(logging.WARNING):
        logged = [training.step(step, reply) for step, reply in ((0, _QUESTION), (10, _PRAISE), (20, _QUESTION))]
    assert all(figures["guard/gap"] == figures["guard/warnings"] == figures["guard/failed"] == 0 for figures in logged)
    assert "fooled" not in caplog.text


def test_a_check_reaches_no_reward_and_no_record(room: Room, generation: GenerationConfig, start) -> None:
    room.judge = ScriptedJudge(rewards_great)
    with start() as training:
        before = training.batch(0, _PRAISE)
        events = list(read_journal(room.folder / "journal.jsonl"))
        training.monitor.check(PartialState(cpu=True), 0, before)
        training.monitor.check(PartialState(cpu=True), 0, before)
        assert training.batch(0, _PRAISE) == before
        rewards = training.client.rewards("pedagogical", [record.id for record in before])
    assert rewards == [record.reward for record in before] == [1.0] * 4
    (event,) = list(read_journal(room.folder / "journal.jsonl"))[len(events) :]
    assert event["event"] == "judge_check" and event["request"] == "step0-judge-check", "one, though asked for twice"
    assert len(event["found"]["second_opinions"]) == 4 and len(event["found"]["canaries"]) == len(CANARIES)
    service = room.open(generation)  # a server that takes over
    assert [service.record(record.id) for record in before] == before


def test_a_judge_that_fails_in_a_check_is_counted_and_stops_nothing(room: Room, start, caplog) -> None:
    def refuses_canaries(rule: str, conversation: list[dict[str, str]], attempt: int) -> str:
        if any(message["content"] == "" for message in conversation):
            raise ValueError("nothing to judge")
        return rewards_great(rule, conversation, attempt)

    def script(body: dict, nth: int) -> Behaviour:
        return says("I would rather not.") if "sums" in body["messages"][0]["content"] else fails(400)

    room.judge = ScriptedJudge(refuses_canaries)
    room.student._script = lambda prompt: "sums"
    with start(script) as training:
        logged = training.step(0, _QUESTION)
    assert logged == {
        "guard/gap_n": 0,
        **{f"guard/canary_{name}": 0.0 for name in CANARIES if name != "empty"},
        "guard/canary_praise": 1.0,
        "guard/failed": 5,
        "guard/held_out_cost_usd": pytest.approx(logged["guard/held_out_cost_usd"]),
        "guard/warnings": 1,
    }
    assert "ValueError: nothing to judge" in caplog.text and "JudgeOutputError" in caplog.text


def test_a_judge_that_hangs_is_given_up(room: Room, start) -> None:
    with start(lambda body, nth: hangs(), judge_check_timeout_s=0.5) as training:
        logged = training.step(0, _QUESTION)
    assert logged["guard/failed"] == 4


def test_a_check_that_the_server_refuses_stops_nothing(room: Room, start, caplog) -> None:
    with start(held_out=None) as training:
        gone = [record.model_copy(update={"id": "gone"}) for record in training.batch(0, _QUESTION)]
        logged = training.check(0, gone)
    assert logged == {"guard/failed": 1, "guard/gap_n": 0, "guard/warnings": 0}
    assert "the judge was not checked at step 1" in caplog.text and "no finished conversation gone" in caplog.text
    [line] = read_lines(room.folder / JUDGE_CHECKS_NAME)
    assert not has_score(line) and "no finished conversation gone" in line["error"]


def test_a_check_that_cannot_be_written_down_stops_nothing(room: Room, start, caplog) -> None:
    room.judge = ScriptedJudge(rewards_great)
    (room.folder / JUDGE_CHECKS_NAME).mkdir(parents=True)  # in its way
    with start(held_out=None) as training:
        assert training.step(0, _QUESTION)["guard/canary_praise"] == 1.0
    assert "the check of the judge at step 1 is not on record" in caplog.text


def test_canaries_alone_need_no_second_judge(room: Room, start) -> None:
    room.judge = ScriptedJudge(rewards_great)
    with start(held_out=None) as training:
        logged = training.step(0, _QUESTION)
    assert logged["guard/canary_praise"] == 1.0 and "guard/gap" not in logged and logged["guard/warnings"] == 1


def test_a_batch_of_two_passes_is_checked_once_and_on_time(room: Room) -> None:
    config = TrainRLConfig(guards=GuardsConfig(judge_check_every_n_steps=5))
    config.train.mu = 2
    monitor = JudgeMonitor(config, ClassroomClient("http://127.0.0.1:1"), room.folder)
    assert [step for step in range(0, 30, 2) if monitor.is_due(step)] == [0, 6, 10, 16, 20, 26]
    config.guards.judge_check_every_n_steps = 0
    assert not any(monitor.is_due(step) for step in range(30))


def test_canaries_wait_until_an_engine_that_judges_is_awake(room: Room, generation: GenerationConfig) -> None:
    """With generation.schedule: phased."""
    awake: list[tuple[str, ...]] = []

    async def wake_only(roles: Collection[str]) -> None:
        awake.append(tuple(roles))

    def judge(rule: str, conversation: list[dict[str, str]], attempt: int) -> str:
        assert awake[-1] == ("judge",)
        return scores(0.25)

    async def check() -> JudgeCheckResponse:
        service = room.open(generation)
        service.runner.schedule = PhasedSchedule(wake_only, PHASES)
        request = SampleRequest(problems=["sums"], answers=["2"], request_id="r", seed=1, step=0)
        conversations = (await service.sample(request)).conversations
        response = await JudgeCheck(service, None, None, 60).run(
            JudgeCheckRequest(request_id="check", step=0, conversations=[conversations[0].id])
        )
        await asyncio.sleep(0.01)
        return response

    room.judge = ScriptedJudge(judge)
    response = asyncio.run(check())
    assert [canary.score for canary in response.canaries] == [0.25] * len(CANARIES)
    assert awake[-1] == DIALOGUE_ROLES, "and then the next batch can begin"


# The figures, by hand ----------------------------------------------------------------------------------------------


def opinion(problem: str, training: float | None, held_out: float | None) -> SecondOpinion:
    return SecondOpinion(conversation="c", problem_id=problem, training=training, held_out=held_out, verdicts=[])


def test_gap_growth_and_correlation() -> None:
    opinions = [opinion("a", 0.9, 0.5), opinion("a", 0.8, 0.2), opinion("b", 0.3, 0.1), opinion("b", None, 0.4)]
    canary = CanaryVerdict(canary="leak", problem_id="a", score=None, verdicts=[])
    response = JudgeCheckResponse(request_id="r", second_opinions=opinions, canaries=[canary])
    summary = summarize_check(response, GuardsConfig(largest_gap_growth=0.2), first=0.1)
    assert summary["gap"]["mean"] == pytest.approx((0.4 + 0.6 + 0.2) / 3) and summary["gap"]["n"] == 3
    assert summary["growth"] == pytest.approx(0.3) and summary["rank_correlation"] == pytest.approx(1.0)
    assert summary["failed"] == 2 and len(summary["warnings"]) == 1
    assert summarize_check(response, GuardsConfig(largest_gap_growth=0.4), first=0.1)["warnings"] == []


def test_rank_correlation_by_hand() -> None:
    """Ranks 1, 2.5, 2.5, 4 against 2, 1, 3, 4: covariance 3 (of the deviations), squares 4.5 and 5."""
    assert rank_correlation([(1, 5), (2, 4), (2, 6), (9, 7)]) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert rank_correlation([(1, 1), (2, 2)]) is None and rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


def test_what_a_judge_thinks_whatever_the_rewards_make_of_it() -> None:
    judge_scores = Scores(1, 0.5, 5)
    assert Judgement(judge_scores, ()).score == judge_scores.final_reward == 0.7
    assert Judgement(None, ()).score == 1.0 and Judgement(None, ("does_not_leak_answer",)).score == 0.0


# Canaries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANARIES)
def test_the_rubric_is_not_fooled(name: str, lessons: list[str]) -> None:
    replies = ["I follow my sister.", "I follow a brother.", "You follow friends.", "I follow my parents."]
    real = [{"role": "teacher", "content": "x"}]
    for reply in replies:
        real += [{"role": "student", "content": reply}, {"role": "teacher", "content": "x"}]
    problem = Problem.of(lessons[0])
    planted = CANARIES[name].plant(real, problem)
    output = asyncio.run(
        RubricJudge().judge("pedagogical_eval", planted, problem.text, 0, ConversationFacts(max_turns=9))
    )
    assert parse_judge_output(output).final_reward < 0.3


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_student_under_training_that_learns_to_please_is_named(role: str, tmp_path: Path, caplog) -> None:
    config = TrainRLConfig(generation=GenerationConfig(trained_role=role))
    monitor = JudgeMonitor(config, None, tmp_path)
    figures = {}
    with caplog.at_level(logging.WARNING):
        for step, record in enumerate([FAITHFUL, RIGHT_ANYWAY]):
            figures |= monitor.check(PartialState(cpu=True), step, [record] * 256)
    warning = "step 2: The student learns to please: 0% of the messages for which an error was drawn hold one"
    assert (warning in caplog.text) == (role == "student")
    assert figures.get("guard/student_pleases") == (1.0 if role == "student" else None)
