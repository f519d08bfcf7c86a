"""Reward models: the engine's logits equal those of transformers, and become the grades of solutions."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.engines.vllm.reward_engine import RewardEngine
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.memory.budget import CUDA_CONTEXT, GIB
from classroom_rl.memory.report import report
from classroom_rl.rollout.environment import models_on_engines
from classroom_rl.server.open_models import open_roles
from tests.environments.classroom.test_rewards import DECIDING
from tests.support.reward_models import classifier_logit, math_rm_logit, save_classifier, save_math_rm
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import Room

OPTIONS = VllmConfig(max_length=256, max_num_seqs=8, dtype="float32", enforce_eager=True)
DIALOGUES = [
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": r"So \boxed{4}."}],
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": r"So \boxed{5}."}],
    [{"role": "system", "content": "Judge."}, {"role": "assistant", "content": "Where do you stand?"}],
    [{"role": "user", "content": "Да? 你好 " * 12}, {"role": "assistant", "content": ""}],
]


async def in_an_engine(model: Path) -> dict:
    """What a real engine says of DIALOGUES: at once, one after the other, and after a sleep; and of a long one."""
    engine = await RewardEngine.start(ModelConfig(str(model), OPTIONS), 1, GenerationConfig())
    try:
        scores = await asyncio.gather(*map(engine.score, DIALOGUES))
        repeated = [await engine.score(dialogue) for dialogue in DIALOGUES]  # from the prefix cache, if there is any
        await engine.sleep(10)
        waiting = asyncio.create_task(engine.score(DIALOGUES[0]))
        await asyncio.sleep(0.5)
        assert not waiting.done() and engine.health().asleep
        await engine.wake_up()
        with pytest.raises(DataError, match=r"of \d+ tokens.* does not fit .* reward model .*max_length is 256"):
            await engine.score([{"role": "user", "content": "word " * 300}])
        return {"scores": scores, "again": [*repeated, await waiting]}
    finally:
        engine.shutdown()


@pytest.mark.full
@pytest.mark.parametrize(
    ("save", "logit"), [(save_classifier, classifier_logit), (save_math_rm, math_rm_logit)], ids=["head", "tokens"]
)
def test_the_engine_gives_the_logit_that_transformers_gives(world: Path, tmp_path: Path, save, logit):
    model = save(tmp_path / "model", world / "blank")
    result = asyncio.run(in_an_engine(model))
    expected = [logit(model, dialogue) for dialogue in DIALOGUES]
    assert result["scores"] == pytest.approx(expected, abs=1e-3)
    assert result["again"] == pytest.approx([*expected, expected[0]], abs=1e-3)
    assert max(expected) - min(expected) > 0.02, "scores that are all alike would show nothing"


@pytest.mark.full
@pytest.mark.parametrize(("logits", "message"), [(2, "gives 2 numbers where"), (0, "is no reward model")])
def test_a_model_that_gives_no_single_number_is_refused(world: Path, tmp_path: Path, logits: int, message: str):
    model = save_classifier(tmp_path / "model", world / "blank", logits) if logits else world / "blank"
    with pytest.raises(ConfigError, match=message):
        asyncio.run(in_an_engine(model))
    deadline = time.monotonic() + 60
    while psutil.Process().children() and any(
        "EngineCore" in process.name() for process in psutil.Process().children()
    ):
        assert time.monotonic() < deadline, "an engine was left running"
        time.sleep(0.5)


# What is made of the score ------------------------------------------------------------------------------------------


class ScriptedReward:
    """A reward model whose score is a function of the conversation that it is shown."""

    model_name = "scripted"

    def __init__(self, score):
        self.seen: list = []
        self._score = score

    async def score(self, messages) -> float:
        self.seen.append(list(messages))
        await asyncio.sleep(0)
        return self._score(messages)


@pytest.fixture
def graded(room: Room, generation: GenerationConfig) -> Room:
    """Two solutions to each problem, worth 2.5 and -4 to the reward model; both wrong by the reference."""
    solutions = iter(["<think>Seven?</think>It is seven.", "It is eight."] * 8)
    room.student = ScriptedEngine(room.tokenizer, lambda p: next(solutions) if "Now solve it." in p else "Oh.")
    room.judge = ScriptedJudge(lambda *_: '{"reasoning": "", "decision": "OK"}')
    room.reward = ScriptedReward(lambda messages: 2.5 if "seven" in messages[-1]["content"] else -4.0)
    generation.judges_rules_prompts_paths = dict.fromkeys(DECIDING, "scripted")
    return room


def test_a_grade_is_what_the_reward_model_says_of_problem_and_solution(graded: Room, generation: GenerationConfig):
    record = graded.play(generation)[0]
    assert [solution.grade for solution in record.solutions] == [2.5, -4.0]
    assert record.rewards["end_rm"] == (2.5 - 4.0) / 2
    question = {"role": "user", "content": "fractions"}
    assert graded.reward.seen == [
        [question, {"role": "assistant", "content": "It is seven."}],  # what can be heard of it
        [question, {"role": "assistant", "content": "It is eight."}],
    ]


def test_a_rejection_costs_lambda_whoever_grades(graded: Room, generation: GenerationConfig):
    graded.judge = ScriptedJudge(lambda *_: '{"reasoning": "", "decision": "REJECT"}')
    generation.extra_penalty_for_rejected_judges = 0.5
    assert graded.play(generation)[0].rewards["end_rm"] == (2.5 - 4.0) / 2 - 0.5


def test_a_run_that_goes_on_with_another_grader_grades_again(graded: Room, generation: GenerationConfig):
    first = graded.play(generation)[0]
    assert graded.play(generation)[0] == first and len(graded.reward.seen) == 2, "the journal holds its grades"
    graded.reward = None
    assert [solution.grade for solution in graded.play(generation)[0].solutions] == [0.0, 0.0]


# When it is loaded --------------------------------------------------------------------------------------------------

MODEL = ("--config-name=maths_small", "reward_model.model_name_or_path=some/model")


def roles_of(*overrides: str) -> list[str]:
    config = load(TrainRLConfig, "train_rl", [*MODEL, *overrides], check_train_rl)
    return list(models_on_engines(config, reward_weights(config)))


def test_the_role_is_filled_only_when_there_is_something_to_grade():
    assert roles_of() == ["teacher", "student", "judge", "reward"]
    for needless in (
        ["reward_model.model_name_or_path=Answer"],
        ["train.reward_weights={length: 1.0}", "generation.number_student_attempts=0"],
        ["train.reward_weights={length: 1.0}"],
    ):
        assert roles_of(*needless) == ["teacher", "student", "judge"]


def test_the_memory_budget_counts_the_reward_model(world: Path):
    small = [f"{role}_model.model_name_or_path={world / 'blank'}" for role in ("teacher", "student", "judge")]
    options = ["reward_model.vllm.gpu_memory_utilization=0.25", "train.gpu_memory_gib=80"]
    model = [*MODEL[:1], f"reward_model.model_name_or_path={world / 'blank'}"]
    config = load(TrainRLConfig, "train_rl", [*model, *small, *options], check_train_rl)
    lines = report(config, None).lines
    assert any(line.startswith("engine of the reward: ") for line in lines)
    engines = next(line.split()[1] for line in lines if line.strip().startswith("engines "))
    assert float(engines) == pytest.approx(0.75 * 80 + 4 * CUDA_CONTEXT / GIB, abs=0.01)  # 0.15 + 0.15 + 0.2 + 0.25


def test_a_reward_model_that_cannot_hold_a_solution_is_refused_before_it_is_loaded():
    too_short = ("reward_model.vllm.max_length=1024", "generation.max_tokens_per_student_attempt=1024")
    with pytest.raises(ConfigError, match=r"max_length is 1024; .*max_tokens_per_student_attempt = 1024"):
        load(TrainRLConfig, "train_rl", [*MODEL, *too_short], check_train_rl)
    answers = "reward_model.model_name_or_path=Answer"
    assert load(TrainRLConfig, "train_rl", [*MODEL, *too_short, answers], check_train_rl)


def test_a_damaged_reward_model_is_refused_before_any_engine_starts(world: Path, tmp_path: Path):
    model = save_classifier(tmp_path / "model", world / "blank")
    (model / "model.safetensors").unlink()
    config = load(TrainRLConfig, "train_rl", [])
    config.teacher_model.model_name_or_path = config.student_model.model_name_or_path = str(world / "blank")
    config.reward_model.model_name_or_path = str(model)
    config.generation.number_student_attempts = 1  # something to grade
    opening = open_roles(config, {"end_rm": 1.0}, tmp_path)
    with pytest.raises(ConfigError, match="holds no .safetensors file"):
        opening.send(None)
