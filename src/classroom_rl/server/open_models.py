"""Chooses and loads the engine, API client or embedded judge of each role."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from classroom_rl.config.base import EnvironmentConfig, GenerationConfig
from classroom_rl.config.checks import check_environment
from classroom_rl.config.models import ApiModelConfig, JudgeModelConfig, ModelConfig
from classroom_rl.config.values import EMBEDDED_JUDGES, EMBEDDED_SUPERVISORS, PHASED, RULES, is_script
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi
from classroom_rl.environments.toy_language.scripted_teacher import ScriptedTeacher
from classroom_rl.errors import ConfigError
from classroom_rl.judges.model_judge import ApiChatEngine, EngineReplies, KeptReplies, ModelJudge
from classroom_rl.judges.moves.stored import load_readers
from classroom_rl.judges.readings import MessageReaders
from classroom_rl.judges.rule_judge import RulesJudge
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.memory.report import place_on_this_machine
from classroom_rl.memory.sources import gpu_is_there
from classroom_rl.models.four_bit import write_base
from classroom_rl.models.pretrained import check_context, check_model, load_tokenizer
from classroom_rl.rollout.chat_template import ReplyFrame, roles_as_rendered, set_variables
from classroom_rl.rollout.engine import ChatEngine, EmbeddedJudge, Judge
from classroom_rl.rollout.environment import POLICY_ROLE, Roles, environment_of, models_on_engines
from classroom_rl.rollout.reviews import Supervisor
from classroom_rl.supervision.embedded import embedded_supervisor, review_by_rules
from classroom_rl.supervision.model_supervisor import ModelSupervisor

if TYPE_CHECKING:
    from classroom_rl.config.evaluation import EvalConfig
    from classroom_rl.config.train_rl import TrainRLConfig
    from classroom_rl.engines.vllm.engine import VllmEngine
    from classroom_rl.engines.vllm.engine_base import EngineProcess

logger = logging.getLogger(__name__)
JUDGE_CALLS_NAME = "judge_calls.sqlite"
"""The judge's ledger. Every role behind an API has one, `<role>_calls.sqlite`, with a spending cap of its own."""


async def open_roles(
    config: "TrainRLConfig | EvalConfig", reward_weights: Mapping[str, float], run_folder: Path
) -> Roles:
    """Load the models of all roles, and open the clients of those behind an API.

    Raises:
        EngineFailure: if a model cannot be loaded; the engines of the others are shut down.
        DataError: if a prompt template or the trained move classifiers are missing or wrong.
        ConfigError: if a model folder is missing or damaged, an API key is missing, or the engines need more memory
            than their GPU has.
        StorageError: if the ledger of paid requests in `run_folder` cannot be used.
    """
    generation, environment = config.generation, environment_of(config)
    models = environment.models(config, reward_weights)
    engine_models = models_on_engines(config, reward_weights)
    apis = {
        role: ChatApi(model, CallLedger(run_folder / f"{role}_calls.sqlite", _cap_usd(model, generation)), role)
        for role, model in models.items()
        if model.is_remote
    }
    readers = open_readers(generation)
    engine_models = dict(place_on_this_machine(config, engine_models).models)
    check_environment(config)
    _check_models(engine_models)
    teacher = engine_models.get(POLICY_ROLE)
    if teacher is not None and getattr(teacher, "load_in_4bit", False):  # evaluations have no such key
        logger.info("the engine serves %s in 16 bits, rounded to the trainer's 4", teacher.model_name_or_path)
        await asyncio.to_thread(write_base, Path(config.served_teacher), teacher.model_name_or_path, config.train.dtype)
        engine_models[POLICY_ROLE] = replace(teacher, model_name_or_path=config.served_teacher)
    engines = await _start_engines(engine_models, generation, config.seed)  # the phased schedule leaves them asleep
    chat_engines = {role: ApiChatEngine(models[role], api) for role, api in apis.items()} | engines
    if is_script(config.teacher_model.model_name_or_path):
        chat_engines[POLICY_ROLE] = ScriptedTeacher(config.teacher_model.model_name_or_path)
    chat_engines.pop("judge", None)  # these two have interfaces of their own
    chat_engines.pop("supervisor", None)
    judge = _judge(config, engines, apis, readers)
    return Roles(chat_engines, engines, apis, judge, _supervisor(config, engines, apis, readers))


