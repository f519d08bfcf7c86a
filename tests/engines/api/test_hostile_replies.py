"""Arbitrary replies of providers over real HTTP: only the project's own errors are raised, no request stays in flight,
no reply takes more memory than its limit, and no prompt goes to another address.

The client's clock is turned (tests/support/turned_clock.py).
"""

import gzip
import itertools
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.engines.api.call_ledger import IN_FLIGHT, LOST, USABLE, CallLedger
from classroom_rl.engines.api.chat_api import ChatApi
from classroom_rl.engines.api.http_client import LARGEST_REPLY
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import JudgeOutputError, ProviderFailure, RequestRefused
from classroom_rl.evaluation.rejudge import rejudge
from classroom_rl.judges.verdicts import parse_verdict
from classroom_rl.results.rollout_files import read_records, write_rollouts
from classroom_rl.rollout.store.journal import read_journal
from classroom_rl.server.view_only import create_viewer
from tests.engines.api.test_responses import REPLIES
from tests.environments.classroom.test_roles import Server as RoleServer
from tests.judges.test_json_answer import answer
from tests.support.chat_client import PRICES, Client, in_turn, question
from tests.support.judge_endpoint import Behaviour, Exchange, JudgeEndpoint, completion, judge_endpoint, says
from tests.support.judged_room import Server as JudgeServer

USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "cost": 1e-5}


def sends(body: bytes | str, status: int = 200, **headers: str) -> Behaviour:
    """Exactly these bytes, with these headers (`_` for `-`)."""

    def act(exchange: Exchange) -> None:
        data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
        exchange.call.behaviour = "sends"
        exchange.head(status, len(data), {name.replace("_", "-"): value for name, value in headers.items()})
        exchange.write(data)

    return act


def is_verdict(text: str) -> bool:
    """As a judge's replies are looked at."""
    try:
        return parse_verdict("pedagogical_eval", 0, text).valid
    except JudgeOutputError:
        return False


def whole(text: str) -> str:
    return json.dumps(completion(text, "stop", USAGE))


# Anything at all ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endpoint() -> Iterator[JudgeEndpoint]:
    with judge_endpoint(in_turn(says("never asked"))) as running:
        yield running


NUMBERS = itertools.count()
HALVES = st.text(st.characters(categories=["Cs", "Ll"]), max_size=5)
VERDICTS = HALVES.map(lambda reason: whole(answer(task_final_reasoning=reason)))
"""Of which some hold half a character, escaped twice."""


@settings(max_examples=60)
@given(st.sampled_from([200] * 6 + [201, 204, 302, 400, 401, 404, 429, 500, 503]), REPLIES | VERDICTS)
def test_any_reply_is_settled_and_met_with_the_projects_own_errors(tmp_path_factory, endpoint, status, body):
    endpoint.script = in_turn(sends(body, status), says(answer()))
    folder = tmp_path_factory.mktemp("ledger")
    client = Client(endpoint, folder, **PRICES)

    async def ask(api: ChatApi) -> str:
        return (await api.ask(question(f"question {next(NUMBERS)}"), is_verdict)).text

    try:
        assert client.run(ask).encode() is not None
    except (ProviderFailure, RequestRefused) as error:
        assert str(error).encode()
    unsettled = client.ledger._run("SELECT COUNT(*) FROM calls WHERE outcome IN (?, ?)", IN_FLIGHT, LOST)
    assert unsettled.fetchone() == (0,)
    client.ledger.close()
    reopened = CallLedger(folder / "calls.sqlite")
    assert (reopened.spent_usd, reopened.reserved_usd) == pytest.approx(
        (client.ledger.spent_usd, client.ledger.reserved_usd)
    )
    reopened.close()


@pytest.mark.parametrize("count", [2**63, 1e300, float("nan"), -1, "many"])
def test_a_verdict_with_impossible_figures_counts_and_its_worst_case_stays_held(count, tmp_path):
    body = json.dumps(completion(answer(), "stop", USAGE | {"prompt_tokens": count}))
    with judge_endpoint(in_turn(sends(body))) as endpoint:
        client = Client(endpoint, tmp_path, **PRICES)
        assert client.ask() == answer() and len(endpoint.calls) == 1
    assert client.ledger.outcomes == {("first", USABLE): 1}
    assert client.ledger.spent_usd == 0 and client.ledger.reserved_usd > 0


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"\xff\xfe\x00{", {}),
        (b"no gzip", {"Content_Encoding": "gzip"}),
        (gzip.compress(b"x" * 10_000)[:-20], {"Content_Encoding": "gzip"}),
        ('{"error": {"code": %s}}' % ("9" * 5000), {}),
    ],
    ids=["no UTF-8", "no gzip", "half a gzip", "a code of 5,000 digits"],
)
def test_a_garbled_reply_is_asked_for_again_and_may_have_been_billed(body, headers, tmp_path):
    with judge_endpoint(in_turn(sends(body, **headers), says("yes"))) as endpoint:
        client = Client(endpoint, tmp_path, **PRICES)
        assert client.ask() == "yes" and len(endpoint.calls) == 2
    assert client.ledger.outcomes == {("first", "garbled"): 1, ("first", USABLE): 1}
    assert client.ledger.reserved_usd > 0


