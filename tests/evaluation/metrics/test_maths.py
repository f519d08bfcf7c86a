"""Measures of maths conversations against values worked out by hand, and complete runs with scripted engines."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.evaluation import EvalConfig, TutorConfig, check_eval
from classroom_rl.config.values import LEAK_RULE, PEDAGOGY_RULE
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.errors import ConfigError, DataError, EngineFailure, RequestRefused
from classroom_rl.evaluation.metrics.maths import initial_solutions, scored_dialogues, summarise_maths
from classroom_rl.evaluation.run import evaluate
from classroom_rl.results.evaluation_files import read_records
from classroom_rl.rollout import prompts as prompts_module
from classroom_rl.rollout.chat_template import Message
from classroom_rl.rollout.intervals import mean_with_ci
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.tokens import Turn
from tests.support.configs import loaded
from tests.support.reward_models import save_classifier
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import Room
from tests.support.synthetic_run import record_of

# Six conversations, two on each of three problems. Both attempts of both rules say OK except these; None is no answer.
VERDICTS = {
    "Hint two-0": {(LEAK_RULE, 0): "REJECT"},
    "Hint two-1": {(PEDAGOGY_RULE, 1): "REJECT"},
    "Hint three-0": {(LEAK_RULE, 0): None, (LEAK_RULE, 1): None},  # it has no verdict
    "Hint three-1": {(LEAK_RULE, 0): "REJECT", (LEAK_RULE, 1): None},
}
# The number of right solutions of two: before the dialogue by problem, after it by conversation.
BEFORE = {"one": 1, "two": 0, "three": 2}
AFTER = {"Hint one-0": 2, "Hint one-1": 2, "Hint two-0": 1, "Hint two-1": 0, "Hint three-0": 2, "Hint three-1": 1}
RIGHT, WRONG = r"So \boxed{7}.", r"So \boxed{8}."


@pytest.fixture
def config(prompts, generation: GenerationConfig, world: Path, tmp_path: Path) -> EvalConfig:
    """Three problems, whose answer is 7, with two conversations each; three messages, two solutions, two attempts."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": name, "answer": "7"}) + "\n" for name in BEFORE))
    scorer = save_classifier(tmp_path / "scorer", world / "blank")
    overrides = [
        "--config-name=maths",
        f"dataset.eval_datasets=[{{name_or_path: {problems}}}]",
        "num_samples_per_problem=2",
        f"logging.save_dir={tmp_path / 'eval'}",
        f"pedagogical_reward_model={scorer}",
        "pedagogical_reward_vllm.max_length=1000",
        "generation.max_tokens_in_conversation=900",
    ]
    config = loaded("eval", *overrides)
    for name in ("teacher", "final", "attempt"):
        Path(prompts(name)).write_text(Path(prompts(name)).read_text() + f" ({name})", encoding="utf-8")
    generation.judges_rules_prompts_paths = {LEAK_RULE: "scripted", PEDAGOGY_RULE: "scripted"}
    generation.student_attempt_prompt_path = prompts("attempt")
    generation.max_turns, generation.number_judge_attempts = 3, 2
    config.generation = generation
    return config


