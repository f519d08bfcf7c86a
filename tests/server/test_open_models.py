"""Opening the models of a configuration."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT
from classroom_rl.config.models import ApiModelConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.errors import ConfigError
from classroom_rl.server.open_models import open_roles
from tests.support.configs import loaded
from tests.support.scripted_engine import ScriptedEngine

TWO = ["http://127.0.0.1:8005", "http://127.0.0.1:8006"]


def test_servers_share_the_cap(tmp_path, generation) -> None:
    config = EvalConfig(generation=generation)
    config.student_model = ApiModelConfig(base_url="http://127.0.0.1:9/v1", max_cost_usd=3.0)
    config.teacher_model = ApiModelConfig(base_url="http://127.0.0.1:9/v1")
    generation.judges_rules_prompts_paths = {}
    for urls, cap in ((None, 3.0), (TWO, 1.5)):
        generation.server_urls = urls
        roles = asyncio.run(open_roles(config, {}, tmp_path))
        assert (roles.apis["student"].ledger.cap_usd, roles.apis["teacher"].ledger.cap_usd) == (cap, None)
        roles.shutdown()


def test_the_documented_trial_without_a_gpu_opens(
    world: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of docs/start.md and the reward of docs/configure.md, word for word but for the models."""
    (yaml,) = re.findall(r"(?<=```yaml\n)defaults: \[quickstart, _self_\]\n.*?(?=```)", doc("start"), re.DOTALL)
    (reward,) = re.findall(r"(?<=```python\n)(?:(?!```).)*?def brevity.*?(?=```)", doc("configure"), re.DOTALL)
    (tmp_path / "trial.yaml").write_text(yaml.replace("runs/quickstart/sft/model", str(world / "blank")))
    (tmp_path / "my_rewards.py").write_text(reward)
    (tmp_path / "my_problems.csv").write_text("problem,answer\n" + "What is 2 + 2?,4\n" * 24)
    monkeypatch.syspath_prepend(tmp_path)

    async def start(models, *_):
        return {role: ScriptedEngine(tokenizer, str) for role in models}

    monkeypatch.setattr("classroom_rl.server.open_models._start_engines", start)
    config = loaded("train_rl", f"--config-dir={tmp_path}", "--config-name=trial")
    roles = asyncio.run(open_roles(config, reward_weights(config), tmp_path))
    assert roles.judge is None and set(roles.engines) == {"teacher", "student"}


CHANNELS = (
    "{% for each in messages %}<|start|>{{ each.role }}{% if each.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ each.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_a_model_that_only_judges_needs_no_frame_of_replies(world: Path, tmp_path: Path) -> None:
    """gpt-oss, which begins its messages with a channel, can judge; it cannot be a student."""
    shutil.copytree(world / "blank", tmp_path / "oss")
    (tmp_path / "oss/chat_template.jinja").write_text(CHANNELS)
    models = {"teacher": world / "blank", "student": world / "blank", "judge": tmp_path / "oss"}
    for student, refusal in ((models["student"], "vllm.max_length is 8192"), (models["judge"], "student.*channel")):
        models["student"] = student  # the context is checked last, and too long for these models
        overrides = [f"{role}_model.model_name_or_path={folder}" for role, folder in models.items()]
        config = loaded("train_rl", "--config-name=7b", "judge_model.use_openrouter=false", *overrides)
        with pytest.raises(ConfigError, match=refusal):
            asyncio.run(open_roles(config, reward_weights(config), tmp_path))


def doc(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