@pytest.mark.parametrize("charset", ["hex", "undefined", "utf-7", "idna", "no such"])
def test_a_reply_is_utf8_whatever_its_headers_say(charset, tmp_path):
    body = json.dumps(completion("né", "stop", USAGE), ensure_ascii=False)
    with judge_endpoint(in_turn(sends(body, Content_Type=f"application/json; charset={charset}"))) as endpoint:
        assert Client(endpoint, tmp_path).ask() == "né"


def test_half_a_character_is_replaced_when_it_comes(tmp_path):
    with judge_endpoint(in_turn(sends(whole("half: \ud800.")))) as endpoint:
        client = Client(endpoint, tmp_path)
        assert client.ask() == "half: \ufffd."
        assert client.ledger.find_reply(question().key("first"))[0] == "half: \ufffd."


def test_a_mistake_of_ours_leaves_no_request_in_flight(tmp_path):
    def is_usable(text: str) -> bool:
        raise KeyError(text)

    async def ask(api: ChatApi) -> None:
        with pytest.raises(KeyError):
            await api.ask(question(), is_usable)

    with judge_endpoint(in_turn(says("yes"))) as endpoint:
        client = Client(endpoint, tmp_path, **PRICES)
        client.run(ask)
    assert client.ledger.outcomes == {("first", LOST): 1} and client.ledger.reserved_usd > 0


# Too much -----------------------------------------------------------------------------------------------------------


def squeezed(megabytes: int) -> bytes:
    """A verdict behind so many megabytes of blanks, as a thousandth of them."""
    return gzip.compress(b" " * megabytes * 2**20 + whole("yes").encode(), compresslevel=6)


@pytest.mark.parametrize("status", [200, 500])
def test_of_a_reply_that_unpacks_to_too_much_no_more_is_read_than_a_reply_may_have(status, tmp_path):
    bomb = squeezed(256)
    assert len(bomb) < LARGEST_REPLY / 8
    with judge_endpoint(in_turn(sends(bomb, status, Content_Encoding="gzip"), says("yes"))) as endpoint:
        client = Client(endpoint, tmp_path, **PRICES)
        tracemalloc.start()
        try:
            assert client.ask() == "yes"
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert client.ledger.outcomes == {("first", "garbled"): 1, ("first", USABLE): 1}
    assert client.ledger.reserved_usd > 0 and most < 32 * 2**20


def test_a_large_reply_below_the_limit_counts_packed_or_not(tmp_path):
    text = "word " * 600_000
    packed = gzip.compress(whole(text).encode())
    with judge_endpoint(in_turn(sends(packed, Content_Encoding="gzip"))) as endpoint:
        assert Client(endpoint, tmp_path / "packed").ask() == text
    with judge_endpoint(in_turn(sends(whole(text)), says("yes"))) as endpoint:
        assert Client(endpoint, tmp_path / "plain").ask() == text
    with judge_endpoint(in_turn(sends(whole(text * 2)), says("yes"))) as endpoint:
        client = Client(endpoint, tmp_path / "too large")
        assert client.ask() == "yes"
        row = client.ledger._run("SELECT text FROM calls WHERE outcome = 'garbled'").fetchone()
    assert f"more than the {LARGEST_REPLY} bytes" in row[0]


# Elsewhere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_nothing_is_sent_elsewhere(status, tmp_path: Path):
    with judge_endpoint(in_turn(says("stolen"))) as other_endpoint:
        target = f"{other_endpoint.url}/chat/completions"
        with judge_endpoint(in_turn(sends("", status, Location=target), says("yes"))) as endpoint:
            client = Client(endpoint, tmp_path, **PRICES)
            with pytest.raises(ProviderFailure, match=f"{status}: it sends requests on to '{target}'.*as base_url"):
                client.ask()
    assert len(endpoint.calls) == 1 and not other_endpoint.calls
    assert client.ledger.outcomes == {("first", "redirect"): 1} and client.ledger.reserved_usd == 0


