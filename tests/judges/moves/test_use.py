"""Where trained readers are used: by the judge `rules`, by the rules of a supervisor, in an evaluation's figures."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import RULES_VERSION
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.compare import ArmResult, summarise_comparison
from classroom_rl.evaluation.metrics.readings import read_by_lesson, reading_metrics
from classroom_rl.evaluation.report.build import render_report
from classroom_rl.evaluation.report.comparison import comparison_text, write_comparison_report
from classroom_rl.evaluation.report.tables import comparison_table, measurement_table
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.messages import read_plan
from classroom_rl.judges.moves.stored import load_readers
from classroom_rl.judges.readings import LABELS, Exchange, MessageReaders, Trust
from classroom_rl.judges.rule_judge import RulesJudge, analyse
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.engine import ConversationFacts
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.open_models import embedded_judge, open_readers
from classroom_rl.supervision.embedded import review_by_rules
from classroom_rl.viewer.metrics import RunMetrics
from tests.evaluation.test_run import _ScriptedServer, config, server  # noqa: F401
from tests.judges.test_rule_judge import ASK, ERR, PLAN, RIGHT, RULE
from tests.supervision import test_language_rules, test_maths_rules
from tests.support.synthetic_run import record_of, scored, write_evaluation

SAID, WRONG = test_language_rules.SAID, test_language_rules.WRONG
OTHER = test_language_rules.OTHER
TRUST = Trust(0.5, (0.4, 0.6), 0.25, 100, 20, "a set", "classifier")


class Told:
    """Readers that a test writes: a label holds where its function says so, and what was asked is kept."""

    version = "readers.told"

    def __init__(self, **rules: Callable[[Exchange], bool]):
        self._rules, self.asked = rules, []
        self.trust = dict.fromkeys(rules, TRUST)

    def reads(self, label: str, about: Exchange) -> bool:
        self.asked.append((label, about))
        return self._rules[label](about)


def always(about: Exchange) -> bool:
    return True


def never(about: Exchange) -> bool:
    return False


def finding(*texts: str, persona: str = RIGHT, readers: MessageReaders | None = None):
    """The judge's finding about the last message of a dialogue that the teacher opens."""
    said = [{"role": ("teacher", "student")[i % 2], "content": text} for i, text in enumerate(texts)]
    drawn = tuple(persona if each["role"] == "student" else None for each in said)
    return analyse(said, read_plan(PLAN), ConversationFacts(drawn, 15), readers)[0][-1]


# The judge -----------------------------------------------------------------------------------------------------------


def test_a_reader_decides_whether_a_right_answer_is_treated_as_wrong():
    reply = f"Hm, people would not put it that way. {OTHER}"
    assert not finding(ASK, SAID, reply).falsely_corrected
    readers = Told(treats_as_wrong=always)
    found = finding(ASK, SAID, reply, readers=readers)
    assert found.falsely_corrected and "corrects what was right" in found.task_reason
    assert readers.asked == [("treats_as_wrong", Exchange(reply))], "by the message alone"
    blunt = f"That is wrong. {OTHER}"
    assert finding(ASK, SAID, blunt).falsely_corrected
    assert not finding(ASK, SAID, blunt, readers=Told(treats_as_wrong=never)).falsely_corrected


def test_a_reader_decides_whether_an_error_was_passed_over():
    reply = "That one belongs to somebody else. How would you change it?"
    passed = finding(ASK, WRONG, reply, persona=ERR)
    assert not passed.scaffolded and "passed over" in passed.forward_reason
    readers = Told(correction=always)
    assert finding(ASK, WRONG, reply, persona=ERR, readers=readers).scaffolded
    assert readers.asked == [("correction", Exchange(reply, WRONG, SAID))]
    assert not finding(ASK, WRONG, reply, persona=ERR, readers=Told(correction=never)).scaffolded


def test_a_correction_that_gives_the_answer_is_still_no_scaffold():
    found = finding(ASK, WRONG, f'You need to say "{SAID}".', persona=ERR, readers=Told(correction=always))
    assert not found.scaffolded and "hands the answer over" in found.forward_reason


def test_readers_of_other_labels_change_no_verdict():
    texts = (ASK, WRONG, "Good! And now?")
    assert finding(*texts, persona=ERR, readers=Told(hint=always)) == finding(*texts, persona=ERR)


def verdict(judge: RulesJudge) -> dict:
    said = [{"role": "teacher", "content": ASK}, {"role": "student", "content": SAID}]
    said.append({"role": "teacher", "content": f"Good! {OTHER}"})
    return json.loads(asyncio.run(judge.judge(RULE, said, PLAN, 0, ConversationFacts((None, RIGHT, None), 15))))


def test_a_verdict_names_the_readers_that_took_part():
    assert verdict(RulesJudge())["rules_version"] == RULES_VERSION
    found = verdict(RulesJudge(Told(treats_as_wrong=always)))
    assert found["rules_version"] == f"{RULES_VERSION}+readers.told"
    assert "corrects what was right" in found["task_final_reasoning"]


