"""Comparisons of tutors: the arms, and complete runs up to the page."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from classroom_rl.config.evaluation import EvalConfig, TutorConfig
from classroom_rl.config.models import ApiModelConfig
from classroom_rl.config.values import is_script
from classroom_rl.environments.toy_language.lessons import make_lessons, render_problem
from classroom_rl.environments.toy_language.scripted_teacher import ScriptedTeacher
from classroom_rl.errors import ConfigError
from classroom_rl.evaluation.compare import Arm, arms_of, config_of_arm
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.rollout.problem import Problem
from classroom_rl.server.sampling_service import SamplingService
from tests.support.configs import loaded
from tests.support.judge_endpoint import judge_endpoint, says
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room

LESSONS = [render_problem(lesson) for lesson in make_lessons(3)[1]]


@pytest.fixture
def config(tmp_path: Path) -> EvalConfig:
    lessons = tmp_path / "lessons.jsonl"
    lessons.write_text("".join(json.dumps({"problem": text, "answer": ""}) + "\n" for text in LESSONS[:6]))
    overrides = [
        "--config-name=quickstart_compare",
        f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]",
        f"logging.save_dir={tmp_path / 'compare'}",
    ]
    return loaded("eval", *overrides)


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


# Arms --------------------------------------------------------------------------------------------------------------


def test_lessons_in_open_language_have_no_scripted_ideal_tutor(config):
    assert [arm.name for arm in arms_of(config, [Problem.of("Language: Dutch")])] == ["base", "trained", "acknowledges"]


def config_of(tutor: TutorConfig, config: EvalConfig, folder: Path = Path()):
    return config_of_arm(Arm(tutor.name, tutor), config, folder)


def test_a_tutor_names_its_model_and_has_the_rest_from_the_base(config):
    with config_of(TutorConfig(name="gpt", model_name_or_path="openai/gpt", use_openrouter=True), config) as tutor:
        assert tutor.teacher_model.is_remote and tutor.teacher_model.vllm == config.teacher_model.vllm
    remote = replace(config, teacher_model=ApiModelConfig("owner/base", use_openrouter=True))
    with config_of(TutorConfig(name="x", model_name_or_path="folder"), remote) as tutor:
        assert not tutor.teacher_model.is_remote and tutor.tutors == []
    with config_of(TutorConfig(name="s", server_url="http://h:1"), config) as tutor:
        assert tutor.server_url == "http://h:1"


def test_an_adapter_is_merged_into_its_base(config, world, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(world / "blank")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted(torch.tensor([[5, 6, 7]])).logits
    tutor = TutorConfig(name="lora", model_name_or_path=str(world / "blank"), adapter=str(tmp_path / "adapter"))
    with config_of(tutor, config, tmp_path) as merged_config:
        merged = AutoModelForCausalLM.from_pretrained(merged_config.teacher_model.model_name_or_path)
        folder = Path(merged_config.teacher_model.model_name_or_path)
        assert (folder / "tokenizer.json").is_file()
    with torch.no_grad():
        assert torch.allclose(merged(torch.tensor([[5, 6, 7]])).logits, expected, atol=1e-5)
    assert not folder.exists()
    no_adapter = TutorConfig(name="lora", adapter=str(world / "blank"))
    with pytest.raises(ConfigError, match="holds no LoRA adapter"), config_of(no_adapter, config, tmp_path):
        pass


# Whole runs --------------------------------------------------------------------------------------------------------


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
    full_schedules = personas["acknowledges"]  # this arm never ends a conversation early
    assert any("error_student" in schedule for schedule in full_schedules)
    for schedules in personas.values():  # equal schedules, as far as the conversations go
        assert all(schedule == full[: len(schedule)] for schedule, full in zip(schedules, full_schedules, strict=True))
    sampled = metrics["sampled"]
    assert sampled["figures"]["ideal"]["reward"]["mean"] > sampled["figures"]["acknowledges"]["reward"]["mean"]
    assert sampled["figures"]["acknowledges"]["tasks_per_message"]["mean"] == 0
    pairs = {(pair["tutor"], pair["against"]): pair for pair in sampled["paired"]["reward"]}
    assert len(pairs) == 6 and pairs["ideal", "base"]["lessons"] == 6
    text = capsys.readouterr().out
    assert "against base, lesson by lesson" in text and "p = " in text
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<h4>acknowledges</h4>") == page.count("<h4>ideal</h4>") >= 3
    for link in ("http://", "https://", "<script", "src=", '<link rel="stylesheet'):
        assert link not in page, link


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
        metrics = evaluate(loaded("eval", *overrides))
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
    spendings = [tutor["paid"]["judge"] for tutor in metrics["tutors"].values()]
    spendings.append(metrics["extra_judges_paid"]["owner/second"])
    assert (
        sum(spending["cost_usd"] for spending in spendings) == pytest.approx(endpoint.billed_usd)
        and endpoint.billed_usd > 0
    )
    assert all(spending["reserved_usd"] == 0 and spending["completion_tokens"] > 0 for spending in spendings)
    assert (
        f"Paid for: owner/second {spendings[-1]['prompt_tokens']:,} + {spendings[-1]['completion_tokens']:,} tokens"
        in printed
    )
