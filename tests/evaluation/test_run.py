"""Tests of metrics against hand-computed numbers, and of evaluations from the configuration to the run folder."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Optional

import pandas as pd
import pytest

from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.toy_language.grammar import answer, find_slips, inject
from classroom_rl.environments.toy_language.lessons import make_lessons, parse_problem, render_problem
from classroom_rl.environments.toy_language.scripts import hint, ideal
from classroom_rl.errors import ConfigError, DataError, DeadlineExceeded, PolicyMismatch
from classroom_rl.evaluation.report.tables import measurement_table
from classroom_rl.evaluation.run import evaluate
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.evaluation_files import read_records, write_records
from classroom_rl.results.statistics import (
    Exchange,
    mean_scores,
    paired_change,
    react,
    read_exchanges,
    rewards_by_lesson,
    summarise,
    talk,
)
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.tokens import Turn
from tests.support.scripted_teachers import ignores_errors
from tests.support.synthetic_run import FAILED, played, record_of, scored

LESSONS = make_lessons(1)[1]
TEXT = render_problem(LESSONS[0])


def teacher(text: str) -> Turn:
    return Turn("teacher", text)


def student(text: str, persona: str) -> Turn:
    return Turn("student", text, persona)


# Means and intervals ---------------------------------------------------------------------------------------------


def test_the_interval_is_over_whole_lessons():
    # Six lessons of 0s and 1s are six draws. Single conversations, 300 of them, would give about [0.44, 0.56].
    estimate = mean_with_ci({str(place): [float(place % 2)] * 50 for place in range(6)})
    assert estimate["mean"] == 0.5 and estimate["n"] == 300
    assert estimate["ci95"] == pytest.approx([0.13, 0.87], abs=0.03)


def test_lessons_weigh_by_their_conversations():
    assert mean_with_ci({"a": [0.0], "b": [1.0, 1.0, 1.0]})["mean"] == 0.75


def test_nothing_and_a_single_lesson_have_no_interval():
    assert mean_with_ci({}) == {"mean": None, "ci95": None, "n": 0}
    assert mean_with_ci({"a": []}) == {"mean": None, "ci95": None, "n": 0}
    assert mean_with_ci({"a": [0.2, 0.4]}) == {"mean": pytest.approx(0.3), "ci95": None, "n": 2}


def test_the_same_values_always_give_the_same_interval():
    values = {str(i): [i / 7 % 1, i / 3 % 1] for i in range(40)}
    assert mean_with_ci(values) == mean_with_ci(values)


def test_paired_change_compares_lesson_by_lesson():
    # a: mean 0.5 → 1 is +0.5; b: 0.5 → 0.5 is 0; c and d have values on one side only.
    change = paired_change({"a": [0.0, 1.0], "b": [0.5], "d": []}, {"a": [1.0], "b": [0.5], "c": [1.0], "d": [1.0]})
    assert change == {"mean": 0.25, "ci95": None, "n": 2, "p": 1.0}, "of both signs of a, half are as far from 0"


# What is read from conversations ---------------------------------------------------------------------------------


def test_conversations_without_a_verdict_are_left_out_and_counted():
    records = [
        record_of("one", [], [scored(1, 1, 10)], 0, reward=0.8),
        record_of("one", [], [FAILED], 1, reward=None),
        record_of("two", [], [scored(0, 0, 0)], 2, reward=0.0, rejected=True),
        record_of("two", [], [scored(1, 0, 0)], 3, reward=0.4),
    ]
    found = summarise(records, read_exchanges)
    assert [sorted(values) for values in rewards_by_lesson(records).values()] == [[0.8], [0.0, 0.4]]
    assert found["reward"]["mean"] == pytest.approx(0.4) and found["reward"]["n"] == 3
    assert found["without_verdict"] == {"share": 0.25, "n": 4}
    assert found["rejected"] == {"share": pytest.approx(1 / 3), "n": 3}
    assert found["lessons"] == 2 and found["conversations"] == 4
    assert "error_turns" not in found, "no rule can find errors in problems that are no quickstart lessons"


def test_scores_are_averaged_over_valid_attempts_first():
    records = [
        record_of("one", [], [scored(1, 0, 10), scored(0, 0, 0, attempt=1)], reward=0.3),
        record_of("two", [], [scored(1, 1, 10), replace(FAILED, attempt=1)], reward=1.0),
        record_of("three", [], [FAILED]),
    ]
    assert mean_scores(records) == {
        "task_final_score": 0.75,
        "forward_progression_score": 0.5,
        "overall_momentum_score": 7.5,
    }
    assert mean_scores(records[2:]) is None


def test_talk_counts_words_that_are_heard():
    turns = [teacher("<think>long plan here</think>Hi! Say it."), student("Two words", "p"), teacher("Good.")]
    assert talk([record_of("one", turns), record_of("two", turns[:1])]) == {
        "messages": 2.0,
        "teacher_words": pytest.approx(7 / 3),
        "student_words": 2.0,
        "teacher_share": pytest.approx(7 / 9),
    }
    assert talk([record_of("one", [])])["teacher_share"] is None


def said(question: int, kind: Optional[str] = None) -> str:
    """An answer to a question of the first lesson; with `kind`, one with that slip in it."""
    rng = random.Random(question)
    sentence = answer(LESSONS[0].questions[question], rng, kind)
    return (inject(sentence, kind, rng) if kind else sentence).text


def test_an_error_turn_is_one_whose_text_holds_an_error_whoever_was_asked_for_it():
    questions = [question.text for question in LESSONS[0].questions]
    slip = find_slips(said(0, "tense"))[0]
    turns = [
        teacher(f"Hi! {questions[0]}"),
        student(said(0, "tense"), "correct_student"),  # asked to be right, and wrong
        teacher(hint(slip)),  # scaffolded
        student(said(0), "error_student"),  # asked to err, and right
        teacher(hint(slip)),  # a false correction
        student(said(0, "preposition"), "error_student"),  # asked to err, and wrong
        teacher(f"Good! {questions[1]}"),  # ignored
        student(said(1), "correct_student"),
    ]  # the last message has no reply
    exchanges = read_exchanges(record_of(TEXT, turns))
    assert [(each.student_turn, each.teacher_turn) for each in exchanges] == [(1, 2), (3, 4), (5, 6)]
    assert [[slip.kind for slip in each.errors] for each in exchanges] == [["tense"], [], ["preposition"]]
    assert [(each.scaffolded, each.corrected) for each in exchanges] == [(True, False), (False, True), (False, False)]
    assert react(exchanges) == {
        "error_turns": {"scaffolded": 0.5, "n": 2},
        "clean_turns": {"falsely_corrected": 1.0, "n": 1},
        "personas": {"correct_student": {"with_error": 1.0, "n": 1}, "error_student": {"with_error": 0.5, "n": 2}},
    }


def test_thoughts_hold_no_errors():
    thought = f"<think>{said(0, 'tense')}</think>{said(0)}"
    turns = [teacher(LESSONS[0].questions[0].text), student(thought, "correct_student"), teacher("Good!")]
    assert [each.errors for each in read_exchanges(record_of(TEXT, turns))] == [()]


def test_sides_that_do_not_occur_have_no_share():
    clean = Exchange(1, 2, "correct_student", (), False, False, "")
    assert react([clean])["error_turns"] == {"scaffolded": None, "n": 0}
    assert react([clean])["clean_turns"] == {"falsely_corrected": 0.0, "n": 1}
    assert read_exchanges(record_of("Solve x + 1 = 2.", [teacher("Hi!")])) is None


def test_scripted_tutors_are_told_apart():
    personas = ["error_student", "correct_student", "correct_student", "error_student"]
    good, bad = (
        summarise([played(tutor, lesson, personas, 0) for lesson in LESSONS[:2]], read_exchanges)
        for tutor in (ideal, ignores_errors)
    )
    assert good["error_turns"]["scaffolded"] == 1.0 and bad["error_turns"]["scaffolded"] == 0.0
    assert good["clean_turns"]["falsely_corrected"] == bad["clean_turns"]["falsely_corrected"] == 0.0
    assert good["error_turns"]["n"] == 4 and good["clean_turns"]["n"] == 4
    assert good["reward"]["mean"] > 0.95 > 0.6 > bad["reward"]["mean"]


# Records on disk -------------------------------------------------------------------------------------------------


def test_records_come_back_as_they_were(tmp_path: Path):
    records = [played(ideal, LESSONS[0], ["error_student"], 0), record_of("two", [teacher("مرحبا 🎉")], [FAILED], 1)]
    path = tmp_path / "conversations.parquet"
    write_records(path, [("sampled", records[0]), ("greedy", records[1]), ("sampled", records[1])])
    assert read_records(path) == {"sampled": records, "greedy": records[1:]}
    assert list(pd.read_parquet(path)["sampling"]) == ["sampled", "greedy", "sampled"]
    assert [file.name for file in tmp_path.iterdir()] == ["conversations.parquet"]


def test_files_that_eval_did_not_write_are_refused(tmp_path: Path):
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "x.parquet")
    for name in ("x.parquet", "none.parquet"):
        with pytest.raises(DataError, match="eval.py"):
            read_records(tmp_path / name)


# The configuration -----------------------------------------------------------------------------------------------


SUPERVISED = ("samplings=[sampled,supervised]", "supervisor_model.model_name_or_path=rubric", "server_url=null")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["samplings=[warm]"], "samplings"),
        (["samplings=[]"], "samplings"),
        (["samplings=[greedy,greedy]"], "samplings"),
        (["samplings=[supervised]", "server_url=null"], "supervisor_model.model_name_or_path, to rules, rubric or a"),
        (["supervisor_model.model_name_or_path=rules", "server_url=null"], "measured without a supervisor"),
        (["samplings=[supervised]", "supervisor_model.model_name_or_path=rules"], "the server's own supervisor"),
        ([*SUPERVISED, "generation.supervisor.penalties.leak=2"], "a penalty is at most 0: write -2"),
        ([*SUPERVISED, "supervisor_model.model_name_or_path=gpt", "supervisor_model.use_openrouter=true"], "a prompt"),
        (["num_samples_per_problem=0"], "num_samples_per_problem"),
        (["dataset.eval_datasets=[]", "~generation.judges_rules_prompts_paths"], "eval_datasets"),
        (["server_url=127.0.0.1:8005"], "server_url"),
        (["server_url=null", "generation.student_personas_prompts_paths=null"], "student_personas_prompts_paths"),
        (["server_url=null", "teacher_model.vllm.top_p=0"], "top_p"),
        (["teacher_model.vllm.temprature=1"], "temperature"),
    ],
)
def test_configs_that_cannot_be_measured_are_refused(overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        load(EvalConfig, "eval", overrides, check_eval)


@pytest.mark.parametrize("overrides", [SUPERVISED, ("samplings=[greedy,supervised]",)])
def test_a_supervisor_is_the_configurations_or_the_servers(overrides: Sequence[str]):
    config = load(EvalConfig, "eval", list(overrides), check_eval)
    assert (config.supervisor_model is None) == (config.server_url is not None)


def test_without_a_word_evaluations_run_without_a_supervisor():
    config = EvalConfig()
    assert config.supervisor_model is None and config.samplings == ["sampled", "greedy"]


def test_the_quickstarts_evaluation_has_the_classroom_of_its_training():
    measured, trained = load(EvalConfig, "eval", [], check_eval), load(TrainRLConfig, "train_rl", [])
    assert measured.generation == trained.generation
    for role in ("teacher_model", "student_model", "judge_model"):
        assert getattr(measured, role).vllm == getattr(trained, role).vllm, role
    assert measured.judge_model == trained.judge_model
    assert measured.server_url == f"http://{trained.generation.server_host}:{trained.generation.server_port}"


# From a config to a run folder, over HTTP ------------------------------------------------------------------------


class _ScriptedServer(ThreadingHTTPServer):
    """The server's two routes that an evaluation needs, answered by the scripted ideal tutor."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ScriptedRoutes)
        self.requests: list[SampleRequest] = []
        self.version_after: int = 10**9
        """The number of the request from which another policy answers."""
        self.review: Callable[[ConversationRecord], ConversationRecord] = lambda record: record
        """What the server's supervisor makes of a conversation."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _ScriptedRoutes(BaseHTTPRequestHandler):
    server: _ScriptedServer

    def do_GET(self) -> None:
        role = {"model": "tutor", "engine": "vllm", "engine_version": "0.32.0", "pids": [1]}
        status = {"status": "ok", "run_folder": "runs/x", "running_requests": [], "running_conversations": 0}
        policy = {"run_id": "abc", "version": 3}
        self._answer({**status, "finished_conversations": 0, "roles": {"teacher": role}, "policy": policy})

    def do_POST(self) -> None:
        body = SampleRequest.model_validate_json(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        version = 3 if len(self.server.requests) < self.server.version_after else 4
        records = [
            played(ideal, parse_problem(text), ["error_student", "correct_student"], number).model_copy(
                update={"id": f"{body.request_id}-{number}", "request_id": body.request_id}
            )
            for number, text in enumerate(body.problems)
        ]
        records = [self.server.review(record) if body.supervised else record for record in records]
        response = SampleResponse(
            request_id=body.request_id,
            policy=PolicyVersion("abc", version),
            conversations=records,
            reward_weights={"pedagogical": 1.0},
        )
        self._answer(response.model_dump(mode="json"))

    def _answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[_ScriptedServer]:
    with _ScriptedServer() as scripted:
        threading.Thread(target=scripted.serve_forever, daemon=True).start()
        yield scripted
        scripted.shutdown()


@pytest.fixture
def config(server: _ScriptedServer, tmp_path: Path) -> EvalConfig:
    lessons = tmp_path / "lessons.jsonl"
    rows = [{"problem": render_problem(lesson), "answer": ""} for lesson in LESSONS[:20]]
    lessons.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    overrides = [f"server_url={server.url}", f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]"]
    return load(EvalConfig, "eval", [*overrides, f"logging.save_dir={tmp_path / 'eval'}"], check_eval)


def test_an_evaluation_leaves_its_numbers_and_its_conversations(config: EvalConfig, server: _ScriptedServer, capsys):
    metrics = evaluate(config)
    folder = Path(config.logging.save_dir)
    assert metrics == json.loads((folder / "metrics.json").read_text())
    assert metrics["tutor"] == "tutor" and metrics["policy"] == {"run_id": "abc", "version": 3}
    assert metrics["engine"] == {"name": "vllm", "version": "0.32.0"} and metrics["problems"] == 20
    records = read_records(folder / "conversations.parquet")
    assert {name: len(found) for name, found in records.items()} == {"sampled": 40, "greedy": 40}
    assert [record.problem_id for record in records["sampled"]] == [record.problem_id for record in records["greedy"]]
    assert metrics["sampled"]["reward"]["n"] == 40 and metrics["sampled"]["reward"]["mean"] > 0.9
    assert metrics["greedy"]["error_turns"]["scaffolded"] == 1.0
    assert (folder / "config" / "eval.yaml").is_file()
    printed = capsys.readouterr().out
    assert measurement_table(metrics) in printed and "Reward" in printed and "n=40" in printed


def test_every_tutor_gets_the_same_conversations_but_no_evaluation_gets_anothers_answers(
    config: EvalConfig, server: _ScriptedServer
):
    evaluate(config)
    first = sorted(server.requests, key=lambda request: request.request_id.split("-v3-")[1])
    server.requests.clear()
    evaluate(config)
    second = sorted(server.requests, key=lambda request: request.request_id.split("-v3-")[1])
    assert not {request.request_id for request in first} & {request.request_id for request in second}
    nameless = [[request.model_dump(exclude={"request_id"}) for request in requests] for requests in (first, second)]
    assert nameless[0] == nameless[1]
    assert all(request.fixed_seeds and request.run_id is None and request.seed == config.seed for request in first)
    assert sum(len(request.problems) for request in first if request.greedy) == 40
    for request in first:  # a group is in one request, because places in the request seed its conversations
        assert all(request.problems.count(problem) == 2 for problem in request.problems)


def test_a_tutor_that_changes_while_it_is_measured_is_an_error(config: EvalConfig, server: _ScriptedServer):
    server.version_after = 3
    with pytest.raises(PolicyMismatch, match="changed while it was measured"):
        evaluate(config)
    assert not (Path(config.logging.save_dir) / "metrics.json").exists()


def test_without_a_server_the_message_says_how_to_start_one(config: EvalConfig):
    config.server_url = "http://127.0.0.1:9"
    with pytest.raises(DeadlineExceeded, match=r"vllm_server.py.*server_url=null"):
        evaluate(config)


def test_one_sampling_can_be_left_out(config: EvalConfig):
    config.samplings = ["greedy"]
    metrics = evaluate(config)
    assert "sampled" not in metrics and "sampled" not in measurement_table(metrics)