# The supervisor ------------------------------------------------------------------------------------------------------


def test_a_reader_finds_what_gives_a_maths_answer_away():
    reply = "You are left with three hundred and a good seventy."
    about = test_maths_rules.about("Hello! What is asked?", "How many people there are.", f"{reply} Why?")
    readers = Told(reveals_answer=lambda each: reply in each.message)
    assert review_by_rules(about).valid
    found = review_by_rules(about, readers)
    assert (found.valid, found.category) == (False, "leak")
    label, asked = readers.asked[0]
    assert label == "reveals_answer" and asked.student == "How many people there are." and asked.target == "375"
    assert asked.before == (test_maths_rules.CINEMA, "Hello! What is asked?")
    assert review_by_rules(about, Told(reveals_answer=never)).valid
    assert review_by_rules(about, Told(question=always)).valid


def test_what_the_student_has_said_cannot_be_given_away():
    about = test_maths_rules.about("What do you get?", "It is 375.", "Right, it is 375. Why?")
    assert review_by_rules(about, Told(reveals_answer=always)).category != "leak"


def test_the_supervisor_reads_a_language_lesson_as_the_judge_does():
    about = test_language_rules.about(ASK, SAID, f"Hm, people would not put it that way. {OTHER}")
    assert review_by_rules(about).valid
    assert review_by_rules(about, Told(treats_as_wrong=always)).category == "false_correction"


# Opening them --------------------------------------------------------------------------------------------------------


def test_without_a_path_there_are_none():
    assert open_readers(GenerationConfig()) is None


def test_a_configuration_opens_the_readers_of_a_folder(folder: Path):
    readers = open_readers(GenerationConfig(readers_path=str(folder)))
    assert readers.version == load_readers(folder).version and set(readers.trust) == set(LABELS)
    assert verdict(embedded_judge("rules", readers))["rules_version"].endswith(readers.version)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="name the folder that python -m classroom_rl.judges.moves.train wrote"):
        open_readers(GenerationConfig(readers_path=str(tmp_path)))


def test_without_readers_a_batch_is_what_it_was():
    assert "readers_path" not in GenerationConfig().identity()
    assert GenerationConfig(readers_path="mine").identity()["readers_path"] == "mine"


@pytest.mark.parametrize(
    "overrides",
    [
        ("judge_model.model_name_or_path=rules",),
        ("supervisor_model.model_name_or_path=rules",),
        ("guards.held_out_judge_model.model_name_or_path=rules", "guards.judge_check_every_n_steps=2"),
    ],
)
def test_a_training_that_reads_by_rules_takes_readers(overrides: tuple[str, ...]):
    load(TrainRLConfig, "train_rl", ("generation.readers_path=mine", *overrides), check_train_rl)


@pytest.mark.parametrize("overrides", [(), ("supervisor_model.model_name_or_path=rubric",)])
def test_a_training_in_which_nobody_reads_by_rules_refuses_them(overrides: tuple[str, ...]):
    with pytest.raises(ConfigError, match="generation.readers_path is mine, but nobody here reads by rules"):
        load(TrainRLConfig, "train_rl", ("generation.readers_path=mine", *overrides), check_train_rl)


# Figures -------------------------------------------------------------------------------------------------------------


def language_record(place: int, *replies: str) -> ConversationRecord:
    """A lesson on `PLAN`: an opening, then each reply after a right answer and an error in turn."""
    turns = [Turn("teacher", ASK)]
    for number, reply in enumerate(replies):
        turns += [Turn("student", (SAID, WRONG)[number % 2], (RIGHT, ERR)[number % 2]), Turn("teacher", reply)]
    return record_of(PLAN, turns, index=place, reward=0.5)


def test_language_figures_by_hand():
    readers = Told(
        question=lambda about: "?" in about.message,
        correction=lambda about: "No" in about.message,
        treats_as_wrong=lambda about: "No" in about.message,
        telling=always,
    )
    records = [language_record(0, "No!", "No, why?"), language_record(1, "Good. And?", "Good.", "Fine.")]
    found = {label: sum(values.values(), []) for label, values in read_by_lesson(records, readers).items()}
    assert found == {
        "question": [0, 1, 1, 0, 0],  # every reply; the opening replies to nobody
        "treats_as_wrong": [1, 0, 0],  # replies to right answers
        "correction": [1, 0],  # replies to errors
    }
    targets = {about.target for label, about in readers.asked if label == "question"}
    assert targets == {SAID}, "the phrase that the student tried to say"


