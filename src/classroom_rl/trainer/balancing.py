"""Plays one process's episodes on all servers of a run, where there are more servers than processes.

A request is divided into groups: all its episodes on one problem. Each group is a request of its own, to one server:

    queue length    a server's running conversations (`GET /health`), and what this process has sent it since then
    choice          the shortest queue, among servers that have the policy; equal ones in turn, from another for each
                    process. A server with twice as many conversations as its engine samples at a time (each is with one
                    engine at a time) gets no more: what waits here goes to the server that has room first
    on record       `placements.*.jsonl` in the run folder, before the group is sent: a restarted trainer asks the same
                    server, which has what was played in its journal
    lost server     one that has not answered for `generation.server_start_timeout_s`: its groups go to the others, and
                    are played there from their beginning. It gets work again once new weights have been published to it
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any

from accelerate import PartialState

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.config.values import PHASED
from classroom_rl.environments.classroom.judge_check import JudgeCheckRequest, JudgeCheckResponse
from classroom_rl.errors import DeadlineExceeded, EngineFailure, PolicyMismatch, ServerLost
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.run_folder import read_lines
from classroom_rl.rollout.engine import Usage
from classroom_rl.rollout.environment import POLICY_ROLE
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import request_of
from classroom_rl.server.agreement import refuse_other_weights
from classroom_rl.server.client import ClassroomClient
from classroom_rl.server.schemas import Health
from classroom_rl.system.storage import storage_errors
from classroom_rl.trainer.collective import in_thread

logger = logging.getLogger(__name__)

_CONVERSATIONS_PER_PLACE = 2
_SECONDS_BETWEEN_LOOKS = 1.0
_MOST_MOVES = 8


@dataclass(eq=False)
class _Group:
    """A part of a request, which one server plays.

    Attributes:
        request: asks for this part only.
        positions: the places of its episodes in the whole request.
        server: the place of its server in `generation.server_urls`; None: it was not sent yet.
        moves: how often another server was lost that was to play it, or had new weights by then.
        played, answer: as in `BatchInFlight`.
        ended: when the answer came, by the monotonic clock.
    """

    request: SampleRequest
    positions: list[int]
    server: int | None = None
    moves: int = 0
    played: "Future[None]" = field(default_factory=Future)
    answer: "Future[SampleResponse]" = field(default_factory=Future)
    ended: float = 0.0

    def fail(self, error: BaseException) -> None:
        for pending in (future for future in (self.played, self.answer) if not future.done()):
            pending.set_exception(error)


class BalancedServers:
    """Takes the place of a process's `ClassroomClient`.

    Args:
        clients: of all servers, in the order of `generation.server_urls`; each knows that it has others.
        config: the training's.
        state: this process among the training's.
        run_folder: where the placements are kept.
    """

    def __init__(
        self, clients: Sequence[ClassroomClient], config: TrainRLConfig, state: PartialState, run_folder: Path
    ):
        rank, processes = state.process_index, state.num_processes
        self._reward_weights = reward_weights(config)
        self._clients, self._timeout_s = clients, config.generation.sample_timeout_s
        self._fills_up = config.generation.schedule != PHASED  # what comes late would wait for the next phase
        self._first = rank * len(clients) // processes
        self._path = run_folder / f"placements.rank{rank}of{processes}.jsonl"
        self._server_of: dict[str, int] = {
            line["request"]: line["server"] for line in read_lines(self._path) if line["server"] < len(clients)
        }
        self._batches: dict[str, list[_Group]] = {}
        self._in_flight: list[_Group] = []
        self._changed = Condition()
        self._seen: dict[int, Health] = {}
        self._seen_at = float("-inf")
        self._played: Counter[int] = Counter()
        self._given: Counter[int] = Counter()
        self._asks_all = True
        self._moved = 0

    def health(self) -> Health:
        """The first server's health, with the engines of all of them.

        Raises:
            DeadlineExceeded: if one does not answer.
        """
        healths = [client.health() for client in self._clients]
        roles = {
            f"{role} of server {server}": engine
            for server, health in enumerate(healths)
            for role, engine in health.roles.items()
        }
        return healths[0].model_copy(update={"roles": roles})

    def take_figures(self) -> dict[str, float]:
        """Metrics of what ended since the last call: the groups that were moved from a lost server, and the largest
        share of this process's conversations that one server played."""
        with self._changed:
            played, self._played = self._played, Counter()
            moved, self._moved = self._moved, 0
        share = max(played.values()) / played.total() if played else 0.0
        return {"servers/moved_groups": float(moved), "servers/largest_share": share}

    # Playing ---------------------------------------------------------------------------------------------------------

    def play(self, body: SampleRequest) -> None:
        """As `ClassroomClient.play`, on all servers. A later `sample` of the request gets its answers."""
        groups = self._start(body, ahead=True)
        _results([group.played for group in groups])
        self._batches[body.request_id] = groups

    def sample(self, body: SampleRequest) -> SampleResponse:
        """As `ClassroomClient.sample`, on all servers.

        Raises:
            PolicyMismatch: if no server has the policy, or one answers with another.
            ServerLost: if all servers are lost.
            ClassroomError: the first error of a server. What is in play goes on there; it is in the journal.
        """
        groups = self._batches.pop(body.request_id, None) or self._start(body, ahead=False)
        return _together(body, groups, _results([group.answer for group in groups]))

    def _start(self, body: SampleRequest, ahead: bool) -> list[_Group]:
        positions_of: dict[tuple[str, str], list[int]] = {}
        for position, problem in enumerate(zip(body.problems, body.answers, strict=True)):
            positions_of.setdefault(problem, []).append(position)
        groups = [_part(body, number, positions) for number, positions in enumerate(positions_of.values())]
        with self._changed:
            self._given.clear()
            self._asks_all, self._seen_at = True, float("-inf")  # another process may have published to a lost server
        in_thread(partial(self._send, groups, ahead), "sending groups")
        return groups

    def _send(self, groups: Sequence[_Group], ahead: bool) -> None:
        for number, group in enumerate(groups):
            try:
                server = self._server_of.get(group.request.request_id)
                if server is None:
                    self._place(group)
                else:
                    with self._changed:
                        self._assign(group, server)
                for sent in groups[:number]:  # if one has failed, the batch has
                    if sent.answer.done() and (failure := sent.answer.exception()) is not None:
                        raise failure
            except BaseException as error:  # raised where the groups are waited for
                self._leave(group)
                for unsent in groups[number:]:
                    unsent.fail(error)
                return
            in_thread(partial(self._run, group, ahead), "playing a group")

    def _run(self, group: _Group, ahead: bool) -> None:
        try:
            while (answer := self._ask(group, ahead)) is None:
                self._place(group)
        except BaseException as error:  # raised where the group is waited for
            self._leave(group)
            group.fail(error)
            return
        self._leave(group)
        with self._changed:
            self._played[group.server] += len(answer.conversations)
        group.ended = time.monotonic()
        group.answer.set_result(answer)

    def _ask(self, group: _Group, ahead: bool) -> SampleResponse | None:
        """Have a group played by its server. Returns None if it is to be played by another one."""
        client, request = self._clients[group.server], group.request
        try:
            if ahead:
                client.play(request)
                if not group.played.done():
                    group.played.set_result(None)
                request = request.model_copy(update={"judge_again": False})  # `play` has done that
            answer = client.sample(request)
        except ServerLost as error:
            logger.warning("request %s goes to another server: %s", request.request_id, error)
        except PolicyMismatch:
            if group.moves >= _MOST_MOVES:  # the server has lost its weights, or has the next ones already
                raise
        else:
            if answer.policy != request.wanted_policy or len(answer.conversations) != len(request.problems):
                raise PolicyMismatch(
                    f"{client.url} answers {request.request_id} with {len(answer.conversations)} conversations of "
                    f"{answer.policy}, not with {len(request.problems)} of {request.wanted_policy}."
                )
            refuse_other_weights(answer.reward_weights, self._reward_weights)
            return answer
        self._leave(group)
        with self._changed:
            self._moved += group.moves == 0
            group.moves, self._seen_at = group.moves + 1, float("-inf")
        return None

    # Choosing a server -----------------------------------------------------------------------------------------------

    def _place(self, group: _Group) -> None:
        """Choose a group's server, as soon as one has room.

        Raises:
            ServerLost: if all servers are lost.
            PolicyMismatch: if all others answer, and none has the policy.
            DeadlineExceeded: if none has room in the time that a batch may take.
        """
        give_up_at = time.monotonic() + self._timeout_s
        with self._changed:
            while time.monotonic() < give_up_at:
                if time.monotonic() - self._seen_at > _SECONDS_BETWEEN_LOOKS:
                    self._look()
                if usable := self._with_policy(group):
                    best = min(usable, key=self._preference)
                    if self._has_room(best, len(group.positions)):
                        self._assign(group, best)
                        return
                self._changed.wait(_SECONDS_BETWEEN_LOOKS)
                self._seen_at = float("-inf")
        raise DeadlineExceeded(
            f"No server had room for the conversations of {group.request.request_id} within {self._timeout_s:g} s "
            "(generation.sample_timeout_s)."
        )

    def _look(self) -> None:
        """Ask all servers for their queues; lost ones only at the beginning of a batch."""
        servers = [server for server, client in enumerate(self._clients) if self._asks_all or not client.is_lost]
        self._asks_all, self._seen = False, {}
        for server, future in [(server, in_thread(self._clients[server].health, "health")) for server in servers]:
            with suppress(DeadlineExceeded, EngineFailure):
                self._seen[server] = future.result()
        if all(client.is_lost for client in self._clients):
            raise ServerLost(f"None of the {len(self._clients)} servers of generation.server_urls answers any more.")
        self._seen_at = time.monotonic()

    def _with_policy(self, group: _Group) -> list[int]:
        """The servers that can play a group: those with its policy. If it has been moved after newer weights were
        loaded, it is asked for with these."""
        policy = group.request.wanted_policy
        servers = [server for server, health in self._seen.items() if policy in (None, health.policy)]
        if servers or not self._seen:
            return servers
        versions = [health.policy.version for health in self._seen.values() if health.policy.run_id == policy.run_id]
        newest = max(versions, default=-1)
        if group.moves and newest > policy.version:
            group.request = group.request.model_copy(update={"policy_version": newest})
            return [
                server for server, health in self._seen.items() if health.policy == PolicyVersion(policy.run_id, newest)
            ]
        if all(client.is_lost or server in self._seen for server, client in enumerate(self._clients)):
            raise PolicyMismatch(f"No server that answers has the policy {policy}.")
        return []

    def _preference(self, server: int) -> tuple[int, int, int]:
        """The smallest is the best: a short queue; of equal ones the server that got the fewest groups of this batch,
        then those next to this process's first."""
        return self._queue_length(server), self._given[server], (server - self._first) % len(self._clients)

    def _queue_length(self, server: int) -> int:
        """A server's conversations: those that it says, and those that it was sent and does not know of yet."""
        health, sent, unknown = self._seen[server], 0, 0
        for group in (group for group in self._in_flight if group.server == server):
            sent += len(group.positions)
            unknown += len(group.positions) * (group.request.request_id not in health.running_requests)
        # A request is known for a moment before its conversations are counted.
        return max(sent, health.running_conversations + unknown)

    def _has_room(self, server: int, conversations: int) -> bool:
        engine, queue = self._seen[server].roles.get(POLICY_ROLE), self._queue_length(server)
        if engine is None or engine.places is None or queue == 0 or not self._fills_up:
            return True
        return queue + conversations <= _CONVERSATIONS_PER_PLACE * engine.places

    def _assign(self, group: _Group, server: int) -> None:
        """Put a group's server on record; `_changed` must be held."""
        request = group.request.request_id
        if self._server_of.get(request) != server:
            with storage_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                # A line break first: a kill may have left a part of a line.
                file.write("\n" + json.dumps({"request": request, "server": server}))
        group.server = self._server_of[request] = server
        self._given[server] += 1
        self._in_flight.append(group)

    def _leave(self, group: _Group) -> None:
        with self._changed:
            if group in self._in_flight:
                self._in_flight.remove(group)
            self._changed.notify_all()

    # Everything else -------------------------------------------------------------------------------------------------

    def load_weights(self, policy: PolicyVersion, folder: Path) -> None:
        """Have all servers load published weights. A lost server is asked once, and left out if it does not answer.

        Raises:
            ServerLost: if all are lost.
            ClassroomError: the error of another server, as `ClassroomClient.load_weights`.
        """
        calls = [in_thread(partial(client.load_weights, policy, folder), "loading weights") for client in self._clients]
        wait(calls)
        self._leave_out([call.exception() for call in calls], ServerLost)
        self._seen_at = float("-inf")

    def reachable(self, timeout_s: float) -> list[ClassroomClient]:
        """The servers that answer; those that are not lost get `timeout_s` seconds.

        Raises:
            DeadlineExceeded: if none does.
        """
        calls = [
            in_thread(partial(client.wait_until_up, 0.0 if client.is_lost else timeout_s), "health")
            for client in self._clients
        ]
        wait(calls)
        errors = [call.exception() for call in calls]
        self._leave_out(errors, DeadlineExceeded)
        return [client for client, error in zip(self._clients, errors, strict=True) if error is None]

    def _leave_out(self, errors: Sequence[BaseException | None], of_a_lost_one: type[Exception]) -> None:
        """Warn of servers that are lost. Raises if all are, and any other error."""
        for error in filter(None, errors):
            if all(errors) or not isinstance(error, of_a_lost_one):
                raise error
            logger.warning("a server gets no work until the next weights are published: %s", error)

    def check_judge(self, body: JudgeCheckRequest, timeout_s: float) -> JudgeCheckResponse:
        """As `ClassroomClient.check_judge`: each server checks the conversations that it played; one scores the
        canaries. Those of a lost server are left out.

        Raises:
            ServerLost: if all are.
        """
        conversations_of: dict[int, list[str]] = {}
        for conversation in body.conversations:
            conversations_of.setdefault(self._server_of[request_of(conversation)], []).append(conversation)
        calls = []
        for server, conversations in sorted(conversations_of.items()):
            if self._clients[server].is_lost:
                continue
            changes = {"request_id": f"{body.request_id}-server{server}", "conversations": conversations}
            part = body.model_copy(update={**changes, "canaries": body.canaries and not calls})
            calls.append(in_thread(partial(self._clients[server].check_judge, part, timeout_s), "checking the judge"))
        if not calls:
            raise ServerLost("All servers that played these conversations are lost.")
        answers = _results(calls)
        held_out = [answer.held_out for answer in answers if answer.held_out is not None]
        return JudgeCheckResponse(
            request_id=body.request_id,
            second_opinions=[opinion for answer in answers for opinion in answer.second_opinions],
            canaries=[canary for answer in answers for canary in answer.canaries],
            held_out=_sum(held_out) if held_out else None,
        )


