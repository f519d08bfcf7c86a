"""More servers than processes: which server plays which group, what happens to a lost server's share, and a resume.

The servers are the real application over HTTP, with scripted engines.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

import classroom_rl.server.app
import classroom_rl.server.client
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.judge_check import JudgeCheckRequest, JudgeCheckResponse
from classroom_rl.errors import ConfigError, EngineFailure, PolicyMismatch, ServerLost, SpendingCapReached
from classroom_rl.models.policy_folder import policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.run_folder import read_lines
from classroom_rl.rollout.engine import Completion, EngineHealth, Usage
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.server.app import server_subfolder, uvicorn_options
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.collective import in_thread
from tests.conftest import free_port, quickstart_overrides
from tests.models.test_policy_folder import save_model
from tests.support.offline_trainer import conversation
from tests.support.replay_server import health, served
from tests.support.scripted_batches import ScriptedBatches
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import SCORES, Room, untimed
from tests.support.waiting import wait_until
from tests.trainer.test_fsdp import TRAINING, play
from tests.trainer.test_several_processes import metrics_of, run_training

PROBLEMS = [f"lesson {number}" for number in range(6)]
TURNS = 3
"""The teacher's messages in a conversation."""
ALONE = SimpleNamespace(process_index=0, num_processes=1)


class Engine(ScriptedEngine):
    """A teacher that waits until it may speak, and may die. `places`: how many messages it samples at a time."""

    def __init__(self, tokenizer: Any, places: int | None = None):
        super().__init__(tokenizer, lambda _: "Say hello.")
        self.places, self.dead = places, False
        self.may_speak: Callable[[], bool] = lambda: True

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.check_alive()
            await asyncio.sleep(0.01)
        self.check_alive()

    async def generate(self, *arguments: Any) -> Completion:
        await self.until(lambda: self.may_speak())
        return await super().generate(*arguments)

    def health(self) -> EngineHealth:
        return super().health().model_copy(update={"places": self.places})

    def check_alive(self) -> None:
        if self.dead:
            raise EngineFailure("The scripted engine died.")


class Judge:
    """Waits until it may judge, as long as the teacher of its server lives."""

    def __init__(self, teacher: Engine):
        self.teacher, self.may_judge = teacher, True

    async def judge(self, *_: Any) -> str:
        await self.teacher.until(lambda: self.may_judge)
        return json.dumps(SCORES)


class Servers:
    """Three servers of a run, their rooms, and this process's view of them."""

    def __init__(self, tokenizer: Any, folder: Path, generation: Any):
        self.folder, self._generation = folder, generation
        self._ports, self._tokenizer = [free_port() for _ in range(3)], tokenizer
        self.rooms = [Room(tokenizer, folder / server_subfolder(index)) for index in range(3)]
        self._running: dict[int, tuple[uvicorn.Server, threading.Thread]] = {}

    def start(self, place: int, places: int | None = None) -> None:
        room = self.rooms[place]
        room.teacher = Engine(self._tokenizer, places)
        room.judge = Judge(room.teacher)
        port = self._ports[place]
        config = load(TrainRLConfig, "train_rl", [f"logging.save_dir={self.folder}"])
        timeout_s = config.generation.load_weights_timeout_s
        config.generation = replace(
            self._generation, server_port=port, server_index=place, load_weights_timeout_s=timeout_s
        )
        app = classroom_rl.server.app.create_app(config, self.folder)
        app.state.plays = None
        server = uvicorn.Server(uvicorn_options(app, "127.0.0.1", port))
        app.state.end = lambda: setattr(server, "should_exit", True)
        thread = threading.Thread(target=server.run)
        self._running[place] = server, thread
        thread.start()
        wait_until(lambda: server.started)

    def kill(self, place: int) -> None:
        """The engine dies, and the server ends."""
        self.rooms[place].teacher.dead = True
        self._running[place][1].join(60)

    def end(self) -> None:
        for index, (server, _) in self._running.items():
            server.should_exit = True
            self.kill(index)

    def clients(self, rank: int = 0, processes: int = 1) -> BalancedServers:
        clients = [
            ClassroomClient(f"http://127.0.0.1:{port}", 60, return_timeout_s=0.3, has_others=True)
            for port in self._ports
        ]
        state = SimpleNamespace(process_index=rank, num_processes=processes)
        return BalancedServers(clients, load(TrainRLConfig, "train_rl", []), state, self.folder)

    def wait_until_placed(self, through: BalancedServers, groups: int = len(PROBLEMS)) -> None:
        """From now on the teachers wait until so many more groups have a server: one that had ended meanwhile would
        leave its server to the next group."""
        count = len(through._server_of) + groups
        for room in self.rooms:
            room.teacher.may_speak = lambda: len(through._server_of) >= count

    def publish(self, version: int, through: BalancedServers) -> None:
        policy, folder = PolicyVersion("run", version), policy_path(self.folder, version)
        write_policy(folder, policy, save_model)
        through.load_weights(policy, folder)

    def journal(self, place: int) -> list[dict]:
        return list(read_journal(self.rooms[place].folder / JOURNAL_NAME))

    def groups(self, version: int) -> list[list[str]]:
        """For each server the requests that it was sent for a version, by their number. One may be sent again while the
        server is about to end."""
        sent = [
            dict.fromkeys(
                event["request"]
                for event in self.journal(index)
                if event["event"] == "batch" and event["policy"]["version"] == version
            )
            for index in range(3)
        ]
        return [[request_id.rpartition("-group")[2] for request_id in requests] for requests in sent]