@pytest.mark.parametrize("target", ["http://[::1", "//\xe9\xff", "javascript:alert(1)", "/v1/elsewhere", "x" * 5000])
def test_a_redirect_to_anything_is_refused(target, tmp_path: Path):
    with (
        judge_endpoint(in_turn(sends("", 307, Location=target))) as endpoint,
        pytest.raises(ProviderFailure, match="307: it sends requests on to"),
    ):
        Client(endpoint, tmp_path).ask()
    assert len(endpoint.calls) == 1


@pytest.mark.parametrize("status", [200, 502])
def test_what_follows_a_reply_on_its_connection_answers_no_other_request(status, tmp_path: Path):
    """As from a proxy that gives up on a request, and then passes on its late reply."""
    late = whole("the answer to another question").encode()

    def answers_twice(exchange: Exchange) -> None:
        exchange.call.behaviour = "twice"
        exchange.head(status, 2, {})
        exchange.write(b"{}HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(late) + late)

    with judge_endpoint(in_turn(answers_twice, says("yes"))) as endpoint:
        assert Client(endpoint, tmp_path).ask() == "yes" and len(endpoint.calls) == 2


# The whole way ------------------------------------------------------------------------------------------------------

HALF = "half a character: \ud800"
KEPT = "half a character: \ufffd"


@pytest.fixture
def judged(generation: GenerationConfig, tmp_path: Path) -> GenerationConfig:
    (tmp_path / "judge.txt").write_text("{{ problem }} {{ conversation }}")
    template = {"pedagogical_eval": str(tmp_path / "judge.txt")}
    return replace(generation, judges_rules_prompts_paths=template, max_turns=3, number_judge_attempts=2)


def halves(body: dict, nth: int) -> Behaviour:
    """The judge has half a character in its reasoning, escaped once or twice; student and teacher in what they say."""
    if body["model"] != "judge":
        return sends(whole(HALF))
    escaped = answer(task_final_reasoning=HALF)
    return sends(whole(escaped if nth % 2 else escaped.encode().decode("unicode_escape")))


def test_half_a_character_of_a_judge_ends_no_run_now_or_later(room, judged):
    with judge_endpoint(halves) as endpoint:
        first = JudgeServer(room, judged, endpoint.url).sample(["lesson one", "lesson two"])
        calls = len(endpoint.calls)
        (room.folder / "journal.jsonl").unlink()  # as of a run that could not write it: the kept replies are left
        server = JudgeServer(room, judged, endpoint.url)
        second = server.sample(["lesson one", "lesson two"])
        assert len(endpoint.calls) == calls
    config = TrainRLConfig(judge_model=server.config, generation=replace(judged, max_tokens_per_judge_attempt=200))
    rejudged = [verdict for record in rejudge(room.folder, config) for verdict in record.verdicts]
    for verdicts in ([v for record in response.conversations for v in record.verdicts] for response in (first, second)):
        assert [v.reasons for v in verdicts] == [v.reasons for v in rejudged] and all(v.valid for v in verdicts)
    assert {verdict.reasons["task_final_score"] for verdict in rejudged} == {KEPT}
    assert_all_can_be_read(room.folder, second.conversations)


def test_half_a_character_of_a_student_or_a_teacher_is_replaced_everywhere(room, generation):
    with judge_endpoint(halves) as endpoint:
        first = RoleServer(room, generation, endpoint.url, "student", "teacher").sample()
        calls = len(endpoint.calls)
        (room.folder / "journal.jsonl").unlink()
        second = RoleServer(room, generation, endpoint.url, "student", "teacher").sample()
        assert len(endpoint.calls) == calls
    for record in (*first.conversations, *second.conversations):
        assert {turn.text for turn in record.turns} == {KEPT} and record.failure is None
    assert_all_can_be_read(room.folder, second.conversations)


def assert_all_can_be_read(folder: Path, records: Sequence[ConversationRecord]) -> None:
    """Journal, Parquet file and page hold the same, and it is UTF-8."""
    ended = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "conversation"]
    assert len(ended) == len(records) and KEPT in str(ended)
    http = TestClient(create_viewer(folder, None), base_url="http://127.0.0.1:8005")
    playing = http.get("/api/conversation", params={"where": "now", "id": records[0].id})
    read = read_records(write_rollouts(folder, 1, 0, records))
    assert [(record.turns, record.verdicts) for record in read] == [
        (record.turns, record.verdicts) for record in records
    ]
    written = http.get("/api/conversation", params={"where": "step-1", "id": records[0].id})
    assert KEPT in str(playing.json()) and KEPT in str(written.json())
