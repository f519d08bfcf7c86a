"""The one place that picks an engine for a role, and loads it."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from config.base import ApiModelConfig, GenerationConfig, JudgeModelConfig, ModelConfig, VllmConfig
from config.values import EMBEDDED_JUDGES, PHASED, is_script
from src.classroom.prompt_check import check_prompts
from src.classroom.seats import Seats, engine_seats, models_in_use
from src.errors import ConfigError
from src.grading.checker import AnswerChecker
from src.inference_providers.call_ledger import CallLedger
from src.inference_providers.chat_api import ChatApi
from src.inference_providers.open_router_inference import ApiChatEngine, ChatEngineJudge, OpenAICompatibleJudge
from src.memory.engine_shares import refuse_crowded_gpu
from src.message_rules.rules_judge import RulesJudge
from src.models.pretrained import check_context, check_model, load_tokenizer
from src.rollout.chat_template import ReplyFrame, roles_as_rendered
from src.rollout.engines import EmbeddedJudge, Judge, Sampling
from src.toy_language.rubric_judge import RubricJudge
from src.toy_language.scripted_teacher import ScriptedTeacher

if TYPE_CHECKING:
    from src.vllm.engine import VllmEngine
    from src.vllm.engine_base import EngineProcess

logger = logging.getLogger(__name__)
_EMBEDDED: dict[str, type[EmbeddedJudge]] = {"rubric": RubricJudge, "rules": RulesJudge}


JUDGE_CALLS_NAME = "judge_calls.sqlite"
"""The ledger of a seat is `<seat>_calls.sqlite`: each has a cap of its own."""


async def open_seats(
    teacher: ApiModelConfig,
    student: ApiModelConfig,
    judge: JudgeModelConfig,
    generation: GenerationConfig,
    seed: int,
    run_folder: Path,
    reward: ModelConfig | None = None,
) -> Seats:
    """Load the models of all seats, one after the other: vLLM measures free memory as it loads.

    Args:
        reward: the model that grades solutions, if one does.

    Raises:
        EngineFailure: if a model cannot be loaded; engines that were loaded before it are shut down.
        DataError: if a prompt template is missing or wrong.
        ConfigError: if a model folder is missing or damaged, an API key is missing, or the engines ask for more than
            their GPU.
        StorageError: if the record of paid requests in `run_folder` cannot be used.
    """
    wanted = engine_seats(teacher, student, judge, generation, reward)
    apis = {
        seat: ChatApi(model, CallLedger(run_folder / f"{seat}_calls.sqlite", _cap_usd(model, generation)), seat)
        for seat, model in models_in_use(teacher, student, judge, generation).items()
        if model.is_remote
    }
    remote_judge = None if "judge" in wanted else _judge_without_engine(judge, generation, apis.get("judge"))
    refuse_crowded_gpu(wanted, generation.schedule)
    check_prompts(generation, judge_reads_templates=not isinstance(remote_judge, EmbeddedJudge))
    _check_models(wanted)
    engines = await _start_engines(wanted, generation, seed)  # with the phased schedule they sleep
    if "judge" in engines:
        sampling = _sampling(judge.vllm, generation.max_tokens_per_judge_attempt)
        rules = generation.judges_rules_prompts_paths
        remote_judge = ChatEngineJudge(engines["judge"], sampling, rules, judge.replies_per_attempt)
    return Seats(
        teacher=engines.get("teacher") or _teacher_without_engine(teacher, apis),
        teacher_sampling=_sampling(teacher.vllm, generation.max_tokens_per_turn),
        student=engines.get("student") or ApiChatEngine(student, apis["student"]),
        student_sampling=_sampling(student.vllm, generation.max_tokens_per_turn),
        judge=remote_judge,
        engines=engines,
        apis=apis,
        answers=AnswerChecker(generation.answer_timeout_s),
        reward=engines.get("reward"),
    )


def embedded_judge(name: str) -> EmbeddedJudge:
    """The judge without a model that `name` stands for, one of `EMBEDDED_JUDGES`."""
    return _EMBEDDED[name]()


def _teacher_without_engine(teacher: ApiModelConfig, apis: Mapping[str, ChatApi]) -> ApiChatEngine | ScriptedTeacher:
    name = teacher.model_name_or_path
    return ScriptedTeacher(name) if is_script(name) else ApiChatEngine(teacher, apis["teacher"])


def _cap_usd(model: ApiModelConfig, generation: GenerationConfig) -> float | None:
    """Servers of one run do not see each other's spending: each may spend its share."""
    servers = len(generation.server_urls) if generation.server_urls is not None else 1
    return None if model.max_cost_usd is None else model.max_cost_usd / servers


def _judge_without_engine(
    judge: JudgeModelConfig, generation: GenerationConfig, api: ChatApi | None
) -> Judge | EmbeddedJudge | None:
    rules = generation.judge_rules
    if not rules:
        return None
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        return embedded_judge(judge.model_name_or_path)
    if api is not None:
        return OpenAICompatibleJudge(judge, rules, generation.max_tokens_per_judge_attempt, api.ledger, api)
    return None


def _check_models(wanted: dict[str, ModelConfig]) -> None:
    for seat, model in wanted.items():
        key, name = f"{seat}_model.model_name_or_path", model.model_name_or_path
        check_model(key, name)
        tokenizer = load_tokenizer(key, name)
        if seat == "reward":  # it reads a conversation and takes no part in one
            continue
        try:
            ReplyFrame(tokenizer)
            alone = roles_as_rendered(tokenizer, ["system"])
        except ConfigError as error:
            raise ConfigError(f"{key}: {name}: {error}") from error
        if seat == "teacher" and alone != ["system"]:
            logger.info("the chat template of %s takes no system message alone: the prompt goes as the user's", name)
    for seat, model in wanted.items():  # only of models that can be used at all
        check_context(f"{seat}_model.vllm.max_length", model.model_name_or_path, model.vllm.max_length)


async def _start_engines(
    wanted: dict[str, ModelConfig], generation: GenerationConfig, seed: int
) -> dict[str, "EngineProcess"]:
    from src.vllm.engine import VllmEngine
    from src.vllm.reward_engine import RewardEngine

    engines: dict[str, EngineProcess] = {}
    try:
        for seat, model in wanted.items():
            started = time.monotonic()
            logger.info("loading the %s: %s", seat, model.model_name_or_path)
            kind = RewardEngine if seat == "reward" else VllmEngine
            engines[seat] = await kind.start(model, seed, generation)
            logger.info("the %s is loaded (%.0f s)", seat, time.monotonic() - started)
            if generation.schedule == PHASED:
                await _make_room_for_the_next(engines[seat], generation)
    except BaseException:
        for engine in engines.values():
            engine.shutdown()
        raise
    return engines


async def _make_room_for_the_next(engine: "VllmEngine", generation: GenerationConfig) -> None:
    health = engine.health()
    if health.gpus and not health.can_sleep:
        raise ConfigError(
            f"generation.schedule is {PHASED}, but vLLM has no sleep mode on this kind of GPU, so {health.model} "
            "cannot give its memory back between the phases: set generation.schedule=concurrent."
        )
    await engine.sleep(generation.load_weights_timeout_s)


def _sampling(options: VllmConfig, max_tokens: int) -> Sampling:
    return Sampling(options.temperature, options.top_p, options.top_k, max_tokens)