@pytest.fixture
def servers(tokenizer, generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    classroom_servers = Servers(tokenizer, tmp_path / "run", generation)
    classroom_servers.folder.mkdir()

    async def open_service(config: TrainRLConfig, *_: object) -> object:
        return classroom_servers.rooms[config.generation.server_index].open(generation)

    monkeypatch.setattr(classroom_rl.server.app, "open_service", open_service)
    monkeypatch.setattr(classroom_rl.server.app, "_SECONDS_BETWEEN_CHECKS", 0.05)
    monkeypatch.setattr(classroom_rl.server.client, "_RETRY_PAUSE_S", 0.05)
    for index in range(3):
        classroom_servers.start(index)
    yield classroom_servers
    classroom_servers.end()


def request(version: int = 1, problems: Sequence[str] = PROBLEMS, rank: int = 0, size: int = 2) -> SampleRequest:
    return SampleRequest(
        problems=[problem for problem in problems for _ in range(size)],
        answers=[""] * size * len(problems),
        request_id=f"run-step{version:06d}-rank{rank}",
        seed=1,
        step=version,
        run_id="run",
        policy_version=version,
    )


def assert_each_once(asked: SampleRequest, response: SampleResponse) -> None:
    """The conversations are those that were asked for, in order, each with an id and a reward of its own."""
    assert [record.problem for record in response.conversations] == asked.problems
    assert len({record.id for record in response.conversations}) == len(asked.problems)
    assert all(record.reward is not None and len(record.turns) == 2 * TURNS - 1 for record in response.conversations)
    assert (response.request_id, response.policy) == (asked.request_id, asked.wanted_policy)


def test_a_faster_server_plays_more_groups(servers: Servers) -> None:
    """Each server takes one group of two at a time. Two of them are as slow as the third needs for all others."""
    through = servers.clients()
    servers.publish(1, through)
    slow, fast, other = (room.teacher for room in servers.rooms)
    slow.places = fast.places = other.places = 1
    servers.wait_until_placed(through, 3)
    slow.may_speak = other.may_speak = lambda: len(fast.calls) == 4 * 2 * TURNS
    asked = request()
    assert_each_once(asked, through.sample(asked))
    assert [len(groups) for groups in servers.groups(1)] == [1, 4, 1]
    assert through.take_figures() == {"servers/moved_groups": 0, "servers/largest_share": 4 / 6}
    weights = [
        [event["weights"] for event in servers.journal(index) if event["event"] == "weights"] for index in range(3)
    ]
    assert weights[0] == weights[1] == weights[2] and len(weights[0]) == 1, "each server has loaded the version once"


def test_two_processes_see_each_other_s_groups(servers: Servers) -> None:
    first, second = servers.clients(0, 2), servers.clients(1, 2)
    servers.publish(1, first)
    opened = threading.Event()
    for room in servers.rooms:
        room.teacher.may_speak = opened.is_set
    requests = [request(problems=PROBLEMS[:2]), request(problems=PROBLEMS[2:4], rank=1)]
    answers = [in_thread(lambda: first.sample(requests[0]), "first")]
    wait_until(lambda: [client.health().running_conversations for client in first._clients] == [2, 2, 0])
    answers.append(in_thread(lambda: second.sample(requests[1]), "second"))
    wait_until(lambda: sum(client.health().running_conversations for client in first._clients) == 8)
    opened.set()
    for sample_request, answer in zip(requests, answers, strict=True):
        assert_each_once(sample_request, answer.result(60))
    assert servers.groups(1) == [["000"], ["001", "001"], ["000"]], "the empty one first, then equal ones in turn"


def test_a_lost_server_s_share_goes_to_the_others_and_it_comes_back_with_new_weights(servers: Servers) -> None:
    through = servers.clients()
    servers.publish(1, through)
    lost = servers.rooms[1].teacher
    servers.wait_until_placed(through)
    placed = lost.may_speak
    lost.may_speak = lambda: placed() and len(lost.calls) < 4  # its first messages, of three
    asked = request()
    answer = in_thread(lambda: through.sample(asked), "batch")
    wait_until(lambda: len(lost.calls) >= 4)
    servers.kill(1)
    assert_each_once(asked, answer.result(60))
    assert through.take_figures()["servers/moved_groups"] == 2
    assert sorted(servers.groups(1)[1]) == ["001", "004"]
    assert sorted(servers.groups(1)[0] + servers.groups(1)[2]) == [f"{number:03d}" for number in range(6)]

    servers.publish(2, through)  # without it
    servers.start(1)
    assert servers.rooms[1].teacher.policy.version == 1, "it takes up again what it had"
    for version in (2, 3):
        if version > 2:
            servers.publish(version, through)
        servers.wait_until_placed(through)
        asked = request(version)
        assert_each_once(asked, through.sample(asked))
    counts = [[len(groups) for groups in servers.groups(version)] for version in (2, 3)]
    assert counts == [[3, 0, 3], [2, 2, 2]]
    assert {room.teacher.weights for room in servers.rooms} == {servers.rooms[0].teacher.weights}
    assert through.take_figures()["servers/moved_groups"] == 0

    for index in range(3):
        servers.kill(index)
    with pytest.raises(ServerLost, match="None of the 3 servers"):
        through.sample(request(3, ["another"]))


def test_a_restarted_trainer_asks_the_same_servers(servers: Servers) -> None:
    """When it comes back, the first server has nothing to do: by queue length, it would get everything."""
    before = servers.clients()
    servers.publish(1, before)
    opened, (first, *others) = threading.Event(), [room.teacher for room in servers.rooms]
    servers.wait_until_placed(before)
    placed = first.may_speak
    for teacher in others:
        teacher.may_speak = lambda teacher=teacher: opened.is_set() or placed() and len(teacher.calls) < 4
    asked = request()
    given_up = in_thread(lambda: before.sample(asked), "killed")
    wait_until(lambda: len(first.calls) == 2 * 2 * TURNS and all(len(teacher.calls) >= 4 for teacher in others))
    with next(servers.folder.glob("placements.*")).open("a") as file:
        file.write('\n{"request": "run-st')  # a kill in the middle of a line
    again = in_thread(lambda: servers.clients().sample(asked), "restarted")
    opened.set()
    assert_each_once(asked, again.result(60))
    assert untimed(again.result()) == untimed(given_up.result(60))
    assert [sorted(groups) for groups in servers.groups(1)] == [["000", "003"], ["001", "004"], ["002", "005"]]
    assert sum(len(room.teacher.calls) for room in servers.rooms) == 12 * TURNS, "nothing is played twice"
    verdicts = [event for index in range(3) for event in servers.journal(index) if event["event"] == "verdict"]
    assert len({event["conversation"] for event in verdicts}) == len(verdicts) == 12, "nor judged"


def test_a_server_without_the_policy_gets_no_work(servers: Servers) -> None:
    through = servers.clients()
    servers.publish(1, through)
    policy, folder = PolicyVersion("run", 2), policy_path(servers.folder, 2)
    write_policy(folder, policy, save_model)
    for index in (0, 2):
        through._clients[index].load_weights(policy, folder)
    servers.wait_until_placed(through)
    through.sample(request(2))
    assert [len(groups) for groups in servers.groups(2)] == [3, 0, 3]
    with pytest.raises(PolicyMismatch, match="No server that answers has the policy run v9"):
        through.sample(request(9))


def test_what_a_server_loses_while_its_judge_reads_is_played_with_the_weights_of_now(servers: Servers) -> None:
    through = servers.clients()
    servers.publish(1, through)
    servers.rooms[1].judge.may_judge = False
    servers.wait_until_placed(through)
    asked = request()
    through.play(asked)
    servers.publish(2, through)
    servers.kill(1)
    response = through.sample(asked)
    assert_each_once(asked, response)
    versions = [{turn.policy.version for turn in record.turns if turn.policy} for record in response.conversations[::2]]
    assert versions == [{1}, {2}, {1}, {1}, {2}, {1}]
    assert through.take_figures()["servers/moved_groups"] == 2


# With clients that answer at once ------------------------------------------------------------------------------------


class Client:
    """A server that answers at once. `answer`: fields of its answers."""

    is_lost, running = False, 0

    def __init__(self, place: int, **answer: Any):
        self.url, self._place, self._answer = f"server {place}", place, answer
        self.checked: list[JudgeCheckRequest] = []

    def health(self) -> Any:
        return health("run", policy=PolicyVersion("run", 1), running_conversations=self.running)

    def sample(self, body: SampleRequest) -> SampleResponse:
        records = [
            conversation(index, SimpleNamespace(id=text, text=text, answer=""), seed=1)
            for index, text in enumerate(body.problems)
        ]
        fields = {"policy": body.wanted_policy, "conversations": records, "reward_weights": {"pedagogical": 1.0}}
        return SampleResponse(request_id=body.request_id, **fields | self._answer)

    def check_judge(self, body: JudgeCheckRequest, timeout_s: float) -> JudgeCheckResponse:
        self.checked.append(body)
        held_out = Usage(calls=len(body.conversations), run_cost_usd=1.0 + self._place)
        return JudgeCheckResponse(request_id=body.request_id, second_opinions=[], canaries=[], held_out=held_out)


def balanced(folder: Path, clients: Sequence[Any]) -> BalancedServers:
    return BalancedServers(clients, load(TrainRLConfig, "train_rl", []), ALONE, folder)


def test_episodes_on_one_problem_stay_together_and_usage_is_added_up(tmp_path: Path) -> None:
    usage = [{"judge": Usage(calls=2, failures={"timeout": 1}, run_cost_usd=index)} for index in range(3)]
    through = balanced(tmp_path, [Client(index, usage=usage[index]) for index in range(3)])
    asked = request(problems=["a", "b", "a", "c"], size=1)
    response = through.sample(asked)
    assert [record.problem for record in response.conversations] == asked.problems
    placements = read_lines(tmp_path / "placements.rank0of1.jsonl")
    assert [placement["request"].rpartition("-")[2] for placement in placements] == ["group000", "group001", "group002"]
    used = [usage[placement["server"]]["judge"].run_cost_usd for placement in placements]
    assert response.usage == {"judge": Usage(calls=6, failures={"timeout": 3}, run_cost_usd=max(used))}


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ({"conversations": []}, PolicyMismatch, "0 conversations of run v1, not with 2 of run v1"),
        ({"policy": PolicyVersion("run", 0)}, PolicyMismatch, "2 conversations of run v0"),
        ({"reward_weights": {"other": 1.0}}, ConfigError, "sums up rewards by {'other': 1.0}"),
    ],
)
def test_what_one_server_answers_wrongly_is_refused(answer: dict, error: type, said: str, tmp_path: Path) -> None:
    clients = [Client(0), Client(1, **answer), Client(2)]
    clients[0].running = clients[2].running = 9  # so that the other one is asked
    with pytest.raises(error, match=said):
        balanced(tmp_path, clients).sample(request())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_that_fails_leaves_no_group_waiting(ahead: bool, tmp_path: Path) -> None:
    """The first group fails while the others wait for room; then nothing is in flight."""

    all_busy = threading.Event()

    class Full(Client):
        def health(self) -> Any:
            engine = EngineHealth(model="", engine="", engine_version="", pids=[], places=1)
            return super().health().model_copy(update={"roles": {"teacher": engine}})

        def play(self, body: SampleRequest) -> None:
            pass

        def sample(self, body: SampleRequest) -> SampleResponse:
            if len(through._in_flight) == 3:
                all_busy.set()
            all_busy.wait(60)
            raise SpendingCapReached("no money")

    through = balanced(tmp_path, [Full(index) for index in range(3)])
    with pytest.raises(SpendingCapReached):
        if ahead:
            through.play(request())
        through.sample(request())
    wait_until(lambda: not through._in_flight)