class Scene(Room):
    """Scripted engines instead of models; `alone` counts the student's solutions without a tutor."""

    def __init__(self, tokenizer, folder: Path):
        super().__init__(tokenizer, folder)
        self.alone: list[str] = []
        self.lines: dict[str, Callable[[str], str]] = {}
        self._begun: Counter[str] = Counter()
        self._solved: Counter[str] = Counter()
        self.teacher = ScriptedEngine(tokenizer, self._teach)
        self.student = ScriptedEngine(tokenizer, self._learn)
        self.judge = ScriptedJudge(self._judge)

    def _teach(self, prompt: str) -> str:
        if "Hint" in prompt:
            return "<think>Now?</think>Go on."
        problem = prompt.split("Teach ")[1].split(" to ")[0]
        hint = f"Hint {problem}-{self._begun[problem] % 2}"
        self._begun[problem] += 1
        return f"{hint} <end_of_conversation>" if hint == "Hint one-0" else hint

    def _learn(self, prompt: str) -> str:
        if prompt.startswith("<user>Attempt: "):
            self.alone.append(prompt)
            return self._solve(prompt, BEFORE[prompt.split("Attempt: ")[1].split(" (")[0]])
        hint = next(name for name in AFTER if name in prompt)
        return self._solve(prompt, AFTER[hint]) if "Now solve it." in prompt else "Oh."

    def _solve(self, prompt: str, right: int) -> str:
        self._solved[prompt] += 1
        return RIGHT if (self._solved[prompt] - 1) % 2 < right else WRONG

    def _judge(self, rule: str, conversation: list[Message], attempt: int) -> str:
        hint = next(name for name in AFTER if name in conversation[0]["content"])
        decision = VERDICTS.get(hint, {}).get((rule, attempt), "OK")
        return "I cannot say." if decision is None else json.dumps({"reasoning": f"{hint}!", "decision": decision})


class CountingReward:
    """A reward model whose score is the number of messages that it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []
        self.ended = False

    async def score(self, messages: list[Message]) -> float:
        self.seen.append(messages)
        await asyncio.sleep(0)
        return float(len(messages))

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def scene(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(tokenizer, tmp_path / "eval")
    scene.scorer = CountingReward()

    async def open_service(config: EvalConfig, weights: dict[str, float], folder: Path):
        assert not scene.scorer.seen, "the reward model is loaded when the others have ended"
        scene.reward_weights, scene.folder = weights, folder
        scene.teacher = ScriptedEngine(
            tokenizer, scene.lines.get(config.teacher_model.model_name_or_path, scene._teach)
        )
        return scene.open(config.generation)

    async def start(*_: object) -> CountingReward:
        return scene.scorer

    monkeypatch.setattr("classroom_rl.server.sampling_service.open_service", open_service)
    monkeypatch.setattr("classroom_rl.engines.vllm.reward_engine.RewardEngine.start", start)
    return scene


def check(found: dict, mean: float, n: int, **by_problem: list[float]) -> None:
    """Check the mean computed by hand; three problems are too few for an interval."""
    expected = mean_with_ci(by_problem)
    assert found["mean"] == pytest.approx(mean) == expected["mean"] and found["n"] == n
    assert found["ci95"] is None


INITIAL = 3.0 / 6, 6, {"one": [0.5, 0.5], "two": [0, 0], "three": [1, 1]}
"""The student's initial grades, which do not depend on the dialogues: mean, n, and values by problem."""


def test_the_figures_of_known_conversations(config: EvalConfig, scene: Scene, capsys):
    figures = evaluate(config)["sampled"]
    # Without a verdict: three-0. Final grades of the others: 1, 1; 0.5, 0; 0.5. Initial ones, of all: 0.5; 0; 1.
    check(figures["solve_rate"]["final"], 3.0 / 5, 5, one=[1, 1], two=[0.5, 0], three=[0.5])
    check(figures["solve_rate"]["initial"], *INITIAL[:2], **INITIAL[2])
    check(figures["solve_rate"]["gain"], 1.0 / 5, 5, one=[0.5, 0.5], two=[0.5, 0], three=[-0.5])
    # Leaks: two-0 and three-1, by 1 of 2 and 1 of 1 valid attempts.
    check(figures["rejected_by"][LEAK_RULE], 2 / 5, 5, one=[0, 0], two=[1, 0], three=[1])
    check(figures["rejecting_attempts"][LEAK_RULE], 1.5 / 5, 5, one=[0, 0], two=[0.5, 0], three=[1])
    check(figures["rejected_by"][PEDAGOGY_RULE], 1 / 5, 5, one=[0, 0], two=[0, 1], three=[0])
    check(figures["rejecting_attempts"][PEDAGOGY_RULE], 0.5 / 5, 5, one=[0, 0], two=[0, 0.5], three=[0])
    assert figures["without_verdict"] == {"share": pytest.approx(1 / 6), "n": 6}
    assert figures["without_solutions"] == {"share": 0.0, "n": 5}
    # A score is the number of messages shown (instruction, problem, dialogue): 3 and 5; one-0 ended at its first one.
    check(figures["pedagogical_reward"]["micro"], 43 / 11, 11, one=[3, 3, 5], two=[3, 5] * 2, three=[3, 5] * 2)
    check(figures["pedagogical_reward"]["macro"], 23 / 6, 6, one=[3, 4], two=[4, 4], three=[4, 4])
    assert scene.scorer.ended
    table = capsys.readouterr().out
    assert re.search(r"Solved before the dialogue +50\.0 % n=6\n", table)
    assert re.search(r"Leaks the answer +40\.0 % n=5\n", table)
    assert re.search(r"Breaks pedagogical values +20\.0 % n=5\n", table)
    assert "Pedagogical reward, mean of messages" in table and "n=11" in table


