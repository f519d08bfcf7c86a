"""The BEA 2025 shared task: V3 as read, scores worked out by hand, folds, whole runs, and the submission's schema."""

import json
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter

from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.published import bea2025, labellers
from classroom_rl.evaluation.published.bea2025 import CLASSIFIER, TRACK_NAMES, classify, problem_of, score
from classroom_rl.evaluation.published.mrbench import TRACKS, LabelledReply, read_mrbench
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.moves.labelled import MRBENCH
from classroom_rl.judges.readings import ACTIONABLE, GUIDANCE, Exchange, Trust
from tests.support.configs import loaded
from tests.support.judge_endpoint import judge_endpoint, says
from tests.support.published_rows import FULL_MARKS, LEAK, mrbench_conversation, write_json

ASKS, TELLS, VAGUE = "What do you get if you add the second basket?", "The answer is {}.", "Hmm, maybe look again, {}."
LABELS = {ASKS: FULL_MARKS, TELLS: LEAK, VAGUE: FULL_MARKS | {"Mistake_Identification": "To some extent"}}


def v3_conversation(number: int, annotated: bool = True, problem: int | None = None) -> dict[str, Any]:
    """A made-up row of V3: three tutors, whose replies' forms decide their labels."""
    rng = random.Random(number)
    eggs = 10 + (number if problem is None else problem)
    opening = f"A farmer has a basket with {eggs} eggs, and another one with five eggs more than that. " * 2
    replies = {}
    for index, (form, labels) in enumerate(LABELS.items(), start=1):
        replies[f"Tutor_{index}"] = {"response": form.format(rng.choice(["friend", "please", 15, 20]))}
        if annotated:
            replies[f"Tutor_{index}"]["annotation"] = {name: labels[name] for name in TRACK_NAMES.values()}
    return {
        "conversation_id": f"made_{number}",
        "conversation_history": f"Tutor: {opening}\xa0\n\xa0Student: I took {number} away.",
        "tutor_responses": replies,
    }


def write_v3(path: Path, rows: int = 12, **options: Any) -> str:
    return write_json(path, [v3_conversation(number, **options) for number in range(rows)])


def run(folder: Path, path: str, *overrides: str) -> dict[str, Any]:
    arguments = [f"benchmark.path={path}", f"logging.save_dir={folder}", *overrides]
    return evaluate(loaded("eval", "--config-name", "bea2025", *arguments))


def test_v3_has_labels_in_four_dimensions_or_none(tmp_path: Path):
    labelled = read_mrbench(write_v3(tmp_path / "dev.json", 2), "")
    blind = read_mrbench(write_v3(tmp_path / "test.json", 2, annotated=False), "")
    assert len(labelled) == len(blind) == 6 and all(tuple(reply.labels) == TRACKS for reply in labelled)
    assert [reply.labels["mistake_identification"] for reply in labelled[:3]] == ["yes", "yes", "to some extent"]
    assert all(reply.labels == {} for reply in blind)
    assert [(reply.id, reply.exchange) for reply in labelled] == [(reply.id, reply.exchange) for reply in blind]
    assert labelled[0].id == "made_0-Tutor_1" and labelled[0].exchange.student == "I took 0 away."


