"""Tests of comparisons of tutors: statistics against hand-computed numbers, and complete runs up to the page."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from classroom_rl.config.base import ApiModelConfig, JudgeModelConfig
from classroom_rl.config.evaluation import EvalConfig, TutorConfig, check_eval
from classroom_rl.config.load import load
from classroom_rl.config.values import is_script
from classroom_rl.environments.toy_language.lessons import make_lessons, render_problem
from classroom_rl.environments.toy_language.scripted_teacher import ScriptedTeacher
from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.compare import arms_of, summarise_comparison
from classroom_rl.evaluation.extra_judges import ask_extra_judges, summarise_judges
from classroom_rl.evaluation.metrics.compared import judged_by_lesson
from classroom_rl.evaluation.report.comparison import choose_lessons, comparison_text, format_p
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.results import rollout_files
from classroom_rl.results.agreement import krippendorff_alpha
from classroom_rl.results.statistics import differences, holm
from classroom_rl.rollout.engine import NO_FACTS, EmbeddedJudge, Sampling
from classroom_rl.rollout.intervals import RESAMPLES, sign_flip_p
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.sampling_service import SamplingService
from tests.support.judge_endpoint import judge_endpoint, says
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room
from tests.support.synthetic_run import FAILED, record_of, scored

LESSONS = [render_problem(lesson) for lesson in make_lessons(3)[1]]

# Statistics ------------------------------------------------------------------------------------------------------


def test_the_sign_flip_test_counts_all_assignments_of_signs():
    # Three lessons, all +1: of the 8 assignments, +++ and −−− are as far from 0. p = 2/8.
    assert sign_flip_p([1.0, 1.0, 1.0]) == 0.25
    # 3, 1, −2: the sum is 2. |±3 ± 1 ± 2| is 6, 2, 4, 0, 0, 4, 2, 6: six of eight are at least 2.
    assert sign_flip_p([3.0, 1.0, -2.0]) == 0.75
    assert sign_flip_p([0.0, 0.0]) == 1.0 and sign_flip_p([]) is None


def test_with_many_lessons_signs_are_drawn():
    # A draw has twenty equal signs with a probability of 2 in a million, so only the observed assignment counts.
    assert sign_flip_p([1.0] * 20) == 1 / (RESAMPLES + 1)
    assert sign_flip_p([1.0, -1.0] * 10) == 1.0
    # Thirteen ones and a seven: |sum| = 20 needs all signs equal, p = 2 / 2¹⁴ = 0.0001.
    assert sign_flip_p([1.0] * 13 + [7.0]) < 0.001


def test_holm():
    # Sorted 0.01, 0.02, 0.03, 0.04 × 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04, each at least the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0] and holm([]) == []


def test_differences_are_of_lesson_means_over_common_lessons():
    found = differences({"base": {"a": [0.0, 1.0], "b": [0.5]}, "new": {"a": [1.0], "b": [0.75], "c": [9.0]}})
    assert [(each.tutor, each.against, each.lessons) for each in found] == [("new", "base", 2)]
    # a: 1 − 0.5, b: 0.75 − 0.5.
    assert found[0].mean == 0.375 and found[0].ci95 is None, "two lessons are too few for an interval"
    assert found[0].p == found[0].p_holm == 0.5  # ++ and −− of four


def test_every_pair_is_compared_once_and_corrected_together():
    ones, zeros = {str(i): [1.0] for i in range(5)}, {str(i): [0.0] for i in range(5)}
    found = differences({"base": zeros, "x": ones, "y": ones})
    assert [(each.tutor, each.against) for each in found] == [("x", "base"), ("y", "base"), ("y", "x")]
    assert [each.p for each in found] == [2 / 32, 2 / 32, 1.0]
    assert [each.p_holm for each in found] == [3 * 2 / 32, 3 * 2 / 32, 1.0]


def test_a_figure_that_one_tutor_lacks_has_no_difference():
    (found,) = differences({"base": {"a": [1.0]}, "x": {}})
    assert (found.mean, found.ci95, found.p, found.p_holm, found.lessons) == (None, None, None, None, 0)
    assert format_p(0.0312) == " = 0.031" and format_p(0.0001) == " < 0.001"


def test_krippendorffs_alpha():
    # (1, 2) and (3, 3): observed Σ of squares 2 + 0 over 4 values, 0.5. Expected: ordered pairs of 1, 2, 3, 3 differ by
    # 1, 2, 2, 1, 1, 0, squared and both ways 2 × (1 + 4 + 4 + 1 + 1) = 22, over 4 × 3: 1.8333. α = 1 − 0.5 / 1.8333.
    assert krippendorff_alpha([(1, 2), (3, 3), (9, None)]) == pytest.approx(1 - 0.5 / (22 / 12))
    assert krippendorff_alpha([(0.1, 0.1), (0.9, 0.9)]) == 1.0
    assert krippendorff_alpha([(0, 1), (1, 0)]) == pytest.approx(1 - 1 / (8 / 12))
    assert krippendorff_alpha([(1, None)]) is None and krippendorff_alpha([(1, 1), (1, 1)]) is None


def test_several_judges_on_the_same_conversations():
    records = {"x": [record_of("a", [], [scored(1, 1, 10)], 0), record_of("b", [], [scored(0, 0, 0)], 1)]}
    records["y"] = [record_of("a", [], [scored(0.5, 0.5, 5)], 0), record_of("b", [], [FAILED], 1)]
    opinions = {"second": {"x/c-0000": 0.8, "x/c-0001": 0.2, "y/c-0000": 0.4, "y/c-0001": 0.9}}
    found = summarise_judges("first", records, opinions)
    assert found["scores"]["first"]["x"]["mean"] == 0.5 and found["scores"]["first"]["y"]["n"] == 1
    assert found["scores"]["second"]["y"]["mean"] == pytest.approx(0.65)
    assert found["spearman"] == {"second": 1.0} and found["pairs"] == {"second": 3} and found["n"] == 3
    assert found["krippendorff_alpha"] == krippendorff_alpha([(1, 0.8), (0, 0.2), (0.5, 0.4), (None, 0.9)])


def test_the_rubrics_findings_are_counted_by_lesson_on_the_right_side():
    wrong, right = "Last week I cook an egg in the kitchen.", "Last week I cooked an egg in the kitchen."
    problem = "Lesson: food, cook, last week\nPlan: you, sister, brother, friends, parents"
    said = ["Hi! What did you cook last week?", wrong, "Check the tense here: cook. Say it again.", right]
    said += ["Check the tense here: cooked. Say it again.", wrong, "Good! What did your sister cook last week?"]
    turns = [Turn("teacher" if place % 2 == 0 else "student", text) for place, text in enumerate(said)]
    record = record_of(problem, turns, [scored(1, 0.5, 5)], reward=0.7)
    found = judged_by_lesson([record])
    lesson = record.problem_id
    assert found["scaffolded"] == {lesson: [1.0, 0.0]} and found["falsely_corrected"] == {lesson: [1.0]}
    assert found["scores/forward_progression_score"] == {lesson: [0.5]}


# Arms ------------------------------------------------------------------------------------------------------------


def test_scripted_teachers_are_roles_like_those_behind_an_api():
    assert is_script("script:ideal") and not is_script("owner/model")
    with pytest.raises(ConfigError, match="script:acknowledges, script:ideal"):
        ScriptedTeacher("script:nobody")


async def _say(name: str, messages: list[dict[str, str]]) -> str:
    return (await ScriptedTeacher(f"script:{name}").chat(messages, Sampling(1.0))).text


def test_what_the_arms_say():
    import asyncio

    prompt = {"role": "user", "content": f"You teach English.\n\n{LESSONS[0]}\n"}
    opening = asyncio.run(_say("ideal", [prompt]))
    lesson = make_lessons(3)[1][0]
    assert opening == ideal(lesson, [])
    assert asyncio.run(_say("acknowledges", [prompt])) == "Good!"
    with pytest.raises(DataError, match="lessons of the quickstart"):
        asyncio.run(_say("ideal", [{"role": "user", "content": "Teach Dutch."}]))


# The whole way ---------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> EvalConfig:
    lessons = tmp_path / "lessons.jsonl"
    lessons.write_text("".join(json.dumps({"problem": text, "answer": ""}) + "\n" for text in LESSONS[:6]))
    overrides = [
        "--config-name=quickstart_compare",
        f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]",
        f"logging.save_dir={tmp_path / 'compare'}",
    ]
    return load(EvalConfig, "eval", overrides, check_eval)


@pytest.fixture
def models(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Scripted tutors and students instead of models: the base ignores errors, the trained tutor repeats itself.
    Returns the names of the tutors, as they are opened."""
    opened: list[str] = []

    def student(prompt: str) -> str:
        return "Every day I cooks egg in the kitchen." if "mistake" in prompt else "Every day I cook an egg."

    async def open_service(config: EvalConfig, weights, folder: Path) -> SamplingService:
        name = config.teacher_model.model_name_or_path
        opened.append(name)
        room = Room(tokenizer, folder)
        room.student, room.judge = ScriptedEngine(tokenizer, student), RubricJudge()
        room.teacher = ScriptedEngine(tokenizer, lambda _: "Good! What do you say?" if "sft" in name else "Good.")
        if is_script(name):
            room.teacher = ScriptedTeacher(name)
        service = room.open(config.generation)
        if is_script(name):
            del service.environment.roles.engines["teacher"]
        return service

    monkeypatch.setattr("classroom_rl.server.sampling_service.open_service", open_service)
    return opened


