"""A model's options reach its engine, and every answer is sampled within its own limit."""

import asyncio
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig, JudgeModelConfig, ModelConfig, VllmConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import JudgeOutputError
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.environment import models_on_engines
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import Room


def test_options_reach_vllm(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.engine.async_llm import AsyncLLM

    from classroom_rl.engines.vllm import engine

    given = []
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda arguments, **_: given.append(arguments))
    options = VllmConfig(
        max_length=3072,
        max_num_seqs=17,
        gpu_memory_utilization=0.37,
        number_of_gpus_per_instance=2,
        enforce_eager=True,
        dtype="float16",
    )
    engine.VllmEngine._load(ModelConfig("some/model", options), seed=11, sleep_mode=False)
    (arguments,) = given
    assert (arguments.model, arguments.seed, arguments.dtype) == ("some/model", 11, "float16")
    assert (arguments.max_model_len, arguments.max_num_seqs) == (3072, 17)
    assert (arguments.gpu_memory_utilization, arguments.tensor_parallel_size) == (0.37, 2)
    assert arguments.enforce_eager and not arguments.enable_sleep_mode
    assert not arguments.trust_remote_code and arguments.load_format == "safetensors"
    assert arguments.logprobs_mode == "processed_logprobs", "those of the distribution that was sampled"


def test_temperature_and_truncation_are_each_models_own():
    sampling = Sampling.of(VllmConfig(temperature=0.3, top_p=0.8, top_k=40), max_tokens=7)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.3, 0.8, 40, 7)


def test_a_local_judge_is_asked_with_the_rules_template_within_its_limit(
    room: Room, generation: GenerationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import classroom_rl.server.open_models

    (tmp_path / "rule.txt").write_text("{{ problem }}: {{ conversation[0].content }}")
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": str(tmp_path / "rule.txt")}
    generation.max_tokens_per_judge_attempt = 11
    engines = {
        name: ScriptedEngine(room.tokenizer, lambda _: "words " * 40) for name in ("teacher", "student", "judge")
    }

    async def start(wanted, *_):
        assert wanted["judge"].model_name_or_path == "some/judge"
        return engines

    monkeypatch.setattr(classroom_rl.server.open_models, "_start_engines", start)
    monkeypatch.setattr(classroom_rl.server.open_models, "_check_models", lambda wanted: None)

    async def judge() -> str:
        config = EvalConfig(generation=generation, judge_model=JudgeModelConfig("some/judge"))
        roles = await classroom_rl.server.open_models.open_roles(config, {}, tmp_path)
        said = [{"role": "teacher", "content": "Hello."}]
        return await roles.judge.judge("does_not_leak_answer", said, "fractions", 0)

    with pytest.raises(JudgeOutputError, match="cut off at its most tokens") as caught:
        asyncio.run(judge())
    replies = engines["judge"].calls  # none holds a verdict, so it is asked again
    assert len(replies) == 3
    for prompt, sampling, _ in replies:
        assert room.tokenizer.decode(prompt) == "<user>fractions: Hello." and sampling.max_tokens == 11
    text = caught.value.answer
    assert text.startswith("words words") and len(room.tokenizer.encode(text)) <= 11


def test_without_judge_attempts_no_judge_is_loaded(generation: GenerationConfig):
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": "rule.txt"}
    config = EvalConfig(generation=generation, judge_model=JudgeModelConfig("some/judge"))
    assert set(models_on_engines(config, {})) == {"teacher", "student", "judge"}
    generation.number_judge_attempts = 0
    assert set(models_on_engines(config, {})) == {"teacher", "student"}


@pytest.fixture
def maths(room: Room, generation: GenerationConfig) -> GenerationConfig:
    generation.judges_rules_prompts_paths = {"does_not_leak_answer": "scripted"}
    room.judge = ScriptedJudge(lambda *_: '{"reasoning": "", "decision": "OK"}')
    generation.forced_conversation_type = "attempt"
    return generation


def test_every_answer_has_its_own_limit_in_tokens(room: Room, maths: GenerationConfig):
    maths.max_tokens_per_turn, maths.max_tokens_per_student_attempt = 21, 34
    maths.number_student_attempts = 3
    record = room.play(maths)[0]
    limits = [sampling.max_tokens for _, sampling, _ in room.student.calls]
    assert limits[0] == 34, "the opening attempt"
    assert limits[-3:] == [34] * 3, "the solutions"
    assert set(limits[1:-3]) == {21} and len(limits) > 4
    assert {sampling.max_tokens for _, sampling, _ in room.teacher.calls} == {21}
    assert len(record.solutions) == 3


def test_the_student_sees_its_prompts_in_their_places(room: Room, maths: GenerationConfig, tmp_path: Path):
    for name, key in (
        ("asked", "student_initial_attempt_prompt_path"),
        ("wrapped", "initial_attempt_wrapper_prompt_path"),
        ("solved", "student_final_prompt_path"),
    ):
        (tmp_path / f"{name}.txt").write_text(f"{name}: {{{{ attempt or '' }}}}" if name == "wrapped" else f"{name}!")
        setattr(maths, key, str(tmp_path / f"{name}.txt"))
    room.student = ScriptedEngine(room.tokenizer, lambda prompt: "Mine." if prompt.endswith("asked!") else "Oh.")
    record = room.play(maths)[0]
    asked = [room.tokenizer.decode(prompt) for prompt, _, _ in room.student.calls]
    assert asked[0] == "<user>asked!" and asked[-1].endswith("<user>solved!")
    assert "wrapped: Mine." in room.tokenizer.decode(record.prompt_ids)


def test_the_rule_of_a_judge_asks_as_often_as_is_configured(room: Room, maths: GenerationConfig):
    asked = []
    maths.judges_rules_prompts_paths = {"a": "scripted", "b": "scripted"}
    room.judge = ScriptedJudge(
        lambda rule, _, attempt: asked.append((rule, attempt)) or '{"reasoning": "", "decision": "OK"}'
    )
    maths.number_judge_attempts = 3
    room.play(maths)
    assert sorted(asked) == [(rule, attempt) for rule in "ab" for attempt in range(3)]
    asked.clear()
    maths.number_judge_attempts = 0
    record = room.play(maths, request_id="none")[0]
    assert asked == [] and record.reward is not None, "λ = 0"


@pytest.mark.parametrize("names", [["Ada"], [None]])
def test_names_are_those_of_the_configuration(room: Room, generation: GenerationConfig, names: list):
    generation.student_names = names
    record = room.play(generation)[0]
    assert record.student_name == names[0]
    assert f"to {names[0] or 'someone'}." in room.tokenizer.decode(record.prompt_ids)