# Each changes a row of V3 (the first one of two); the error it must cause.
BROKEN = [
    (lambda row: row["tutor_responses"]["Tutor_1"]["annotation"].pop("Actionability"), "Tutor_1.annotation has no act"),
    (lambda row: row["tutor_responses"]["Tutor_1"]["annotation"].update(Actionability="Maybe"), "none of the known"),
    (lambda row: row["tutor_responses"]["Tutor_1"].pop("annotation"), "5 of 6 replies have labels; it must be all or"),
    (lambda row: row.update(conversation_id="made_1"), "two conversations of one conversation_id"),
    (lambda row: row.pop("tutor_responses"), "it needs .*tutor_responses"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_broken_file_is_refused(change, message: str, tmp_path: Path):
    rows = [v3_conversation(0), v3_conversation(1)]
    change(rows[0])
    with pytest.raises(DataError, match=message):
        run(tmp_path / "run", write_json(tmp_path / "dev.json", rows))


def test_what_cannot_be_run_says_what_to_do(tmp_path: Path):
    dev, blind = write_v3(tmp_path / "dev.json"), write_v3(tmp_path / "blind.json", annotated=False)
    with pytest.raises(DataError, match="MRBench V3, .*--config-name bea2025"):
        evaluate(loaded("eval", "--config-name", "mrbench", f"benchmark.path={dev}", f"logging.save_dir={tmp_path}/a"))
    with pytest.raises(ConfigError, match="only bea2025 trains"):
        loaded("eval", "--config-name", "mrbench", f"benchmark.train_path={dev}")
    with pytest.raises(DataError, match="replies without labels"):
        run(tmp_path / "b", dev, f"benchmark.train_path={blind}")
    with pytest.raises(DataError, match="test file has 2 problems; .* at least 5"):
        classify(read_mrbench(dev, ""), read_mrbench(dev, "")[:6])


class Reader:
    """Move classifiers of one label."""

    def __init__(self, label: str, data: str):
        self.version, self.trust = "readers.made", {label: Trust(0.5, None, 0.5, 9, 9, data, "classifier")}

    def reads(self, label: str, exchange: Exchange) -> bool:
        assert label in self.trust
        return exchange.message == ASKS


def test_move_classifiers_answer_what_they_know_unless_v3_has_their_dialogues(tmp_path: Path, monkeypatch):
    dev, blind = write_v3(tmp_path / "dev.json"), write_v3(tmp_path / "blind.json", annotated=False)
    monkeypatch.setattr(labellers, "open_readers", lambda _: Reader(ACTIONABLE, MRBENCH))
    with pytest.raises(ConfigError, match="were trained on MRBench.*benchmark.train_path"):
        run(tmp_path / "a", dev)
    assert run(tmp_path / "b", blind)["systems"]["rules"]["read_by"]["actionability"] == MRBENCH, "other dialogues"
    monkeypatch.setattr(labellers, "open_readers", lambda _: Reader(GUIDANCE, "replies"))
    rules = run(tmp_path / "c", dev)["systems"]["rules"]
    sources = {"mistake_identification": "rules", "providing_guidance": "replies", "actionability": "rules"}
    assert rules["read_by"] == sources and set(rules["scores"]) == set(sources)
    # People: guidance everywhere; the reader finds it in a third.
    assert rules["scores"]["providing_guidance"]["exact"]["accuracy"]["mean"] == pytest.approx(1 / 3)


def test_scores_on_known_answers():
    people = ["yes", "yes", "yes", "to some extent", "no", "no"]
    system = ["yes", "yes", "to some extent", "yes", "no", "yes"]
    replies = [
        LabelledReply(str(index), str(index), "", "…", {"actionability": label}, Exchange("…"))
        for index, label in enumerate([*people, "no"])
    ]
    scores = score(replies, [*({"actionability": answer} for answer in system), None])["actionability"]
    # Exact F1: yes 2 of 3 given 4 times: 4/7; to some extent: 0; no 1 of 2 given once: 2/3.
    assert scores["exact"]["macro_f1"] == pytest.approx((4 / 7 + 0 + 2 / 3) / 3)
    assert scores["exact"]["accuracy"]["mean"] == pytest.approx(3 / 6) and scores["replies"] == 6
    # Lenient: four of four, given five times: 8/9; no: 2/3.
    assert scores["lenient"]["macro_f1"] == pytest.approx((8 / 9 + 2 / 3) / 2)
    assert scores["lenient"]["accuracy"]["mean"] == pytest.approx(5 / 6)
    assert scores["exact"]["ci95"] is None, "six dialogues"


def test_no_problem_is_in_training_and_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Every problem is in two dialogues of each file, under other ids.
    dev = [v3_conversation(number, problem=number % 6) for number in range(12)]
    training_rows = [
        v3_conversation(number, problem=number % 6) | {"conversation_id": str(number)} for number in range(20, 32)
    ]
    replies, training = (read_mrbench(write_json(tmp_path / "a.json", rows), "") for rows in (dev, training_rows))
    all_replies, seen = [*training, *replies], np.zeros(len(replies), int)
    real = bea2025._predict

    def checked(counted, targets, problems, fitted, test):
        of_training, of_test = ({problem_of(all_replies[index]) for index in side} for side in (fitted, test))
        assert of_training and not of_training & of_test
        seen[test - len(training)] += 1
        return real(counted, targets, problems, fitted, test)

    monkeypatch.setattr(bea2025, "_predict", checked)
    labels, about = classify(training, replies)
    assert (seen == 1).all() and about == {"train": 36, "shared_problems": 6, "folds": 5}
    scores = score(replies, labels)
    assert scores["mistake_identification"]["exact"]["macro_f1"] == pytest.approx(1), "the form decides the label"
    monkeypatch.undo()
    far = read_mrbench(write_json(tmp_path / "b.json", [v3_conversation(900, annotated=False)]), "")
    assert classify(training, far)[1] == {"train": 36, "shared_problems": 0, "folds": 1}


def test_one_dialogue_under_two_ids_is_one_problem(tmp_path: Path):
    short = mrbench_conversation(1) | {"conversation_history": "Tutor: What is 3^3?\n Student: 9"}
    again = short | {"conversation_id": "again", "conversation_history": "Tutor: What is 3^3? \n  Student: 9"}
    other = short | {"conversation_id": "other", "conversation_history": "Tutor: What is 3^3?\n Student: 6"}
    replies = read_mrbench(write_json(tmp_path / "a.json", [short, again, other]), "")
    assert len({problem_of(reply) for reply in replies}) == 2


# The schema of a submission ------------------------------------------------------------------------------------------


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Predicted(Closed):
    response: str
    annotation: dict[
        Literal["Mistake_Identification", "Mistake_Location", "Providing_Guidance", "Actionability"],
        Literal["Yes", "To some extent", "No"],
    ]


class SubmittedRow(Closed):
    conversation_id: str
    conversation_history: str
    tutor_responses: dict[str, Predicted]


def test_the_blind_set_gets_a_submission_per_track_that_fits_the_schema(tmp_path: Path, capsys):
    blind = write_v3(tmp_path / "test.json", 3, annotated=False)
    dev = write_json(tmp_path / "dev.json", [v3_conversation(number) for number in range(50, 62)])
    answers = {"reasoning": "…", "revealing_of_the_answer": "no", "tutor_tone": "neutral", "coherence": "yes"}
    answers |= dict.fromkeys([*TRACKS, "humanlikeness"], "to some extent")
    with judge_endpoint(lambda body, _: says(json.dumps(answers))) as endpoint:
        judges = f"judges=[{{model_name_or_path: rules}}, {{model_name_or_path: a/b, base_url: '{endpoint.url}'}}]"
        metrics = run(tmp_path / "run", blind, f"benchmark.train_path={dev}", judges)
    systems = metrics["systems"]
    assert set(systems) == {CLASSIFIER, "rules", "a/b"} and all(system["scores"] == {} for system in systems.values())
    assert [len(systems[name]["submissions"]) for name in (CLASSIFIER, "rules", "a/b")] == [4, 2, 4]
    rows, printed = json.loads(Path(blind).read_text("utf-8")), capsys.readouterr().out
    for name, system in systems.items():
        for submission in system["submissions"]:
            *_, folder, track, file = Path(submission).parts
            assert folder == name.replace("/", "--") and file == "predictions.json" and submission in printed
            text = (tmp_path / "run" / submission).read_text("utf-8")
            TypeAdapter(list[SubmittedRow]).validate_json(text)
            submitted = json.loads(text)
            for row, original in zip(submitted, rows, strict=True):
                for tutor, reply in row["tutor_responses"].items():
                    assert list(reply.pop("annotation")) == [track], tutor
                assert row == original, "but for the labels the file as it was"
    first = json.loads((tmp_path / "run" / systems["a/b"]["submissions"][0]).read_text("utf-8"))
    assert first[0]["tutor_responses"]["Tutor_1"]["annotation"] == {"Mistake_Identification": "To some extent"}


def test_a_labelled_file_is_scored_and_people_s_labels_are_not_submitted(tmp_path: Path, capsys):
    dev = write_v3(tmp_path / "dev.json")
    metrics = run(tmp_path / "run", dev, f"benchmark.train_path={dev}")
    scores = {name: system["scores"] for name, system in metrics["systems"].items()}
    # People: yes, yes and to some extent in equal shares: always "yes" has F1 4/5 and 0.
    commonest = scores["commonest"]["mistake_identification"]["exact"]
    assert commonest["macro_f1"] == pytest.approx(0.4) and commonest["accuracy"]["mean"] == pytest.approx(2 / 3)
    assert scores[CLASSIFIER]["mistake_identification"]["exact"]["macro_f1"] == pytest.approx(1)
    assert set(scores["rules"]) == {"mistake_identification", "actionability"}
    printed = capsys.readouterr().out
    assert (
        "best published" in printed
        and "0.718" in printed
        and "submissions/rules/Actionability/predictions.json" in printed
    )
    submitted = json.loads((tmp_path / "run/submissions/rules/Actionability/predictions.json").read_text("utf-8"))
    assert all(len(reply["annotation"]) == 1 for row in submitted for reply in row["tutor_responses"].values())
    lines = (tmp_path / "run/answers.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 36 and set(json.loads(lines[0])["systems"]) == {CLASSIFIER, "rules"}


def test_a_part_of_a_file_or_a_missing_verdict_is_scored_but_not_submitted(tmp_path: Path, capsys):
    dev = write_v3(tmp_path / "dev.json", 4)
    assert run(tmp_path / "part", dev, "benchmark.max_dialogues=2")["systems"]["rules"]["submissions"] == []
    with judge_endpoint(lambda body, _: says("I cannot say.")) as endpoint:
        judge = f"judges=[{{model_name_or_path: a/b, base_url: '{endpoint.url}'}}]"
        system = run(tmp_path / "run", dev, judge)["systems"]["a/b"]
    assert system["submissions"] == [] and system["scores"] == {} and system["failures"] == {"unreadable": 12}
    assert "a/b: no verdict on 12 of 12 replies" in capsys.readouterr().out
