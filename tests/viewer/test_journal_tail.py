"""Conversations that are still played, read from the journal: in one file, in segments, of several servers."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import classroom_rl.viewer.journal_tail
from classroom_rl.config.load import ROOT
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.datasets import Problem
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal
from classroom_rl.rollout.store.journal_segments import segments_of
from classroom_rl.viewer.journal_tail import JournalTail
from tests.support.viewer_run import LESSONS, conversation, listed, one, write_journal

OLD_RUN = ROOT / "tests/support/old_run" / JOURNAL_NAME


def shown(tail: JournalTail) -> list[tuple[Any, ...]]:
    """What a page has of a journal: rows, and all that is known of each conversation."""
    conversations = tail.conversations(0.0, ())
    return [(tail.row(entry), tail.record(entry)) for entry in conversations] + [tail.policy]


@pytest.mark.parametrize("longest_tail", [10**9, 20_000])
def test_a_page_that_follows_a_journal_in_segments_shows_what_is_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest_tail: int
) -> None:
    monkeypatch.setattr(classroom_rl.viewer.journal_tail, "_LONGEST_TAIL", longest_tail)
    journal = Journal(tmp_path, segment_bytes=4000, block_bytes=1000)
    one_file = tmp_path / "one" / JOURNAL_NAME
    one_file.parent.mkdir()
    following, one_file_tail = JournalTail(journal.path), JournalTail(one_file)
    for number, line in enumerate(OLD_RUN.read_bytes().splitlines(keepends=True)):
        event = json.loads(line)
        journal.append(event.pop("event"), **event)
        with one_file.open("ab") as file:
            file.write(line)
        if number % 7 == 0:
            assert shown(following) == shown(one_file_tail)
            assert shown(JournalTail(journal.path)) == shown(JournalTail(one_file)), "a page that is opened now"
    journal.close()
    assert len(segments_of(journal.path)) > 8 and len(shown(following)) > 8
    assert shown(following) == shown(one_file_tail)


def events_of(record, finished: bool) -> list[dict]:
    """What the journal holds of a conversation."""
    plain = record.model_dump(mode="json")
    events, ids, subject = [], record.completion_ids, {"conversation": record.id}
    for turn in plain["turns"]:
        added = ids[turn["span"][0] : turn["span"][1]] if turn["span"] else ids[3:5]
        logprobs = [-0.5] * 3 if turn["span"] else []
        prompt = {"prompt_ids": record.prompt_ids} if not events else {}
        events.append(
            {"event": "turn", "time": 4e9} | subject | {"turn": turn, "ids": added, "logprobs": logprobs} | prompt
        )
    if not finished:
        return events[:3]
    left_out = ("prompt_ids", "completion_ids", "mask", "logprobs")
    fields = {name: value for name, value in plain.items() if name not in left_out}
    verdict = {"event": "verdict", "time": 4e9} | subject | {"verdict": plain["verdicts"][0]}
    return [*events, verdict, {"event": "conversation", "time": 4e9} | subject | {"record": fields}]


def test_what_is_not_in_a_file_yet_is_read_from_the_journal(http: TestClient, run: Path) -> None:
    request = "run-step000003-rank0of1-abcd"
    finished, playing = conversation(3, 0, LESSONS[0]), conversation(3, 1, LESSONS[0])
    batch = {"event": "batch", "time": 4e9, "request": request, "step": 3}
    batch |= {"problems": [[LESSONS[1], ""], [LESSONS[0], "42"]], "problem_of": [0, 1]}
    weights = {"event": "weights", "time": 4e9, "policy": "run v3"}
    path = write_journal(run, [weights, batch, *events_of(finished, True), *events_of(playing, False)])
    with path.open("ab") as file:
        file.write(
            b'{"event": "judge_check", "time": 4e9, "request": "%s-judge-check", "step": 3}\n' % request.encode()
        )
        file.write(b'{"event": "turn", "time": 4000000000.0, "conversation": "cut o')
    pulse = http.get("/api/pulse").json()
    assert (pulse["playing"], pulse["played"], pulse["policy"]) == (1, 1, "run v3")
    page = listed(http, where="now")
    assert page["columns"]["state"] == ["END", "PLAYING"] and page["columns"]["step"] == [3, 3]
    assert page["columns"]["personas"][1] == {"correct_student": 1}
    assert page["columns"]["messages"] == [5, 3] and page["columns"]["reward"] == [0.4, None]
    assert page["columns"]["title"] == ["Lesson: at the market · Plan: you, brother"] * 2
    complete, partial = one(http, 0, "now"), one(http, 1, "now")
    assert (partial["problem"], partial["answer"]) == (LESSONS[0], "42")
    assert page["columns"]["problem_id"][1] == partial["problem_id"] == Problem.of(LESSONS[0], "42").id
    assert complete["problem"] == LESSONS[0] and complete["trained_tokens"] == 9 and len(complete["turns"]) == 5
    assert [turn["parts"][0][1] for turn in partial["turns"][:2]] == ["Hello.", "Answer 1 as correct_student."]
    write_rollouts(run, 3, 0, [finished, playing])
    assert listed(http, where="now")["total"] == 0 and listed(http, where="step-3")["total"] == 2


def test_a_batch_that_begins_anew_leaves_its_old_conversations_behind(http: TestClient, run: Path) -> None:
    record = conversation(3, 0, LESSONS[0])
    first_turn = events_of(record, False)[:1]
    batch = {"event": "batch", "time": 4e9, "request": record.request_id, "step": 3, "body": "b"}
    events = [batch | {"weights": "w"}, *first_turn]
    write_journal(run, [batch | {"weights": "w"}, *first_turn])
    assert len(one(http, 0, "now")["turns"]) == 1
    with (run / "journal.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in [batch | {"weights": "new"}, *events[1:]]))
    assert len(one(http, 0, "now")["turns"]) == 1
    with (run / "journal.jsonl").open("a") as file:
        continued = [batch | {"weights": "new"}, events_of(record, False)[1]]
        file.write("".join(json.dumps(event) + "\n" for event in continued))
    assert len(one(http, 0, "now")["turns"]) == 2, "the same work, gone on with"


def test_the_journals_of_further_servers_belong_to_the_run(http: TestClient, run: Path) -> None:
    (run / "server1").mkdir()
    write_journal(run, events_of(conversation(3, 0, LESSONS[0]), True))
    write_journal(run / "server1", events_of(conversation(3, 1, LESSONS[1]), False))
    pulse = http.get("/api/pulse").json()
    assert (pulse["playing"], pulse["played"]) == (1, 1)
    assert len(one(http, 1, "now")["turns"]) == 3
    with (run / "server1" / "journal.jsonl").open("a") as file:
        file.write(json.dumps(events_of(conversation(3, 1, LESSONS[1]), True)[-1]) + "\n")
    after = http.get("/api/pulse").json()
    assert (after["playing"], after["played"]) == (0, 2) and after["journal"] != pulse["journal"]


def test_a_conversation_that_was_moved_from_a_lost_server_is_shown_once(http: TestClient, run: Path) -> None:
    events = events_of(conversation(3, 0, LESSONS[0]), True)
    (run / "server1").mkdir()
    write_journal(run, events[:1])
    write_journal(run / "server1", [event | {"time": 4e9 + 1} for event in events])
    assert listed(http, where="now")["columns"]["state"] == ["END"] and len(one(http, 0, "now")["turns"]) == 5


def test_a_finished_run_plays_nothing(http: TestClient, run: Path) -> None:
    old = [event | {"time": 1.0} for event in events_of(conversation(0, 0, LESSONS[0]), True)]
    write_journal(run, old)
    assert http.get("/api/pulse").json()["played"] == 0 and listed(http, where="now")["total"] == 0