def test_tutors_and_control_arms_meet_the_same_lessons_one_after_the_other(config, models, tmp_path, capsys):
    metrics = evaluate(config)
    assert models == ["runs/quickstart/sft/model", "runs/quickstart/model", "script:acknowledges", "script:ideal"]
    assert list(metrics["tutors"]) == ["base", "trained", "acknowledges", "ideal"]
    folder = tmp_path / "compare"
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    table = pd.read_parquet(folder / "conversations.parquet")
    assert len(table) == 4 * 6 * 2 and set(table["tutor"]) == set(metrics["tutors"])
    personas = {
        tutor: [[turn["persona"] for turn in json.loads(turns)][1:6:2] for turns in group["turns"]]
        for tutor, group in table.groupby("tutor")
    }
    drawn = personas["acknowledges"]  # this arm never ends a conversation early
    assert any("error_student" in each for each in drawn)
    for found in personas.values():  # equal schedules, as far as the conversations go
        assert all(one == other[: len(one)] for one, other in zip(found, drawn, strict=True))
    sampled = metrics["sampled"]
    assert sampled["figures"]["ideal"]["reward"]["mean"] > sampled["figures"]["acknowledges"]["reward"]["mean"]
    assert sampled["figures"]["acknowledges"]["tasks_per_message"]["mean"] == 0
    pairs = {(each["tutor"], each["against"]): each for each in sampled["paired"]["reward"]}
    assert len(pairs) == 6 and pairs["ideal", "base"]["lessons"] == 6
    text = capsys.readouterr().out
    assert "against base, lesson by lesson" in text and "p = " in text