def test_everything_is_in_the_run_folder(config: EvalConfig, scene: Scene):
    metrics = evaluate(config)
    folder = Path(config.logging.save_dir)
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    table = pd.read_parquet(folder / "conversations.parquet")
    assert len(table) == 6 and set(table["sampling"]) == {"sampled"}
    records = read_records(folder / "conversations.parquet")["sampled"]
    for row, record in zip(table.itertuples(), records, strict=True):
        hint = next(name for name in AFTER if name in record.turns[0].text)
        expected = [1.0] * AFTER[hint] + [0.0] * (2 - AFTER[hint])
        assert [solution.grade for solution in record.solutions] == ([] if hint == "Hint three-0" else expected)
        initial = json.loads(row.initial_solutions)
        assert [solution["grade"] for solution in initial] == [1.0] * BEFORE[row.problem] + [0.0] * (
            2 - BEFORE[row.problem]
        )
        assert {solution["text"] for solution in initial} <= {RIGHT, WRONG}
        assert list(row.message_scores) == ([3.0] if hint == "Hint one-0" else [3.0, 5.0])
        reasons = [verdict.reasons for verdict in record.verdicts if verdict.valid]
        assert len(record.verdicts) == 4 and all(set(texts.values()) == {f"{hint}!"} for texts in reasons)


def test_in_hard_mode_what_was_rejected_has_no_solutions_and_is_counted(config: EvalConfig, scene: Scene):
    config.generation.ignore_rejected_judge = False
    figures = evaluate(config)["sampled"]
    check(figures["solve_rate"]["final"], 1.0, 2, one=[1, 1])
    check(figures["solve_rate"]["gain"], 0.5, 2, one=[0.5, 0.5])
    check(figures["solve_rate"]["initial"], *INITIAL[:2], **INITIAL[2])
    assert figures["without_solutions"] == {"share": pytest.approx(3 / 5), "n": 5}
    assert figures["rejected_by"][LEAK_RULE]["mean"] == pytest.approx(2 / 5)


def test_a_reward_models_scores_are_no_shares(config: EvalConfig, scene: Scene, capsys):
    config.reward_model.model_name_or_path = "scripted"
    scene.reward = SimpleNamespace(
        model_name="scripted", score=lambda messages: _later(-3.0 if "8" in messages[1]["content"] else 5.0)
    )
    figures = evaluate(config)["sampled"]
    assert "solve_rate" not in figures
    check(figures["solution_score"]["final"], (5 + 5 + 1 - 3 + 1) / 5, 5, one=[5, 5], two=[1, -3], three=[1])
    check(figures["solution_score"]["initial"], (1 + 1 - 3 - 3 + 5 + 5) / 6, 6, one=[1, 1], two=[-3, -3], three=[5, 5])
    assert "Reward model's score after it" in capsys.readouterr().out


async def _later(value: float) -> float:
    return value


# Rewards of one's own, and several tutors --------------------------------------------------------------------------


