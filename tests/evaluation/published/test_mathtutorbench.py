"""MathTutorBench against a double of its own program: equal prompts, and equal figures of the same answers."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from classroom_rl.config.benchmark import SCAFFOLDING, TUTOR_TASKS, BenchmarkConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import DataError
from classroom_rl.evaluation.published.mathtutorbench import clone as clone_module
from classroom_rl.evaluation.published.mathtutorbench import rewards as rewards_module
from classroom_rl.evaluation.published.mathtutorbench.clone import read_questions, read_task_file
from classroom_rl.evaluation.published.mathtutorbench.measures import MEASURES, sentence_bleu
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.moves.labelled import numbered_rows
from tests.support.configs import loaded
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, fails, judge_endpoint, says
from tests.support.mathtutorbench import SCORES, DoubleTask, bleu, make_clone, program, win_figures
from tests.support.reward_models import rendered_ids, save_classifier
from tests.support.scripted_engine import ScriptedEngine

STEMS = {task: "student_solution_correctness" if task == "solution_correctness" else task for task in TUTOR_TASKS}
TEACHING = [task for task in TUTOR_TASKS if MEASURES[task].figure == "win_rate"]
ANSWERS = [
    "It is 1000 + 2, so 1002.",
    "Final Answer: $1,036\nor 7",
    "Final Answer: -- 33",
    "No mistake.",
    "Yes, in step 2, not in 12.",
    "I know nothing of it: yesterday…",
    "",
    "\n Two lines?\n3. And more.",
    " How many eggs are in basket 1? How many in all?",
    "How many eggs are in basket 2?\n\nStudent: 12",
    "0",
    "Well said. -.5",
    "42 Problem: another Q: 3",
    "Could it be 1003",
]
"""Answers for which programs that read a little differently have other figures."""


def answer_of(prompt: str, stop: Sequence[str]) -> str:
    """A scripted answer, which ends before a stop text as at any real endpoint."""
    text = ANSWERS[crc32(prompt.encode()) % len(ANSWERS)]
    return text[: min([text.index(end) for end in stop if end in text], default=len(text))]


def scripted(body: dict, nth: int) -> Behaviour:
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return says(answer_of(prompt, body["stop"]))


def on_clone(tmp_path: Path, copies: dict[str, str], endpoint: JudgeEndpoint, *overrides: str) -> EvalConfig:
    tutor = ("teacher_model.model_name_or_path=me/tutor-1", f"teacher_model.base_url={endpoint.url}")
    named = ", ".join(f"{name}: {path}" for name, path in copies.items())
    arguments = [f"benchmark.path={tmp_path / 'clone'}", f"logging.save_dir={tmp_path / 'run'}"]
    arguments += [f"benchmark.datasets={{{named}}}", *tutor, *overrides]
    return loaded("eval", "--config-name", "mathtutorbench", *arguments)


@pytest.fixture
def copies(tmp_path: Path) -> dict[str, str]:
    return make_clone(tmp_path / "clone", rows=12)


def expected_answers(double: DoubleTask, is_chat: bool) -> list[str]:
    answers = [answer_of(prompt, double.stop) for prompt in double.prompts]
    return answers if is_chat else [answer.strip() for answer in answers]


@pytest.mark.parametrize("is_chat", [False, True])
def test_prompts_and_figures_are_those_of_the_benchmarks_program(
    tmp_path: Path, copies: dict[str, str], is_chat: bool, capsys
):
    doubles = {task: program(tmp_path / "clone", STEMS[task], copies) for task in TUTOR_TASKS}
    unscored = ("score_using_pedagogical_reward=false", f"benchmark.is_chat={str(is_chat).lower()}")
    with judge_endpoint(scripted) as endpoint:
        tasks = evaluate(on_clone(tmp_path, copies, endpoint, *unscored))["tasks"]
    # The teaching tasks of one data set share their prompts here; equal requests are sent once.
    sent = {
        json.dumps([call.body.get("messages"), call.body.get("prompt"), call.body["stop"]]) for call in endpoint.calls
    }
    expected = {
        json.dumps(
            [[{"role": "system", "content": prompt}] if is_chat else None, None if is_chat else prompt, double.stop]
        )
        for double in doubles.values()
        for prompt in double.prompts
    }
    assert sent == expected
    assert {call.body["temperature"] for call in endpoint.calls} == {0.0}
    for task, double in doubles.items():
        assert tasks[task]["figures"] == pytest.approx(double.figures(expected_answers(double, is_chat)), abs=1e-12), (
            task
        )
        assert tasks[task]["answered"] == tasks[task]["asked"] == len(double.prompts)
        if task in TEACHING:
            generations = json.loads((tmp_path / f"run/generations-tutor_1-{task}.json").read_text("utf-8"))
            assert [row["generated_teacher_utterance"] for row in generations] == expected_answers(double, is_chat)
            assert tasks[task]["value"] is None and "score_using_pedagogical_reward" in tasks[task]["why"]
        else:
            assert tasks[task]["value"] == tasks[task]["figures"][MEASURES[task].figure]
    assert tasks["mistake_location"]["unreadable"] > 0 and tasks["problem_solving"]["unreadable"] > 0
    printed = capsys.readouterr().out
    assert "No win rate: score_using_pedagogical_reward is false" in printed
    assert "LearnLM-1.5-Pro" in printed and printed.index("LearnLM") < printed.rindex("me/tutor-1")


PIECES = [
    "1",
    "2",
    "0",
    "-.5",
    "7,000",
    "$",
    "-",
    ",",
    "Final Answer:",
    "yes",
    "No",
    "?",
    " ",
    "\n",
    "How many",
    "eggs",
]
TRUTHS = {
    "solution_correctness": ["Yes", "No", "No"],
    "socratic_questioning": ["How many eggs? ** 2\n1 ** 2 ** 3", "x", "x"],
}


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_answer_is_read_as_by_the_benchmarks_program(text: str):
    answers = [text, "1", "no"]
    for task, score in SCORES.items():
        measure, truths = MEASURES[task], TRUTHS.get(task, ["1", "1", "2"])
        parsed = [measure.default if (value := measure.parse(answer)) is None else value for answer in answers]
        total = measure.total(parsed, [measure.target(truth) for truth in truths])
        assert total == pytest.approx(score(answers, truths)), task


WORDS = st.lists(
    st.sampled_from(["a", "test", "3.5", "-", "2-1,", "it's", "&amp;", "-\n", "?", "(x)", "a.b"]), max_size=9
)


@given(WORDS.map(" ".join), st.lists(WORDS.map(" ".join), min_size=1, max_size=3))
def test_bleu_is_the_doubles(sentence: str, references: list[str]):
    assert sentence_bleu(sentence, references) == pytest.approx(bleu(sentence, references) / 100)


@pytest.mark.parametrize(("sentence", "score"), [("test", 0.3678794411714425), ("a test", 1.0), ("", 0.0), ("b", 0.0)])
def test_bleu_has_the_values_of_sacrebleus_own_tests(sentence: str, score: float):
    assert sentence_bleu(sentence, ["a test"]) == pytest.approx(score, abs=1e-8)


# Win rates -----------------------------------------------------------------------------------------------------------


def wins_of_the_double(tmp_path: Path, copies: dict[str, str], score) -> dict[str, dict[str, float]]:
    figures = {}
    for task in TEACHING:
        double = program(tmp_path / "clone", task, copies)
        answers = expected_answers(double, False)
        figures[task] = double.figures(answers) | win_figures(double.examples, answers, score)
    return figures


def test_win_rates_with_a_model_are_those_of_the_benchmarks_scorer(tmp_path: Path, copies: dict[str, str], world: Path):
    folder = save_classifier(tmp_path / "scorer", world / "blank")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    def score(conversation: list[dict[str, str]]) -> float:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([rendered_ids(folder, conversation)])).logits[0][0].item()

    options = (f"pedagogical_reward_model={folder}", "pedagogical_reward_vllm.dtype=float32")
    with judge_endpoint(scripted) as endpoint:
        config = on_clone(tmp_path, copies, endpoint, *options, f"benchmark.tasks=[{','.join(TEACHING)}]")
        tasks = evaluate(config)["tasks"]
    for task, figures in wins_of_the_double(tmp_path, copies, score).items():
        assert tasks[task]["figures"] == pytest.approx(figures, abs=1e-4), task
        assert tasks[task]["value"] == figures["win_rate"] and tasks[task]["why"] is None
    assert 0 < tasks[SCAFFOLDING]["value"] < 1


def length_score(conversation: list[dict[str, str]]) -> float:
    return float(crc32(json.dumps(conversation).encode()) % 1000)


def reward_model(body: dict, nth: int) -> Behaviour:
    """A vLLM server of a classifier; with an activation its scores would differ."""
    if body.get("use_activation") is not False or body["task"] != "classify":
        return fails(400, "not asked for the raw logit")
    reply = {"data": [{"index": 0, "object": "pooling", "data": [length_score(body["messages"])]}]}
    return lambda exchange: exchange.send(200, reply)


def test_win_rates_through_an_endpoint(tmp_path: Path, copies: dict[str, str]):
    with judge_endpoint(scripted) as endpoint, judge_endpoint(reward_model) as rewards:
        served = f"benchmark.reward_url={rewards.url.removesuffix('/v1')}"
        named = f"benchmark.tasks=[{','.join(TEACHING)}]"
        tasks = evaluate(on_clone(tmp_path, copies, endpoint, served, named))["tasks"]
    for task, figures in wins_of_the_double(tmp_path, copies, length_score).items():
        assert tasks[task]["figures"] == pytest.approx(figures), task
    double = program(tmp_path / "clone", SCAFFOLDING, copies)
    generations = json.loads((tmp_path / f"run/generations-tutor_1-{SCAFFOLDING}.json").read_text("utf-8"))
    assert [row["generated_teacher_utterance"] for row in generations] == expected_answers(double, False)
    assert generations[0]["dialog_history"] == double.examples[0]["conversation_json"]
    assert generations[0]["ground_truth_response"]["text"] == "What does twice as many mean?"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["pedagogical_reward_model=./nowhere"], "pedagogical_reward_model.*nowhere"),
        (["benchmark.reward_url=http://127.0.0.1:9", "benchmark.max_dialogues=1"], "gave no score: Connection error"),
    ],
)
def test_turns_that_cannot_be_scored_have_no_figure_and_a_reason(
    tmp_path: Path, copies: dict[str, str], options: list[str], reason: str, monkeypatch, capsys
):
    monkeypatch.setattr(rewards_module, "_RETRIES", 0)
    with judge_endpoint(scripted) as endpoint:
        tasks = evaluate(on_clone(tmp_path, copies, endpoint, f"benchmark.tasks=[{SCAFFOLDING}]", *options))["tasks"]
    assert tasks[SCAFFOLDING]["value"] is None and re.search(reason, tasks[SCAFFOLDING]["why"])
    assert tasks[SCAFFOLDING]["figures"].keys() == {"match"}
    assert tasks[SCAFFOLDING]["why"] in capsys.readouterr().out


def test_a_refused_question_is_counted_and_in_no_figure(tmp_path: Path, copies: dict[str, str]):
    def script(body: dict, nth: int) -> Behaviour:
        refused = "1000 + 2" in body["prompt"]
        return fails(400, {"message": "flagged by moderation"}) if refused else says("Final answer: 1001")

    with judge_endpoint(script) as endpoint:
        tasks = evaluate(on_clone(tmp_path, copies, endpoint, "benchmark.tasks=[problem_solving]"))["tasks"]
    result = tasks["problem_solving"]
    assert (result["asked"], result["answered"], result["failures"]) == (12, 11, {"content refused": 1})
    assert result["value"] == pytest.approx(1 / 11)


def test_an_engine_in_this_process_continues_the_bare_prompt(
    tmp_path: Path, copies: dict[str, str], tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is put around the prompt, and thoughts and what follows a stop text are cut from the answer."""
    engine = ScriptedEngine(tokenizer, lambda prompt: "<think>7</think> 2, I think. Q: 3")

    async def opened(*_: object) -> ScriptedEngine:
        return engine

    monkeypatch.setattr("classroom_rl.evaluation.published.tutor.open_chat_engine", opened)
    with judge_endpoint(scripted) as endpoint:
        local = ("teacher_model.base_url=null", "benchmark.tasks=[mistake_location]")
        result = evaluate(on_clone(tmp_path, copies, endpoint, *local))["tasks"]["mistake_location"]
    double = program(tmp_path / "clone", "mistake_location", copies)
    assert [ids for ids, _, _ in engine.calls] == [tokenizer(prompt)["input_ids"] for prompt in double.prompts]
    assert {sampling.stop for _, sampling, _ in engine.calls} == {("Problem:", "Q:")}
    replies = [json.loads(line)["reply"] for line in (tmp_path / "run/replies-mistake_location.jsonl").open()]
    assert set(replies) == {"2, I think."}
    assert result["figures"] == pytest.approx(double.figures(replies))