def test_the_page_is_one_file_and_shows_every_tutor(config, models, tmp_path):
    evaluate(config)
    page = (tmp_path / "compare" / "report.html").read_text(encoding="utf-8")
    assert page.count("<h4>acknowledges</h4>") == page.count("<h4>ideal</h4>") >= 3
    for outside in ("http://", "https://", "<script", "src=", '<link rel="stylesheet'):
        assert outside not in page, outside


def test_extra_judges_agree_with_the_judge_if_they_are_the_same(config, models, capsys):
    metrics = evaluate(replace(config, extra_judges=[JudgeModelConfig("rubric")]))
    judges = metrics["sampled"]["judges"]
    assert judges["krippendorff_alpha"] == 1.0 and judges["spearman"] == {"rubric (again)": pytest.approx(1.0)}
    assert judges["scores"]["rubric"] == judges["scores"]["rubric (again)"]
    text = capsys.readouterr().out
    assert "Score by rubric (again)" in text and "Krippendorff's α of all judges (interval): 1.000, over 48" in text


def test_an_extra_judge_goes_by_the_turns_of_the_server_that_played(config, tmp_path, monkeypatch):
    given = []

    class Asked(EmbeddedJudge):
        async def judge(self, rule, conversation, problem, attempt, facts=NO_FACTS) -> str:
            given.append(facts)
            return "no verdict"

    monkeypatch.setattr("classroom_rl.server.open_models.embedded_judge", lambda name, readers: Asked())
    here, served, old = (record_of("p", [], index=i) for i in range(3))
    here.max_turns, served.max_turns, old.max_turns = config.generation.max_turns, 21, None
    asked = replace(config, extra_judges=[JudgeModelConfig("rubric")])
    asyncio.run(ask_extra_judges(asked, {"base": [here], "served": [served, old]}, tmp_path))
    assert [facts.max_turns for facts in given] == [config.generation.max_turns, 21, None]


def test_a_record_keeps_its_turns_in_a_file_and_an_older_file_is_read(tmp_path):
    record = record_of("p", [])
    record.max_turns = 21
    rollout_files.write_records(tmp_path / "new.parquet", [record])
    assert rollout_files.read_records(tmp_path / "new.parquet")[0].max_turns == 21
    older = pq.read_table(tmp_path / "new.parquet").drop_columns("max_turns")
    pq.write_table(older, tmp_path / "old.parquet")
    assert rollout_files.read_records(tmp_path / "old.parquet")[0].max_turns is None