def replies_of(
    role: str, model: ApiModelConfig, engines: Mapping[str, ChatEngine], apis: Mapping[str, ChatApi]
) -> KeptReplies | EngineReplies:
    """Where the replies of a role's model come from: its API, or else its engine."""
    api = apis.get(role)
    return EngineReplies(engines[role], role) if api is None else KeptReplies(model, api.ledger, api)


def _judge(
    config: "TrainRLConfig | EvalConfig",
    engines: Mapping[str, "EngineProcess"],
    apis: Mapping[str, ChatApi],
    readers: MessageReaders | None,
) -> Judge | EmbeddedJudge | None:
    """Create the judge; None if nothing is judged."""
    model, generation = config.judge_model, config.generation
    if "judge" in engines or "judge" in apis:
        replies = replies_of("judge", model, engines, apis)
        return ModelJudge(model, generation.judge_rules, generation.max_tokens_per_judge_attempt, replies)
    if generation.judge_rules and model.model_name_or_path in EMBEDDED_JUDGES:
        return embedded_judge(model.model_name_or_path, readers)
    return None


def _supervisor(
    config: "TrainRLConfig | EvalConfig",
    engines: Mapping[str, "EngineProcess"],
    apis: Mapping[str, ChatApi],
    readers: MessageReaders | None,
) -> Supervisor | None:
    model = getattr(config, "supervisor_model", None)  # evaluations have no such key
    if model is None:
        return None
    rules = environment_of(config).review_by_rules or partial(review_by_rules, readers=readers)
    if model.model_name_or_path in EMBEDDED_SUPERVISORS:
        return embedded_supervisor(model.model_name_or_path, rules)
    replies = replies_of("supervisor", model, engines, apis)
    return ModelSupervisor(model, config.generation.supervisor, replies, rules=rules)


async def open_chat_engine(role: str, model: ModelConfig, generation: EnvironmentConfig, seed: int) -> "VllmEngine":
    """Load one generating model on an engine, outside of any environment.

    Args:
        role: its name in log and error messages.

    Raises:
        ConfigError: if the model's folder is missing or damaged.
        EngineFailure: if it cannot be loaded.
    """
    _check_models({role: model})
    return (await _start_engines({role: model}, generation, seed))[role]


def open_readers(generation: EnvironmentConfig) -> MessageReaders | None:
    """Load the trained move classifiers of a configuration; None if it names none. Raises as `load_readers` does."""
    path = getattr(generation, "readers_path", None)  # only the classroom's configuration has the key
    if path is None:
        return None
    readers = load_readers(Path(path))
    for label, trust in readers.trust.items():
        logger.info("the reader of %s: %s (%s)", label, trust, trust.by)
    return readers


def embedded_judge(name: str, readers: MessageReaders | None = None) -> EmbeddedJudge:
    """Create the embedded judge of this name, one of `EMBEDDED_JUDGES`. `rules` judges by rules and uses the trained
    move classifiers, if given; `rubric` is the toy judge, which needs none: the toy language's grammar decides."""
    return RulesJudge(readers) if name == RULES else RubricJudge()


def open_second_judge(
    judge: JudgeModelConfig, generation: GenerationConfig, ledger_path: Path, role: str
) -> tuple[Judge | EmbeddedJudge, ChatApi | None]:
    """Create a judge in addition to the training judge, embedded or behind an API, and its API client, if it has one.

    Args:
        ledger_path: the file for its ledger of paid requests.
        role: its name in log and error messages.

    Raises:
        ConfigError: if its API key is missing.
        DataError: if the trained move classifiers are missing or damaged.
        StorageError: if the ledger cannot be used.
    """
    if judge.model_name_or_path in EMBEDDED_JUDGES:
        return embedded_judge(judge.model_name_or_path, open_readers(generation)), None
    api = ChatApi(judge, CallLedger(ledger_path, judge.max_cost_usd), role)
    rules, max_tokens = generation.judges_rules_prompts_paths, generation.max_tokens_per_judge_attempt
    return ModelJudge(judge, rules, max_tokens, KeptReplies(judge, api.ledger, api)), api