def brief(conversation: Conversation) -> float | None:
    """A reward of one's own: 1 for a conversation of one message."""
    return None if conversation.lacks_verdict else float(len(conversation.turns) == 1)


OWN = f"{__name__}:brief"


def test_the_reward_that_was_trained_is_measured_and_solutions_beside_it(config: EvalConfig, scene: Scene, capsys):
    config.reward_weights = {OWN: 2.0, "length": 1.0}
    check_eval(config)
    figures = evaluate(config)["sampled"]
    # one-0 has one message; no reward for three-0, which has no verdict
    check(figures["rewards"][OWN], 1 / 5, 5, one=[1, 0], two=[0, 0], three=[0])
    lengths = figures["rewards"]["length"]["mean"]
    assert figures["reward"]["mean"] == pytest.approx(2 / 5 + lengths)
    check(figures["solve_rate"]["final"], 3.0 / 5, 5, one=[1, 1], two=[0.5, 0], three=[0.5])
    assert re.search(rf"Reward {OWN} +0\.200 n=5\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"lenght": 1.0}, "reward_weights names lenght; did you mean length"),
        ({}, "reward_weights names no reward"),
        ({"post_test": 1.0}, "leave post_test out of reward_weights"),
        ({f"{__name__}:brieff": 1.0}, "did you mean brief"),
    ],
)
def test_a_reward_that_there_is_not_is_refused(config: EvalConfig, weights: dict[str, float], message: str):
    config.reward_weights = weights
    with pytest.raises(ConfigError, match=message):
        check_eval(config)


def test_several_tutors_are_compared_by_the_students_solutions(config: EvalConfig, scene: Scene, capsys):
    config.tutors, config.reward_weights = [TutorConfig(name="trained", model_name_or_path="y")], {OWN: 1.0}
    scene.lines = {"y": lambda _: "Hint one-1 <end_of_conversation>", "script:acknowledges": lambda _: "Hint two-1"}
    check_eval(config)
    metrics = evaluate(config)
    figures = metrics["sampled"]["figures"]
    assert list(metrics["tutors"]) == list(figures) == ["base", "trained", "acknowledges"]
    check(figures["base"]["solve_rate/gain"], 1.0 / 5, 5, one=[0.5, 0.5], two=[0.5, 0], three=[-0.5])
    check(figures["trained"]["solve_rate/gain"], 3.0 / 6, 6, one=[0.5, 0.5], two=[1, 1], three=[0, 0])
    check(figures["acknowledges"]["solve_rate/final"], 0, 6, one=[0, 0], two=[0, 0], three=[0, 0])
    check(figures["acknowledges"][f"rejected_by/{PEDAGOGY_RULE}"], 1, 6, one=[1, 1], two=[1, 1], three=[1, 1])
    check(figures["trained"][f"rewards/{OWN}"], 1, 6, one=[1, 1], two=[1, 1], three=[1, 1])
    check(figures["base"]["pedagogical_reward/macro"], 23 / 6, 6, one=[3, 4], two=[4, 4], three=[4, 4])
    assert {figure["pedagogical_reward/macro"]["mean"] for figure in figures.values()} == {23 / 6, 3.0, 4.0}
    assert len(scene.alone) == 6, "the student alone is asked once for all tutors"
    (against,) = [pair for pair in metrics["sampled"]["paired"]["solve_rate/gain"] if pair["tutor"] == "trained"]
    assert against["mean"] == pytest.approx(((0.5 - 0.5) + (1 - 0.25) + (0 + 0.5)) / 3) and against["lessons"] == 3
    printed = capsys.readouterr().out
    for row in ("Gain", "Leaks the answer", f"Reward {OWN}", "Pedagogical reward, mean of messages"):
        assert printed.count(f"\n{row} ") == 2, (row, "in the figures, and in the differences from the base")
    page = (Path(config.logging.save_dir) / "report.html").read_text(encoding="utf-8")
    assert "Breaks pedagogical values" in page and page.count("<h4>trained</h4>") == 3


