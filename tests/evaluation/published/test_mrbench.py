"""MRBench: what is read, agreement worked out by hand, and complete runs against a scripted API."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from classroom_rl.evaluation.published.mrbench import (
    DIMENSIONS,
    LabelledReply,
    judge_agreement,
    kappa_differences,
    read_mrbench,
)
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.moves.labelled import read_labelled
from classroom_rl.judges.readings import Exchange
from tests.support.configs import loaded
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, judge_endpoint, says
from tests.support.published_rows import mrbench_conversation, mrbench_flat, write_json
from tests.support.tutor_messages import write_rows

CONVERSATIONS = 4
PERFECT, BLIND = "a/perfect", "b/blind"


# What is read ------------------------------------------------------------------------------------------------------


def test_mrbench_as_published_and_flat_hold_the_same(tmp_path: Path):
    conversations = [mrbench_conversation(number) for number in range(3)]
    published = read_mrbench(write_json(tmp_path / "MRBench_V2.json", conversations), "test")
    rows = [row for conversation in conversations for row in mrbench_flat(conversation)]
    assert published == read_mrbench(str(write_rows(tmp_path / "flat.jsonl", rows)), "test")
    assert len(published) == 9 and len({reply.history for reply in published}) == 3
    expert, novice, gpt = published[:3]
    assert expert.id == "made-0-Expert" and expert.solution == "10 + 5 = 15\n 15"
    assert expert.history == "Tutor: A basket has 10 eggs, another has 5. How many?\nStudent: There are 10."
    assert set(expert.labels) == set(DIMENSIONS)
    assert expert.labels["mistake_location"] == "to some extent" and expert.labels["tutor_tone"] == "encouraging"
    reveals = [reply.labels["revealing_of_the_answer"] for reply in (expert, novice, gpt)]
    assert reveals == ["no", "yes, correct", "yes, incorrect"]


def read_one(folder: Path, row: dict) -> list[LabelledReply]:
    return read_mrbench(write_json(folder / "a.json", [row]), "")


def test_a_move_classifier_gets_the_same_input_as_in_its_training(tmp_path: Path):
    replies = read_one(tmp_path, mrbench_conversation(1))
    trained_on = read_labelled(str(tmp_path / "a.json"))
    assert [reply.exchange for reply in replies] == [message.exchange for message in trained_on]


def test_an_unknown_solution_is_empty_and_a_tutor_that_is_null_in_a_table_said_nothing(tmp_path: Path):
    row = mrbench_conversation(1) | {"Ground_Truth_Solution": "Not Available"}
    row["anno_llm_responses"]["Phi3"] = None
    assert [reply.solution for reply in read_one(tmp_path, row)] == [""] * 3


# Agreement with people ---------------------------------------------------------------------------------------------


def reply(dialogue: str, **labels: str) -> LabelledReply:
    everything = {name: dimension.answers[0] for name, dimension in DIMENSIONS.items()} | labels
    return LabelledReply(dialogue, dialogue, "", "…", everything, Exchange("…"))


def test_the_agreement_of_a_judge_on_known_answers():
    people = ["yes", "yes", "to some extent", "no"]
    judge = ["yes", "to some extent", "to some extent", "no"]
    replies = [reply(str(index), actionability=label) for index, label in enumerate(people)]
    agreement = judge_agreement(replies, [{**replies[0].labels, "actionability": label} for label in judge])
    dimension = agreement["dimensions"]["actionability"]
    # No, to some extent, yes: people 1, 1, 2 times, the judge 1, 2, 1 times. Expected by chance, with the weights:
    # (1 × (2/4 + 1) + 1 × (1/4 + 1/4) + 2 × (1 + 2/4)) / 16 = 5/16. Observed: 1/4 in one of four. κ = 1 − 1/5.
    assert dimension["kappa"] == pytest.approx(0.8) and dimension["weights"] == "quadratic"
    assert dimension["accuracy"]["mean"] == 0.75 and dimension["replies"] == dimension["dialogues"] == 4
    assert dimension["yes"]["kappa"] == pytest.approx(0.5) and dimension["yes"]["base_rate"] == 0.5
    assert dimension["ci95"] is None, "four dialogues"
    dimension = judge_agreement(
        [reply(str(index), actionability=people[index % 4]) for index in range(40)],
        [{**replies[0].labels, "actionability": judge[index % 4]} for index in range(40)],
    )["dimensions"]["actionability"]
    assert dimension["kappa"] == pytest.approx(0.8) and dimension["ci95"][0] < 0.8 < dimension["ci95"][1] <= 1
    assert agreement["dimensions"]["revealing_of_the_answer"]["weights"] == "none"
    assert agreement["mean_kappa"]["mean"] == pytest.approx(0.8 / 8), "the other seven are always the same answer"


def test_a_reply_without_a_verdict_enters_no_figure():
    replies = [reply(str(index), coherence=label) for index, label in enumerate(["yes", "no", "yes"])]
    labels = [dict(replies[0].labels), dict(replies[1].labels), None]
    coherence = judge_agreement(replies, labels)["dimensions"]["coherence"]
    assert coherence["replies"] == 2 and coherence["accuracy"]["n"] == 2 and coherence["kappa"] == 1.0


def test_judges_are_compared_on_what_both_labelled():
    replies = [reply(str(index), coherence=["yes", "no"][index % 2]) for index in range(6)]
    right = [dict(reply.labels) for reply in replies]
    wrong = [{**reply.labels, "coherence": "yes"} for reply in replies]
    gappy = [None, *right[1:]]
    differences = kappa_differences(replies, {"right": right, "wrong": wrong, "gappy": gappy})
    by_pair = {(entry["judge"], entry["against"]): entry for entry in differences}
    assert by_pair["wrong", "right"]["mean"] == pytest.approx(-1 / 8) and by_pair["wrong", "right"]["replies"] == 6
    assert by_pair["gappy", "right"]["mean"] == 0 and by_pair["gappy", "right"]["replies"] == 5
    rules = [{"actionability": True} for _ in replies]
    assert not kappa_differences(replies, {"right": right, "rules": rules}), "it answers one dimension only"


# Whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(tmp_path: Path) -> str:
    return write_json(tmp_path / "MRBench_V2.json", [mrbench_conversation(number) for number in range(CONVERSATIONS)])


def as_people(benchmark: str) -> Callable[[dict, int], Behaviour]:
    """A judge that answers as people did."""
    labels_of_text = {reply.text: dict(reply.labels) for reply in read_mrbench(benchmark, "test")}

    def script(body: dict, _: int) -> Behaviour:
        text = body["messages"][0]["content"].split("# The reply to assess\n")[1].split("\n# Your answer")[0].strip()
        return says(verdict(labels_of_text[text]))

    return script


def verdict(answers: dict[str, str]) -> str:
    return json.dumps({"reasoning": "…", **answers})


ALWAYS_YES = {name: dimension.answers[-1] for name, dimension in DIMENSIONS.items()}


def run(folder: Path, benchmark: str, endpoint: JudgeEndpoint, *judges: str, also: tuple[str, ...] = ()) -> Any:
    listed = [
        "{model_name_or_path: rules}"
        if name == "rules"
        else f"{{model_name_or_path: {name}, base_url: '{endpoint.url}'}}"
        for name in judges
    ]
    overrides = [f"benchmark.path={benchmark}", f"judges=[{', '.join(listed)}]", f"logging.save_dir={folder}", *also]
    return evaluate(loaded("eval", "--config-name", "mrbench", *overrides))


def answers_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()]


def test_each_judge_is_compared_with_people_in_one_call_per_reply(tmp_path: Path, benchmark: str, capsys):
    people = as_people(benchmark)

    def script(body: dict, nth: int) -> Behaviour:
        return people(body, nth) if body["model"] == PERFECT else says(verdict(ALWAYS_YES))

    with judge_endpoint(script) as endpoint:
        metrics = run(tmp_path / "run", benchmark, endpoint, PERFECT, BLIND, "rules")
    assert len(endpoint.calls) == 2 * 3 * CONVERSATIONS
    perfect, blind, rules = (metrics["judges"][name] for name in (PERFECT, BLIND, "rules"))
    # People gave the same answer to every reply in three dimensions, where agreement is by chance for whoever does so.
    alike = {"providing_guidance", "coherence", "humanlikeness"}
    for name, agreement in perfect["dimensions"].items():
        assert agreement["accuracy"]["mean"] == 1 and agreement["kappa"] == (0 if name in alike else 1), name
    assert perfect["mean_kappa"]["mean"] == pytest.approx(5 / 8)
    assert {agreement["kappa"] for agreement in blind["dimensions"].values()} == {0}
    assert blind["dimensions"]["tutor_tone"]["accuracy"]["mean"] == pytest.approx(2 / 3)
    assert metrics["differences"][0]["mean"] == pytest.approx(-5 / 8)
    assert perfect["answered"] == perfect["asked"] == 12 and perfect["failures"] == {}
    billed = sum(call.billed_usd for call in endpoint.calls if call.body["model"] == PERFECT)
    assert perfect["paid"]["cost_usd"] == pytest.approx(billed) and "paid" not in rules
    assert set(rules["dimensions"]) == {"mistake_identification", "revealing_of_the_answer", "actionability"}
    assert set(rules["not_answered"]) == set(DIMENSIONS) - set(rules["dimensions"])
    assert all("kappa" not in agreement and agreement["yes"] for agreement in rules["dimensions"].values())
    assert metrics["people"]["tutor_tone"] == {"commonest": "encouraging", "share": 2 / 3, "yes": 2 / 3}
    printed = capsys.readouterr().out
    assert "not answered" in printed and "12 of 12" in printed and f"{BLIND} minus {PERFECT}: mean κ -0.62" in printed
    lines = answers_of(tmp_path / "run")
    assert len(lines) == 12 and lines[0]["judges"][PERFECT] == lines[0]["people"]
    assert json.loads((tmp_path / "run/metrics.json").read_text("utf-8")) == metrics


def test_a_judge_that_never_answers_has_no_figures(tmp_path: Path, benchmark: str, capsys):
    with judge_endpoint(lambda body, _: says("I cannot say.")) as endpoint:
        metrics = run(tmp_path, benchmark, endpoint, PERFECT, also=("benchmark.max_dialogues=2",))
    assert (metrics["dialogues"], metrics["replies"]) == (2, 6)
    judge = metrics["judges"][PERFECT]
    assert judge["answered"] == 0 and judge["failures"] == {"unreadable": 6} and judge["dimensions"] == {}
    assert judge["mean_kappa"] is None and len(judge["not_answered"]) == 8 and judge["paid"]["cost_usd"] > 0
    assert [line["judges"][PERFECT] for line in answers_of(tmp_path)] == [None] * 6
    assert "0 of 6" in capsys.readouterr().out