def test_extra_judges_that_cannot_be_asked_are_refused(config):
    with pytest.raises(ConfigError, match="must be behind an API"):
        check_eval(replace(config, extra_judges=[JudgeModelConfig("owner/model")]))
    with pytest.raises(ConfigError, match="name each judge once"):
        check_eval(replace(config, extra_judges=[JudgeModelConfig("rubric"), JudgeModelConfig("rubric")]))
    with pytest.raises(ConfigError, match="no tutors to compare"):
        check_eval(replace(config, tutors=[], extra_judges=[JudgeModelConfig("rubric")]))


def test_open_lessons_have_no_scripted_ideal(config):
    from classroom_rl.rollout.problem import Problem

    assert [arm.name for arm in arms_of(config, [Problem.of("Language: Dutch")])] == ["base", "trained", "acknowledges"]


def test_the_simulator_that_is_not_to_be_trusted_is_called_so(config):
    from classroom_rl.evaluation.compare import ArmResult

    turns = [Turn("teacher", "Hi!"), Turn("student", "Hello.", "error_student"), Turn("teacher", "Good!")]
    about = {"seed": 1, "problems": 1, "num_samples_per_problem": 1, "tutor": "x", "policy": {}, "engine": {}}
    about |= {"server_url": None, "seconds": 0.0}
    measured = ArmResult(about, [("sampled", record_of(LESSONS[0], turns, reward=0.5))])
    metrics = summarise_comparison(replace(config, samplings=["sampled"]), {"base": measured})
    assert metrics["sampled"]["fidelity"]["base"]["trusted"] is False
    assert "With base the simulated student is NOT to be trusted: only 0% of the turns" in comparison_text(metrics)


def test_lessons_to_show_are_chosen_by_the_spread_of_rewards():
    by_tutor = {
        "a": [record_of(str(i), [], index=i, reward=0.0) for i in range(7)],
        "b": [record_of(str(i), [], index=i, reward=i / 10) for i in range(7)],
    }
    chosen = [group["a"].problem for group in choose_lessons(by_tutor)]
    assert chosen == ["6", "5", "4", "3", "0"]  # furthest apart, the median, closest
    assert choose_lessons({"a": [record_of("x", [], reward=None)]})[0]["a"].reward is None


# Configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tutors", "message"),
    [
        ([TutorConfig("a b", "x")], "name is 'a b'"),
        ([TutorConfig("base", "x")], "other than base, acknowledges, ideal"),
        ([TutorConfig("x", "x"), TutorConfig("x", "y")], "a name of its own"),
        ([TutorConfig("x")], "names no model_name_or_path, adapter or server_url"),
        ([TutorConfig("x", server_url="localhost")], "must begin with http"),
    ],
)
def test_tutors_that_cannot_be_compared_are_refused(config, tutors, message):
    with pytest.raises(ConfigError, match=message):
        check_eval(replace(config, tutors=tutors))


def test_a_server_beside_tutors_is_refused(config):
    with pytest.raises(ConfigError, match="set server_url=null and name a server as one of the tutors"):
        check_eval(replace(config, server_url="http://127.0.0.1:8005"))


def test_tutors_of_maths_are_not_compared():
    with pytest.raises(ConfigError, match="measure tutors of maths one by one"):
        load(EvalConfig, "eval", ["--config-name=maths", "tutors=[{name: x, model_name_or_path: y}]"], check_eval)


def test_a_tutor_says_where_it_is_and_has_the_rest_from_the_base(config):
    from classroom_rl.evaluation.compare import Arm, _config_of

    elsewhere = TutorConfig("gpt", "openai/gpt", use_openrouter=True)
    with _config_of(Arm("gpt", elsewhere), config, Path()) as found:
        assert found.teacher_model.is_remote and found.teacher_model.vllm == config.teacher_model.vllm
    remote = replace(config, teacher_model=ApiModelConfig("owner/base", use_openrouter=True))
    with _config_of(Arm("x", TutorConfig("x", "folder")), remote, Path()) as found:
        assert not found.teacher_model.is_remote and found.tutors == []
    with _config_of(Arm("s", TutorConfig("s", server_url="http://h:1")), config, Path()) as found:
        assert found.server_url == "http://h:1"