# The student's solutions before the dialogue -----------------------------------------------------------------------


def test_the_student_alone_sees_the_attempt_prompt_and_nothing_else(config: EvalConfig, scene: Scene):
    config.samplings = ["sampled", "greedy"]
    evaluate(config)
    assert sorted(scene.alone) == sorted(f"<user>Attempt: {name} (attempt)" for name in BEFORE for _ in range(2))
    samplings = [
        sampling for ids, sampling, _ in scene.student.calls if scene.tokenizer.decode(ids).startswith("<user>Attempt")
    ]
    assert len({sampling.seed for sampling in samplings}) == 6, "each solution is a sample of its own"
    assert {sampling.max_tokens for sampling in samplings} == {config.generation.max_tokens_per_student_attempt}


def test_initial_solutions_of_the_same_are_taken_from_the_run_folder(config: EvalConfig, scene: Scene):
    initial_rate = evaluate(config)["sampled"]["solve_rate"]["initial"]
    scene.alone.clear()
    scene.scorer.seen.clear()
    config.recompute_initial_attempts = False
    config.samplings = ["greedy"]  # so that no conversation is in the journal yet
    assert evaluate(config)["greedy"]["solve_rate"]["initial"]["mean"] is not None and initial_rate["n"] == 6
    assert not scene.alone
    initial = json.loads(
        pd.read_parquet(Path(config.logging.save_dir) / "conversations.parquet")["initial_solutions"][0]
    )
    assert initial and {solution["text"] for solution in initial} <= {RIGHT, WRONG}


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "seed", 43),
        lambda config: setattr(config.student_model, "model_name_or_path", "another"),
        lambda config: setattr(config.student_model.vllm, "temperature", 0.1),
        lambda config: setattr(config.dataset, "max_val_examples", 2),
        lambda config: setattr(config.generation, "max_tokens_per_student_attempt", 77),
        lambda config: Path(config.generation.student_attempt_prompt_path).write_text("Try {{ problem }}"),
    ],
    ids=["seed", "student", "temperature", "problems", "length", "prompt"],
)
def test_initial_solutions_of_something_else_are_left_alone(config: EvalConfig, scene: Scene, change, caplog):
    folder = Path(config.logging.save_dir)
    problems = [Problem.of(name, "7") for name in BEFORE]
    roles = scene.open(config.generation).environment.roles
    solutions = asyncio.run(initial_solutions(config, problems, roles, folder))
    config.recompute_initial_attempts = False
    assert asyncio.run(initial_solutions(config, problems, None, folder)) == solutions
    change(config)
    prompts_module._load.cache_clear()
    if config.dataset.max_val_examples == 2:
        problems = problems[:2]
    assert asyncio.run(initial_solutions(config, problems, None, folder)) is None
    assert "the initial solve rate and the gain are left out" in caplog.text


def test_without_judges_and_initial_solutions_their_figures_are_left_out(config: EvalConfig, scene: Scene):
    config.recompute_initial_attempts, config.generation.number_judge_attempts = False, 0
    figures = evaluate(config)["sampled"]
    assert "rejected_by" not in figures and figures["without_verdict"] == {"share": 0.0, "n": 6}
    assert set(figures["solve_rate"]) == {"final"} and not scene.alone
    check(figures["solve_rate"]["final"], 4 / 6, 6, one=[1, 1], two=[0.5, 0], three=[1, 0.5])
    assert "initial_solutions" not in pd.read_parquet(Path(config.logging.save_dir) / "conversations.parquet").columns