def _part(body: SampleRequest, number: int, positions: list[int]) -> _Group:
    """The group of the episodes at these places of a request."""
    per_episode = {
        name: [values[position] for position in positions]
        for name in ("problems", "answers", "meta", "post_test_material")
        if (values := getattr(body, name)) is not None
    }
    return _Group(
        body.model_copy(update=per_episode | {"request_id": f"{body.request_id}-group{number:03d}"}), positions
    )


def _results(futures: Sequence["Future[Any]"]) -> list[Any]:
    """The results of all; raises the first error as soon as there is one."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for failure in filter(None, (future.exception() for future in done)):
        raise failure
    return [future.result() for future in futures]


def _together(body: SampleRequest, groups: Sequence[_Group], answers: Sequence[SampleResponse]) -> SampleResponse:
    """The answer to a request from those to its groups."""
    conversations = {
        position: conversation
        for group, answer in zip(groups, answers, strict=True)
        for position, conversation in zip(group.positions, answer.conversations, strict=True)
    }
    ended = max(group.ended for group in groups)
    last_message = max(group.ended - answer.seconds_after_policy for group, answer in zip(groups, answers, strict=True))
    changes: Mapping[str, Any] = {
        "request_id": body.request_id,
        "policy": body.wanted_policy or answers[0].policy,
        "conversations": [conversations[position] for position in range(len(body.problems))],
        "usage": {
            role: _sum([answer.usage[role] for answer in answers if role in answer.usage]) for role in _roles(answers)
        },
        "seconds_after_policy": ended - last_message,
    }
    return answers[0].model_copy(update=changes)


def _roles(answers: Sequence[SampleResponse]) -> list[str]:
    return list(dict.fromkeys(role for answer in answers for role in answer.usage))


def _sum(usages: Sequence[Usage]) -> Usage:
    """The usage of several requests. The run's spending is that of the server that spent most, as in the metrics."""
    names = [item.name for item in fields(Usage) if item.name not in ("failures", "run_cost_usd")]
    failures = sum((Counter(usage.failures) for usage in usages), Counter())
    return Usage(
        **{name: sum(getattr(usage, name) for usage in usages) for name in names},
        failures=dict(failures),
        run_cost_usd=max(usage.run_cost_usd for usage in usages),
    )