def test_an_adapter_is_merged_into_its_base(config, world, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from classroom_rl.evaluation.compare import Arm, _config_of

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(world / "blank")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = adapted(torch.tensor([[5, 6, 7]])).logits
    tutor = TutorConfig("lora", str(world / "blank"), adapter=str(tmp_path / "adapter"))
    with _config_of(Arm("lora", tutor), config, tmp_path) as found:
        merged = AutoModelForCausalLM.from_pretrained(found.teacher_model.model_name_or_path)
        folder = Path(found.teacher_model.model_name_or_path)
        assert (folder / "tokenizer.json").is_file()
    with torch.no_grad():
        assert torch.allclose(merged(torch.tensor([[5, 6, 7]])).logits, wanted, atol=1e-5)
    assert not folder.exists()
    nothing = TutorConfig("lora", adapter=str(world / "blank"))
    with pytest.raises(ConfigError, match="holds no LoRA adapter"), _config_of(Arm("x", nothing), config, tmp_path):
        pass


# Open language, its judges behind HTTP ---------------------------------------------------------------------------

VERDICT = {"task_final_score": 0.5, "forward_progression_score": 0.5, "overall_momentum_score": 5}


def _answer(body: dict, nth: int):
    """The answers of the models: the labeller finds an error in every second student message, and the second judge is
    milder."""
    prompt = body["messages"][-1]["content"]
    if '"errors"' in prompt:
        students = [int(line[1 : line.index("]")]) for line in prompt.splitlines() if "] STUDENT:" in line]
        return says(json.dumps({"reasoning": "", "errors": students[::2]}))
    scores = VERDICT if body["model"] == "owner/judge" else {name: 2 * value for name, value in VERDICT.items()}
    return says(json.dumps(scores | {name.replace("score", "reasoning"): "" for name in scores}))


def test_open_lessons_with_judges_behind_an_api(world, tokenizer, tmp_path, monkeypatch, capsys):
    async def start(wanted, *_):
        lines = {"teacher": lambda _: "Good! What do you say?", "student": lambda _: "abc"}
        return {role: ScriptedEngine(tokenizer, lines[role]) for role in wanted}

    monkeypatch.setattr("classroom_rl.server.open_models._start_engines", start)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the tokenizer's model has a short context
    model = str(world / "blank")
    with judge_endpoint(_answer) as endpoint:
        overrides = [
            "--config-name=language_tutor",
            f"tutors=[{{name: trained, model_name_or_path: {model}}}]",
            *(f"{role}_model.model_name_or_path={model}" for role in ("teacher", "student")),
            f"judge_model={{model_name_or_path: owner/judge, base_url: '{endpoint.url}'}}",
            "judge_model.use_openrouter=false",
            f"extra_judges=[{{model_name_or_path: owner/second, base_url: '{endpoint.url}'}}]",
            "dataset.max_val_examples=3",
            "generation.max_turns=5",
            f"logging.save_dir={tmp_path / 'open'}",
        ]
        metrics = evaluate(load(EvalConfig, "eval", overrides, check_eval))
    assert list(metrics["tutors"]) == ["base", "trained", "acknowledges"]
    sampled = metrics["sampled"]
    assert sampled["figures"]["trained"]["reward"]["mean"] == pytest.approx(0.5)
    assert sampled["judges"]["scores"]["owner/second"]["trained"]["mean"] == pytest.approx(1.0)
    fidelity = sampled["fidelity"]["trained"]
    assert fidelity["labelled_by"] == "judge" and fidelity["trusted"] is False
    assert fidelity["error_persona"]["n"] + fidelity["correct_persona"]["n"] == 3 * 2 * 2
    # In each of six conversations, one of two student messages is labelled as an error, and the tutor ignores it.
    assert sampled["figures"]["trained"]["feedback/none"] == {"mean": 1.0, "ci95": None, "n": 6}
    printed = capsys.readouterr().out
    assert "NOT to be trusted" in printed
    paid = [about["paid"]["judge"] for about in metrics["tutors"].values()]
    paid.append(metrics["extra_judges_paid"]["owner/second"])
    assert sum(each["cost_usd"] for each in paid) == pytest.approx(endpoint.billed_usd) and endpoint.billed_usd > 0
    assert all(each["reserved_usd"] == 0 and each["completion_tokens"] > 0 for each in paid)
    assert f"Paid for: owner/second {paid[-1]['prompt_tokens']:,} + {paid[-1]['completion_tokens']:,} tokens" in printed