def test_a_problem_that_the_students_provider_refuses_has_no_initial_solutions(config: EvalConfig, scene: Scene):
    chat = scene.student.chat

    async def refuse(messages: list[Message], sampling):
        if messages[0]["content"].startswith("Attempt: two"):
            raise RequestRefused("We do not speak of two.")
        return await chat(messages, sampling)

    scene.student.chat = refuse
    rates = evaluate(config)["sampled"]["solve_rate"]
    check(rates["final"], 3.0 / 5, 5, one=[1, 1], two=[0.5, 0], three=[0.5])
    check(rates["initial"], 3.0 / 4, 4, one=[0.5, 0.5], three=[1, 1])
    check(rates["gain"], 0.5 / 3, 3, one=[0.5, 0.5], three=[-0.5])
    table = pd.read_parquet(Path(config.logging.save_dir) / "conversations.parquet")
    assert [row.initial_solutions == "[]" for row in table.itertuples()] == [
        row.problem == "two" for row in table.itertuples()
    ]


def test_a_student_that_dies_ends_the_evaluation(config: EvalConfig, scene: Scene):
    async def die(*_: object):
        raise EngineFailure("It died.")

    scene.student.chat = die
    with pytest.raises(EngineFailure, match="It died"):
        evaluate(config)


# The pedagogical reward model --------------------------------------------------------------------------------------


def test_each_teacher_message_is_shown_with_what_came_before_it():
    turns = [
        Turn("student", "I tried."),
        Turn("teacher", "<think>Hm.</think>Where?"),
        Turn("student", "Here."),
        Turn("teacher", "Good. <end_of_conversation>"),
    ]
    head = [
        {"role": "system", "content": "Rate."},
        {"role": "user", "content": "Problem: 2 + 5\nReference Solution: "},
        {"role": "user", "content": "I tried."},
        {"role": "assistant", "content": "Where?"},
    ]
    tail = [{"role": "user", "content": "Here."}, {"role": "assistant", "content": "Good."}]
    assert scored_dialogues(record_of("2 + 5", turns), "Rate.") == [head, [*head, *tail]]
    assert scored_dialogues(record_of("2 + 5", turns[:1]), "Rate.") == []
    given = [turns[0], replace(turns[1], given=True), *turns[2:]]  # from the template, not written by the tutor
    assert scored_dialogues(record_of("2 + 5", given), "Rate.") == [[*head, *tail]]


def test_a_conversation_in_which_no_teacher_spoke_has_no_pedagogical_reward():
    records = [record_of(name, [Turn("student", "I tried.")], reward=0.0) for name in ("one", "two")]
    reward = summarise_maths(records, None, [[], [2.0, 4.0]], by_answer=True)["pedagogical_reward"]
    assert (reward["micro"], reward["macro"]) == (
        {"mean": 3.0, "ci95": None, "n": 2},
        {"mean": 3.0, "ci95": None, "n": 1},
    )


def test_it_is_not_scored_where_nobody_asks(config: EvalConfig, scene: Scene):
    config.score_using_pedagogical_reward = False
    assert "pedagogical_reward" not in evaluate(config)["sampled"] and not scene.scorer.seen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: setattr(config, "pedagogical_reward_model", "no/such/folder"), "no/such/folder"),
        (lambda config: setattr(config.pedagogical_reward_vllm, "max_length", 9000), "reads 8192 tokens at most"),
        (lambda config: setattr(config, "pedagogical_reward_prompt_path", "none.txt"), "There is no prompt template"),
    ],
)
def test_what_cannot_score_is_found_before_any_conversation(config: EvalConfig, scene: Scene, change, message: str):
    change(config)
    with pytest.raises((ConfigError, DataError), match=message):
        evaluate(config)
    assert not scene.teacher.calls


def test_the_defaults_are_those_that_users_know():
    config = EvalConfig()
    assert config.generation.ignore_rejected_judge and config.num_samples_per_problem == 1 and config.seed == 42
    assert config.recompute_initial_attempts and config.score_using_pedagogical_reward
    assert config.pedagogical_reward_model == "eth-nlped/Qwen2.5-1.5B-pedagogical-rewardmodel"
    assert (config.generation.number_judge_attempts, config.generation.number_student_attempts) == (2, 8)
    assert config.dataset.max_val_examples == 500