# The clone -----------------------------------------------------------------------------------------------------------


def test_data_sets_without_a_copy_come_from_the_hub(tmp_path: Path, copies: dict[str, str], monkeypatch):
    requested = []

    def load(name: str, split: str, subset: str) -> list[dict]:
        requested.append((name, subset, split))
        stem = {"main": "gsm8k/main", "socratic": "gsm8k/socratic", "default": "eth-nlped/stepverify"}[subset]
        return [row for _, row in numbered_rows(copies[stem], "")]

    monkeypatch.setattr(clone_module, "load_from_hub", load)
    for task in TUTOR_TASKS:
        from_hub, local = (
            read_questions(benchmark, task, read_task_file(tmp_path / "clone", task))
            for benchmark in (
                BenchmarkConfig(path=str(tmp_path / "clone")),
                BenchmarkConfig(path=str(tmp_path / "clone"), datasets=copies),
            )
        )
        assert [question.prompt for question in from_hub] == [question.prompt for question in local]
    assert requested == [
        ("openai/gsm8k", "main", "test"),
        ("openai/gsm8k", "socratic", "test"),
        *[("eth-nlped/stepverify", "default", "train")] * 3,
    ]


def test_a_prompt_of_ones_own_is_asked_in_place_of_the_clones(tmp_path: Path, copies: dict[str, str]):
    (tmp_path / "mine.txt").write_text("Which step of {{ student_solution }} is wrong?", encoding="utf-8")
    benchmark = BenchmarkConfig(
        path=str(tmp_path / "clone"), datasets=copies, prompts_paths={"mistake_location": str(tmp_path / "mine.txt")}
    )
    first = read_questions(benchmark, "mistake_location", read_task_file(tmp_path / "clone", "mistake_location"))[0]
    assert first.prompt == (
        r"Which step of Step 1 - One basket has 10.\nStep 2 - The other has 12.\nStep 3 - Together 22. is wrong?"
    )