def _cap_usd(model: ApiModelConfig, generation: EnvironmentConfig) -> float | None:
    """Return a server's share of the spending cap. The servers of a run cannot see each other's spending."""
    servers = len(generation.server_urls) if generation.server_urls is not None else 1
    return None if model.max_cost_usd is None else model.max_cost_usd / servers


_WITHOUT_FRAME = ("reward", "judge", "supervisor")
"""Models that continue no dialogue: it does not matter how their chat template frames a reply."""


def _check_models(models: dict[str, ModelConfig]) -> None:
    for role, model in models.items():
        key, name = f"{role}_model.model_name_or_path", model.model_name_or_path
        check_model(key, name)
        tokenizer = load_tokenizer(key, name)
        try:
            set_variables(tokenizer, model.vllm.chat_template_kwargs)
            if role in _WITHOUT_FRAME:
                continue
            ReplyFrame(tokenizer)
            rendered_roles = roles_as_rendered(tokenizer, ["system"])
        except ConfigError as error:
            raise ConfigError(f"{key}: {name}: {error}") from error
        if role == "teacher" and rendered_roles != ["system"]:
            logger.info("the chat template of %s takes no system message alone: the prompt goes as the user's", name)
    for role, model in models.items():  # last: the context matters only if the models passed the other checks
        check_context(f"{role}_model.vllm.max_length", model.model_name_or_path, model.vllm.max_length)


async def _start_engines(
    models: dict[str, ModelConfig], generation: EnvironmentConfig, seed: int
) -> dict[str, "EngineProcess"]:
    """Start an engine for every role. Without a GPU they start concurrently, because most of a start is the import of
    Python modules, which keeps one core per process busy. On GPUs they start one after the other, because vLLM measures
    the free memory while it loads; with the phased schedule too, so that each can be put to sleep before the next."""
    engines: dict[str, EngineProcess] = {}
    starts = [_start_engine(role, model, generation, seed, engines) for role, model in models.items()]
    try:
        if generation.schedule == PHASED or gpu_is_there():
            for start in starts:
                await start
        else:
            await _start_concurrently(starts)
    except BaseException:
        for start in starts:
            start.close()  # coroutines that never ran; closing the others has no effect
        for engine in engines.values():
            engine.shutdown()
        raise
    return {role: engines[role] for role in models}


async def _start_engine(
    role: str, model: ModelConfig, generation: EnvironmentConfig, seed: int, engines: dict[str, "EngineProcess"]
) -> None:
    """Start one engine and put it into `engines`, so that the caller can shut it down."""
    from classroom_rl.engines.vllm.engine import VllmEngine
    from classroom_rl.engines.vllm.reward_engine import RewardEngine

    started = time.monotonic()
    logger.info("loading the %s: %s", role, model.model_name_or_path)
    engine_class = RewardEngine if role == "reward" else VllmEngine
    engines[role] = await engine_class.start(model, seed, generation)
    logger.info("the %s is loaded (%.0f s)", role, time.monotonic() - started)
    if generation.schedule == PHASED:
        await _sleep_after_loading(engines[role], generation)


async def _start_concurrently(starts: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all starts concurrently. The first that fails cancels the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except BaseExceptionGroup as failures:
        first_failure = failures.exceptions[0]
        raise first_failure from first_failure.__cause__


async def _sleep_after_loading(engine: "VllmEngine", generation: EnvironmentConfig) -> None:
    """Put an engine to sleep, so that the next one has room to load."""
    health = engine.health()
    if health.gpus and not health.can_sleep:
        raise ConfigError(
            f"generation.schedule is {PHASED}, but vLLM has no sleep mode on this kind of GPU, so {health.model} "
            "cannot give its memory back between the phases: set generation.schedule=concurrent."
        )
    await engine.sleep(generation.load_weights_timeout_s)
