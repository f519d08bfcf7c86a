"""Judges compared with people on MRBench: kappa on hand-worked numbers, and complete runs against a scripted API."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from classroom_rl.config.evaluation import EvalConfig, check_eval
from classroom_rl.config.load import ROOT, load
from classroom_rl.errors import ConfigError, ProviderFailure, SpendingCapReached
from classroom_rl.evaluation.published.asking import choice_schema, ledger_name
from classroom_rl.evaluation.published.label_agreement import judge_agreement, kappa_differences
from classroom_rl.evaluation.published.mrbench import DIMENSIONS, LabelledReply, read_mrbench
from classroom_rl.evaluation.published.reply_labels import CHOICES
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.moves.train import train
from classroom_rl.judges.readings import Exchange
from classroom_rl.results.agreement import confusion_by_group, disagreement_weights, resampled, weighted_kappa
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, cut_off, fails, judge_endpoint, says
from tests.support.published_rows import mrbench_conversation, write_json
from tests.support.tutor_messages import write_data

CONVERSATIONS = 4
PERFECT, BLIND = "a/perfect", "b/blind"


@pytest.fixture
def benchmark(tmp_path: Path) -> str:
    return write_json(tmp_path / "MRBench_V2.json", [mrbench_conversation(number) for number in range(CONVERSATIONS)])


def answers_of_people(benchmark: str) -> dict[str, dict[str, str]]:
    """Reply → what people answered."""
    return {reply.text: dict(reply.labels) for reply in read_mrbench(benchmark, "test")}


def verdict(answers: dict[str, str]) -> str:
    return json.dumps({"reasoning": "…", **answers})


def as_people(benchmark: str) -> Callable[[dict, int], Behaviour]:
    """A judge that answers as people did."""
    known = answers_of_people(benchmark)

    def script(body: dict, _: int) -> Behaviour:
        reply = body["messages"][0]["content"].split("# The reply to assess\n")[1].split("\n# Your answer")[0].strip()
        return says(verdict(known[reply]))

    return script


ALWAYS_YES = {name: each.answers[-1] for name, each in DIMENSIONS.items()}


def evaluation(folder: Path, benchmark: str, url: str, *judges: str, also: tuple[str, ...] = ()) -> EvalConfig:
    listed = [
        "{model_name_or_path: rules}" if name == "rules" else f"{{model_name_or_path: {name}, base_url: '{url}'}}"
        for name in judges
    ]
    overrides = [f"benchmark.path={benchmark}", f"judges=[{', '.join(listed)}]", f"logging.save_dir={folder}", *also]
    return load(EvalConfig, "eval", ["--config-name", "mrbench", *overrides], check_eval)


def run(folder: Path, benchmark: str, endpoint: JudgeEndpoint, *judges: str, also: tuple[str, ...] = ()) -> Any:
    return evaluate(evaluation(folder, benchmark, endpoint.url, *judges, also=also))


# Statistics ------------------------------------------------------------------------------------------------------


def test_cohens_kappa_of_a_table_worked_by_hand():
    # 20 both yes, 15 both no, 5 + 10 apart: observed 0.7; chance 0.5 × 0.6 + 0.5 × 0.4 = 0.5; κ = 0.2 / 0.5.
    table = np.array([[15, 10], [5, 20]])
    assert weighted_kappa(table, disagreement_weights(2, ordinal=False)) == pytest.approx(0.4)
    assert weighted_kappa(table, disagreement_weights(2, ordinal=True)) == pytest.approx(0.4), "two have no middle"


def test_ordered_answers_that_are_near_count_less_than_those_far_apart():
    near, far = np.array([[4, 2, 0], [0, 4, 0], [0, 0, 4]]), np.array([[4, 0, 2], [0, 4, 0], [0, 0, 4]])
    unordered, ordered = (disagreement_weights(3, ordinal) for ordinal in (False, True))
    assert ordered.tolist() == [[0, 0.25, 1], [0.25, 0, 0.25], [1, 0.25, 0]]
    assert weighted_kappa(near, ordered) > weighted_kappa(far, ordered)
    assert weighted_kappa(near, unordered) == pytest.approx(weighted_kappa(far, unordered))


@pytest.mark.parametrize(("ordinal", "weights"), [(False, None), (True, "quadratic")])
def test_kappa_is_that_of_scikit_learn(ordinal: bool, weights: str | None):
    generator = np.random.default_rng(3)
    given = generator.integers(0, 3, 200)
    found = np.where(generator.random(200) < 0.6, given, generator.integers(0, 3, 200))
    groups = [str(place // 9) for place in range(200)]
    tables = confusion_by_group(given, found, groups, 3)
    assert tables.shape == (23, 3, 3) and tables.sum() == 200
    mine = weighted_kappa(tables.sum(axis=0), disagreement_weights(3, ordinal))
    assert mine == pytest.approx(cohen_kappa_score(given, found, weights=weights))


def test_who_always_says_the_same_agrees_by_chance():
    assert weighted_kappa(np.array([[0, 5], [0, 5]]), disagreement_weights(2, False)) == 0
    assert weighted_kappa(np.array([[0, 0], [0, 5]]), disagreement_weights(2, False)) == 0, "nor is it undefined"


def test_dialogues_are_resampled_whole():
    # Two dialogues, of one reply that agrees and of nine that do not: a resample has 2, 10 or 18 replies,
    # both have 10, and one without the other 9 or 1.
    tables = np.zeros((2, 2, 2))
    tables[0, 1, 1], tables[1, 0, 1] = 1, 9
    whole, *drawn, first, second = resampled(tables).sum(axis=(1, 2)).tolist()
    assert set(drawn) == {2, 10, 18} and (whole, first, second) == (10, 9, 1)


def reply(dialogue: str, **labels: str) -> LabelledReply:
    everything = {name: each.answers[0] for name, each in DIMENSIONS.items()} | labels
    return LabelledReply(dialogue, dialogue, "", "…", everything, Exchange("…"))


def test_the_agreement_of_a_judge_on_known_answers():
    people = ["yes", "yes", "to some extent", "no"]
    judge = ["yes", "to some extent", "to some extent", "no"]
    replies = [reply(str(place), actionability=label) for place, label in enumerate(people)]
    found = judge_agreement(replies, [{**replies[0].labels, "actionability": label} for label in judge])
    of = found["dimensions"]["actionability"]
    # No, to some extent, yes: people 1, 1, 2 times, the judge 1, 2, 1 times. Expected by chance, with the weights:
    # (1 × (2/4 + 1) + 1 × (1/4 + 1/4) + 2 × (1 + 2/4)) / 16 = 5/16. Observed: 1/4 in one of four. κ = 1 − 1/5.
    assert of["kappa"] == pytest.approx(0.8) and of["weights"] == "quadratic"
    assert of["accuracy"]["mean"] == 0.75 and of["replies"] == of["dialogues"] == 4
    assert of["yes"]["kappa"] == pytest.approx(0.5) and of["yes"]["base_rate"] == 0.5
    assert of["ci95"] is None, "four dialogues"
    of = judge_agreement(
        [reply(str(place), actionability=people[place % 4]) for place in range(40)],
        [{**replies[0].labels, "actionability": judge[place % 4]} for place in range(40)],
    )["dimensions"]["actionability"]
    assert of["kappa"] == pytest.approx(0.8) and of["ci95"][0] < 0.8 < of["ci95"][1] <= 1
    assert found["dimensions"]["revealing_of_the_answer"]["weights"] == "none"
    assert found["mean_kappa"]["mean"] == pytest.approx(0.8 / 8), "the other seven are always the same answer"


def test_a_reply_without_a_verdict_enters_no_figure():
    replies = [reply(str(place), coherence=label) for place, label in enumerate(["yes", "no", "yes"])]
    labels = [dict(replies[0].labels), dict(replies[1].labels), None]
    found = judge_agreement(replies, labels)["dimensions"]["coherence"]
    assert found["replies"] == 2 and found["accuracy"]["n"] == 2 and found["kappa"] == 1.0


def test_judges_are_compared_on_what_both_labelled():
    replies = [reply(str(place), coherence=["yes", "no"][place % 2]) for place in range(6)]
    right = [dict(each.labels) for each in replies]
    wrong = [{**each.labels, "coherence": "yes"} for each in replies]
    gappy = [None, *right[1:]]
    differences = kappa_differences(replies, {"right": right, "wrong": wrong, "gappy": gappy})
    found = {(each["judge"], each["against"]): each for each in differences}
    assert found["wrong", "right"]["mean"] == pytest.approx(-1 / 8) and found["wrong", "right"]["replies"] == 6
    assert found["gappy", "right"]["mean"] == 0 and found["gappy", "right"]["replies"] == 5
    rules = [{"actionability": True} for _ in replies]
    assert not kappa_differences(replies, {"right": right, "rules": rules}), "it answers one dimension only"


# Whole runs ------------------------------------------------------------------------------------------------------


def test_each_judge_is_compared_with_people_in_one_call_per_reply(tmp_path: Path, benchmark: str, capsys):
    people = as_people(benchmark)

    def script(body: dict, nth: int) -> Behaviour:
        return people(body, nth) if body["model"] == PERFECT else says(verdict(ALWAYS_YES))

    with judge_endpoint(script) as endpoint:
        metrics = run(tmp_path / "run", benchmark, endpoint, PERFECT, BLIND, "rules")
    assert len(endpoint.calls) == 2 * 3 * CONVERSATIONS
    sent = endpoint.calls[0].body["response_format"]["json_schema"]
    assert sent["strict"] and sent["schema"] == choice_schema(CHOICES)
    perfect, blind, rules = (metrics["judges"][name] for name in (PERFECT, BLIND, "rules"))
    # People gave the same answer to every reply in three dimensions, where agreement is by chance for whoever does so.
    alike = {"providing_guidance", "coherence", "humanlikeness"}
    for name, found in perfect["dimensions"].items():
        assert found["accuracy"]["mean"] == 1 and found["kappa"] == (0 if name in alike else 1), name
    assert perfect["mean_kappa"]["mean"] == pytest.approx(5 / 8)
    assert {found["kappa"] for found in blind["dimensions"].values()} == {0}
    assert blind["dimensions"]["tutor_tone"]["accuracy"]["mean"] == pytest.approx(2 / 3)
    assert metrics["differences"][0]["mean"] == pytest.approx(-5 / 8)
    assert perfect["answered"] == perfect["asked"] == 12 and perfect["failures"] == {}
    billed = sum(call.billed_usd for call in endpoint.calls if call.body["model"] == PERFECT)
    assert perfect["paid"]["cost_usd"] == pytest.approx(billed) and "paid" not in rules
    assert set(rules["dimensions"]) == {"mistake_identification", "revealing_of_the_answer", "actionability"}
    assert set(rules["not_answered"]) == set(DIMENSIONS) - set(rules["dimensions"])
    assert all("kappa" not in found and found["yes"] for found in rules["dimensions"].values())
    assert metrics["people"]["tutor_tone"] == {"commonest": "encouraging", "share": 2 / 3, "yes": 2 / 3}
    shown = capsys.readouterr().out
    assert "not answered" in shown and "12 of 12" in shown and f"{BLIND} minus {PERFECT}: mean κ -0.62" in shown
    lines = [json.loads(line) for line in (tmp_path / "run/answers.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 12 and lines[0]["judges"][PERFECT] == lines[0]["people"]
    assert json.loads((tmp_path / "run/metrics.json").read_text("utf-8")) == metrics


def test_a_failed_call_is_no_verdict_and_is_counted_by_its_cause(tmp_path: Path, benchmark: str, capsys):
    people = as_people(benchmark)
    filtered = {"message": "flagged by moderation", "code": 400}

    def script(body: dict, nth: int) -> Behaviour:
        said = body["messages"][0]["content"]
        if "Right, it is 10." in said:
            return says("I would say it is fine.")
        if "Right, it is 11." in said:
            return says(verdict(ALWAYS_YES | {"coherence": "maybe"}))
        if "Right, it is 12." in said:
            return fails(400, filtered)
        if "Right, it is 13." in said:
            return cut_off(verdict(ALWAYS_YES))
        return people(body, nth)

    with judge_endpoint(script) as endpoint:
        metrics = run(tmp_path / "run", benchmark, endpoint, PERFECT)
    found = metrics["judges"][PERFECT]
    assert (found["asked"], found["answered"]) == (12, 8)
    assert found["failures"] == {"unreadable": 3, "content refused": 1}
    assert {each["replies"] for each in found["dimensions"].values()} == {8}
    assert found["dimensions"]["mistake_identification"]["accuracy"]["mean"] == 1
    lines = [json.loads(line) for line in (tmp_path / "run/answers.jsonl").read_text("utf-8").splitlines()]
    assert [line["judges"][PERFECT] for line in lines].count(None) == 4
    assert "3 unreadable, 1 content refused" in capsys.readouterr().out


def test_a_judge_that_never_answers_has_no_figures(tmp_path: Path, benchmark: str, capsys):
    with judge_endpoint(lambda body, _: says("I cannot say.")) as endpoint:
        found = run(tmp_path / "run", benchmark, endpoint, PERFECT)["judges"][PERFECT]
    assert found["answered"] == 0 and found["failures"] == {"unreadable": 12} and found["dimensions"] == {}
    assert found["mean_kappa"] is None and len(found["not_answered"]) == 8 and found["paid"]["cost_usd"] > 0
    assert "0 of 12" in capsys.readouterr().out


def test_an_unreadable_reply_is_asked_for_again_up_to_the_limit(tmp_path: Path, benchmark: str):
    people = as_people(benchmark)

    def script(body: dict, nth: int) -> Behaviour:
        return people(body, nth) if nth == 2 else says("prose")

    with judge_endpoint(script) as endpoint:
        patient = run(tmp_path / "patient", benchmark, endpoint, PERFECT)
    assert patient["judges"][PERFECT]["answered"] == 12 and len(endpoint.calls) == 36


def test_the_same_command_again_pays_for_nothing_twice(tmp_path: Path, benchmark: str):
    with judge_endpoint(as_people(benchmark)) as endpoint:
        first = run(tmp_path / "run", benchmark, endpoint, PERFECT)
        second = run(tmp_path / "run", benchmark, endpoint, BLIND, PERFECT)  # in another order, and one more
        assert [call.body["model"] for call in endpoint.calls].count(PERFECT) == 12
        assert len(endpoint.calls) == 24
    before = first["judges"][PERFECT]
    # The first run added the costs up call by call, the second one had the ledger do it: equal but for rounding.
    assert second["judges"][PERFECT] == before | {"paid": pytest.approx(before["paid"])}


def test_after_an_interruption_only_the_rest_is_asked(tmp_path: Path, benchmark: str):
    people = as_people(benchmark)
    down = True

    def script(body: dict, nth: int) -> Behaviour:
        if down and "A basket has 13 eggs" in body["messages"][0]["content"]:
            return fails(401, "no such key")
        return people(body, nth)

    with judge_endpoint(script) as endpoint:
        config = evaluation(tmp_path / "run", benchmark, endpoint.url, PERFECT)
        config.judges[0].max_concurrent_requests = 1
        with pytest.raises(ProviderFailure, match="refuses every request"):
            evaluate(config)
        paid = len(endpoint.of("says"))
        assert 0 < paid <= 9
        down = False
        metrics = evaluate(config)
        assert len(endpoint.of("says")) == 12, "none of the paid ones again"
    assert metrics["judges"][PERFECT]["answered"] == 12


def test_the_cap_of_a_judge_is_its_own(tmp_path: Path, benchmark: str):
    with judge_endpoint(as_people(benchmark)) as endpoint:
        config = evaluation(tmp_path / "run", benchmark, endpoint.url, PERFECT)
        judge = config.judges[0]
        judge.usd_per_million_prompt_tokens, judge.usd_per_million_completion_tokens = 0.3, 2.5
        judge.max_cost_usd = 0.006  # one request may cost up to 0.005
        with pytest.raises(SpendingCapReached, match="is reached"):
            evaluate(config)
        assert 0 < len(endpoint.calls) < 12 and endpoint.billed_usd <= 0.006


def test_a_judge_that_takes_no_schema_is_asked_in_words(tmp_path: Path, benchmark: str):
    with judge_endpoint(as_people(benchmark)) as endpoint:
        config = evaluation(tmp_path / "run", benchmark, endpoint.url, PERFECT)
        config.judges[0].response_format = "text"
        evaluate(config)
    assert not any("response_format" in call.body for call in endpoint.calls)


def test_some_dialogues_are_drawn(tmp_path: Path, benchmark: str):
    with judge_endpoint(as_people(benchmark)) as endpoint:
        metrics = run(tmp_path / "run", benchmark, endpoint, PERFECT, also=("benchmark.max_dialogues=2",))
    assert metrics["dialogues"] == 2 and metrics["replies"] == len(endpoint.calls) == 6


def test_ledgers_are_named_by_the_judge():
    names = {ledger_name(model) for model in ("a/b", "a-b", "../../etc/passwd", "ä", "x" * 300)}
    assert len(names) == 5 and all("/" not in name and len(name) < 120 and name[0] != "." for name in names)


def test_readers_that_were_trained_on_the_benchmark_are_refused(tmp_path: Path, capsys):
    data = write_data(tmp_path)
    mrbench = next(name for name in data if "mrbench" in name.lower())
    rows = [json.loads(line) for line in Path(mrbench).read_text("utf-8").splitlines()]
    for row in rows:
        row["labels"] |= {
            "Mistake_Location": "No",
            "Providing_Guidance": "Yes",
            "Coherence": "Yes",
            "Tutor_Tone": "Neutral",
            "humanlikeness": "Yes",
        }
    Path(mrbench).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    train([mrbench], tmp_path / "readers", folds=4)
    readers = (f"generation.readers_path={tmp_path / 'readers'}",)
    with pytest.raises(ConfigError, match="were trained on .*measures memory"):
        evaluate(evaluation(tmp_path / "run", mrbench, "http://127.0.0.1:9", "rules", also=readers))
    other = str(tmp_path / "other.jsonl")
    Path(other).write_text("".join(f"{json.dumps(row)}\n" for row in rows[:60]), encoding="utf-8")
    found = evaluate(evaluation(tmp_path / "run", other, "http://127.0.0.1:9", "rules", also=readers))
    assert found["judges"]["rules"]["read_by"]["by_readers"] == ["reveals_answer", "actionable", "mistake_identified"]


# Configuration -----------------------------------------------------------------------------------------------------

REFUSED = [
    (["benchmark.name=mrbunch"], "benchmark.name is mrbunch; it must be one of mrbench, mathdial, mathtutorbench"),
    (["benchmark.path=''"], "benchmark.path is empty"),
    (["benchmark.max_dialogues=0"], "benchmark.max_dialogues is 0; it must be at least 1, or -1 for all"),
    (["benchmark.max_dialogues=-2"], "benchmark.max_dialogues is -2"),
    (["benchmark.tasks=[mistake_location]"], "only mathtutorbench has tasks"),
    (["~benchmark.prompts_paths.judge"], "benchmark.prompts_paths has no template for judge"),
    (["judges=[]"], "judges is empty; name who is compared with people"),
    (["judges=[{model_name_or_path: rubric}]"], "judges has rubric, which reads lessons of the quickstart only"),
    (["judges=[{model_name_or_path: some/model}]"], "judges has some/model, a model for an engine"),
    (["judges=[{model_name_or_path: rules}, {model_name_or_path: rules}]"], "judges has rules twice"),
    (["judges=[{model_name_or_path: a, base_url: 'ftp://x'}]"], "judges.base_url .*must begin with http"),
    (["tutors=[{name: a, model_name_or_path: x}]"], "tutors is set beside benchmark"),
    (["extra_judges=[{model_name_or_path: rules}]"], "extra_judges is set beside benchmark"),
    (["supervisor_model={model_name_or_path: rules}"], "supervisor_model is set beside benchmark"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_a_benchmark_that_cannot_be_measured_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load(EvalConfig, "eval", ["--config-name", "mrbench", *overrides], check_eval)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["benchmark.tasks=[]"], "benchmark.tasks is \\[\\]; it must name one or more of problem_solving"),
        (["benchmark.tasks=[socratic_questioning]"], "scored with BLEU by the benchmark's own program"),
        (["benchmark.tasks=[mistake_location,mistake_location]"], "each once"),
        (["~benchmark.prompts_paths.mistake_location"], "has no template for mistake_location"),
        (["judges=[{model_name_or_path: rules}]"], "no judge takes part in mathtutorbench"),
        (["server_url=localhost:8005"], "server_url is 'localhost:8005'"),
    ],
)
def test_tasks_that_cannot_be_asked_are_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load(EvalConfig, "eval", ["--config-name", "mathtutorbench", *overrides], check_eval)


def test_judges_belong_to_a_benchmark():
    with pytest.raises(ConfigError, match="judges label a benchmark's replies, and benchmark is null"):
        load(EvalConfig, "eval", ["--config-name", "quickstart", "judges=[{model_name_or_path: rules}]"], check_eval)


def test_nothing_is_filled_in_for_a_benchmark_and_its_tilde_is_a_home():
    config = load(EvalConfig, "eval", ["--config-name", "mrbench", "benchmark.path=~/a.json"], check_eval)
    assert config.generation.judges_rules_prompts_paths == {} and config.dataset.eval_datasets == []
    assert config.benchmark.path == str(Path.home() / "a.json")


def test_the_prompt_asks_for_what_is_read():
    text = (ROOT / "prompt_templates/benchmarks/mrbench_judge.txt").read_text(encoding="utf-8")
    for name, dimension in DIMENSIONS.items():
        offered = text.split(f'  "{name}": "')[1].split('"')[0]
        assert sorted(offered.split(" | ")) == sorted(dimension.answers), name