def change(stem: str, **changes: object) -> Callable[[Path], None]:
    def act(clone: Path) -> None:
        path = clone / f"configs/{stem}.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))

    return act


BROKEN = [
    (lambda clone: shutil.rmtree(clone / "configs"), "must be a clone of the benchmark: git clone"),
    (lambda clone: (clone / "configs/mistake_location.yaml").write_text('stop: ["Q:"]w'), "no YAML, and .*line 1"),
    (lambda clone: (clone / "configs/mistake_location.yaml").write_text("- a"), "holds no mapping"),
    (change("mistake_location", stop="Q:"), "mistake_location.yaml: field stop: .*valid list"),
    (change("mistake_location", system_prompt="{{ questoin }}"), "row 1.*system_prompt .*'questoin' is undefined"),
    (change("mistake_location", system_prompt="{{"), "system_prompt of mistake_location does not parse"),
    (change("mistake_location", ground_truth_format="none"), "row 1.*the ground truth of mistake_location"),
    (lambda clone: (clone / "datasets/mathdial_bridge.json").unlink(), r"There is no file .*mathdial_bridge\.json"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN)
def test_a_clone_that_cannot_be_read_is_an_error_before_anything_is_asked(
    tmp_path: Path, copies: dict[str, str], breaks: Callable[[Path], object], message: str
):
    breaks(tmp_path / "clone")
    with judge_endpoint(scripted) as endpoint:
        config = on_clone(tmp_path, copies, endpoint, f"benchmark.tasks=[mistake_location,{SCAFFOLDING}]")
        with pytest.raises(DataError, match=message):
            evaluate(config)
    assert not endpoint.calls