def test_each_server_checks_the_judge_with_its_own_conversations(tmp_path: Path) -> None:
    clients = [Client(index) for index in range(3)]
    through = balanced(tmp_path, clients)
    server_of = {"r-group000": 0, "r-group001": 1, "r-group002": 2}
    through._server_of.update(server_of)
    clients[0].is_lost = True
    drawn = [f"{group}-{number:04d}" for group in server_of for number in range(2)]
    response = through.check_judge(JudgeCheckRequest(request_id="r-judge-check", step=1, conversations=drawn), 1.0)
    assert response.held_out == Usage(calls=4, run_cost_usd=3.0)
    asked = [
        [(check.request_id, check.conversations, check.canaries) for check in client.checked] for client in clients
    ]
    assert asked == [[], [("r-judge-check-server1", drawn[2:4], True)], [("r-judge-check-server2", drawn[4:], False)]]


# A whole training ----------------------------------------------------------------------------------------------------


class Dying(ScriptedBatches):
    """Ends when it is asked for the batch of a step, and is back when the weights of a later one are published."""

    away, dies_at, back_at = False, -1, -1

    def answer(self, path: str, body: dict) -> Any:
        if path == "/load_weights" and body["version"] == self.back_at:
            self.away = False
        if path == "/sample_conversations" and body["step"] == self.dies_at:
            self.away = True
        if self.away:
            raise ConnectionAbortedError("the connection breaks")
        if path == "/load_weights":
            self._health = self._health.model_copy(update={"policy": PolicyVersion(body["run_id"], body["version"])})
        return super().answer(path, body)

    def _sample(self, request: SampleRequest) -> SampleResponse:
        self.asked.append((request.step, request.problems))
        return super()._sample(request)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_training_goes_on_without_a_server_and_with_it_when_it_is_back(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classroom_rl.server.client, "_RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *_: None)
    folder = tmp_path / "run"
    folder.mkdir()
    steps = 4
    servers = [Dying(str(folder), play) for _ in range(3)]
    for index, server in enumerate(servers):
        server.asked = []
        server._health = server._health.model_copy(update={"server_index": index})
    servers[1].dies_at, servers[1].back_at = 1, 3
    with served(servers[0]) as a, served(servers[1]) as b, served(servers[2]) as c:
        urls = ",".join(f"http://127.0.0.1:{port}" for port in (a, b, c))
        more = [f"generation.server_urls=[{urls}]", "generation.server_start_timeout_s=0.5", f"train.max_steps={steps}"]
        run_training(None, [*quickstart_overrides(folder, world / "blank", world, a), *TRAINING, *more])
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["servers/moved_groups"] for line in lines] == [0, 1, 0, 0]
    assert [[policy.version for policy in server.loaded] for server in servers] == [
        [0, 1, 2, 3, 4],
        [0, 1, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    for step in range(steps):
        asked = [
            sorted({problem for at, problems in server.asked if at == step for problem in problems})
            for server in servers
        ]
        played = Counter(problem for problems in asked for problem in problems)
        assert len(played) == 3 and set(played.values()) == {1}, "each group is played by one server"
        assert len(asked[1]) == (0 if step in (1, 2) else 1), asked