def test_maths_figures_have_the_answer_and_what_was_said_before():
    turns = [Turn("student", "I get 10.", None), Turn("teacher", "It is 12."), Turn("student", "Yes."),
             Turn("teacher", "Bye.")]  # fmt: skip
    record = record_of("5 + 7?", turns, reward=0.5).model_copy(update={"answer": "12"})
    readers = Told(reveals_answer=lambda about: about.target in about.message, question=always)
    assert read_by_lesson([record], readers) == {"reveals_answer": {record.problem_id: [1.0, 0.0]}}
    assert readers.asked[0][1] == Exchange("It is 12.", "I get 10.", "12", ("5 + 7?",))
    assert readers.asked[1][1].before == ("5 + 7?", "I get 10.", "It is 12.")


def test_each_figure_comes_with_its_trust():
    entry = reading_metrics([language_record(0, "Why?"), language_record(1, "Good.")], Told(question=lambda a: "?" in a.message))  # fmt: skip # noqa: E501
    assert entry["version"] == "readers.told"
    assert entry["labels"]["question"]["mean"] == 0.5 and entry["labels"]["question"]["n"] == 2
    assert entry["labels"]["question"]["trust"] == TRUST.as_json() == json.loads(json.dumps(TRUST.as_json()))
    assert Trust.of_json(TRUST.as_json()) == TRUST


def test_an_evaluation_measures_and_prints_them(
    config: EvalConfig,  # noqa: F811
    server: _ScriptedServer,  # noqa: F811
    folder: Path,
    capsys: pytest.CaptureFixture[str],
):
    config.generation.readers_path = str(folder)
    metrics = evaluate(config)
    found = metrics["sampled"]["readings"]
    assert set(found["labels"]) == {"question", "hint", "correction", "treats_as_wrong", "confirmation"}
    assert found["version"] == load_readers(folder).version
    assert all(0 <= each["mean"] <= 1 and each["n"] > 0 for each in found["labels"].values())
    assert metrics == json.loads((Path(config.logging.save_dir) / "metrics.json").read_text())
    printed = capsys.readouterr().out
    assert "Replies with hint (reader)" in printed
    line = f"hint: {load_readers(folder).trust['hint']}"
    assert line in printed and "with people on CIMA, base rate" in line


def test_an_evaluation_without_readers_says_nothing_of_them(config: EvalConfig, server: _ScriptedServer, capsys):  # noqa: F811
    assert "readings" not in evaluate(config)["sampled"] and "reader" not in capsys.readouterr().out


def test_an_evaluation_with_readers_that_are_damaged_plays_nothing(
    config: EvalConfig,  # noqa: F811
    server: _ScriptedServer,  # noqa: F811
    tmp_path: Path,
):
    config.generation.readers_path = str(tmp_path)
    with pytest.raises(DataError, match="readers.json"):
        evaluate(config)
    assert not server.requests


def test_the_report_of_a_run_shows_the_figures_with_their_trust(tmp_path: Path):
    for when, reply in (("before", "Good."), ("after", "Why?")):
        records = [
            language_record(place, reply).model_copy(update={"verdicts": [scored(1, 1, 1)]}) for place in range(3)
        ]
        folder = tmp_path / "eval" / when
        metrics = write_evaluation(folder, {"sampled": records})
        metrics["sampled"]["readings"] = reading_metrics(records, Told(question=lambda about: "?" in about.message))
        (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    data = load_run(tmp_path)
    for text in (comparison_table(data), render_report(data)):
        assert "Replies with question (reader)" in text and "question: κ 0.50 [0.40, 0.60] with people on a set" in text
    assert measurement_table(metrics).count("Read by trained readers (readers.told)") == 1


def test_a_comparison_has_a_row_for_each_label(config: EvalConfig, tmp_path: Path):  # noqa: F811
    about = {"seed": 1, "problems": 2, "num_samples_per_problem": 1, "tutor": "x", "policy": {}, "engine": {}}
    about |= {"server_url": None, "seconds": 0.0}
    measured = {
        name: ArmResult(about, [("sampled", language_record(place, reply)) for place in range(2)])
        for name, reply in (("base", "Good."), ("trained", "Why?"))
    }
    readers = Told(question=lambda about: "?" in about.message)
    metrics = summarise_comparison(replace(config, samplings=["sampled"]), measured, readers=readers)
    means = {name: each["read/question"]["mean"] for name, each in metrics["sampled"]["figures"].items()}
    assert means == {"base": 0.0, "trained": 1.0}
    assert metrics["sampled"]["readings"]["labels"] == {"question": {"trust": TRUST.as_json()}}
    path = write_comparison_report(tmp_path, metrics, {name: each.records for name, each in measured.items()})
    for text in (comparison_text(metrics), path.read_text(encoding="utf-8")):
        assert "Replies with question (reader)" in text and "question: κ 0.50" in text
    without = summarise_comparison(replace(config, samplings=["sampled"]), measured)
    assert "readings" not in without["sampled"] and "reader" not in comparison_text(without)


def test_the_page_names_the_readers(tmp_path: Path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train_rl.yaml").write_text("generation: {readers_path: mine}\n", encoding="utf-8")
    assert ("readers", "mine") in RunMetrics(tmp_path).facts()
