"""vLLM's metrics of several engines in one process."""

from pathlib import Path
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.metrics.loggers import StatLoggerManager

from classroom_rl.engines.vllm.role_metrics import in_words, metrics_of, own_metrics


def test_the_metrics_of_each_role_outlive_the_start_of_the_next_engine(world: Path) -> None:
    """Also where two roles are played by the same model, whose metrics have the same labels otherwise."""
    config = AsyncEngineArgs(model=str(world / "blank"), max_model_len=256).create_engine_config()
    running = {}
    for number, role in enumerate(("teacher", "student", "reward"), 1):
        manager = StatLoggerManager(config, custom_stat_loggers=[own_metrics()])
        manager.stat_loggers[0].counter_generation_tokens[0].inc(number)  # behind it stand vLLM's own, if it logs
        running[role] = SimpleNamespace(logger_manager=manager)
    text = in_words({role: metrics_of(engine) for role, engine in running.items()}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    generated = {sample.labels["role"]: sample.value for sample in families["vllm:generation_tokens"].samples}
    assert generated == {"teacher": 1, "student": 2, "reward": 3}
    assert len(families) == text.count("# TYPE") > 20
    assert "vllm:" not in generate_latest().decode()
