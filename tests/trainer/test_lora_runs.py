"""LoRA in whole runs: real engines, real trainers in one process and two, a resumed run, and the answers to clients."""

import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from classroom_rl.models.lora import adapter_shape
from classroom_rl.models.policy_folder import MARKER, policy_path
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import read_records
from tests.conftest import ROOT, RunningServer, running_server
from tests.models.test_lora import loaded, scores
from tests.server.test_openai_routes import SAY_HELLO, scored_chat
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says
from tests.trainer.test_several_processes import launch, metrics_of, move_run

pytestmark = pytest.mark.full  # whole runs of server and trainer, minutes

_STEPS = 3
_LORA = ["teacher_model.lora={enable: true, rank: 6, alpha: 24, dropout: 0.05}"]
_TRAINING = [
    "train.beta=0.05",
    "train.learning_rate=5e-3",
    "train.per_device_train_batch_size=4",
    f"train.max_steps={_STEPS}",
    "logging.save_steps=1",
]


def judge(body: dict, nth: int) -> Behaviour:
    """Says something else of each conversation, so that there is something to learn."""
    share = zlib.crc32(body["messages"][0]["content"].encode()) % 11 / 10
    scores = {"task_final_score": share, "forward_progression_score": 0.5, "overall_momentum_score": 5}
    return says(json.dumps(scores))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The overrides for a judge that is never content with all conversations alike."""
    rule = tmp_path_factory.mktemp("judge") / "judge.txt"
    rule.write_text("{{ problem }}\n{% for turn in conversation %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}")
    with judge_endpoint(judge) as endpoint:
        yield [
            "judge_model.model_name_or_path=judge",
            f"judge_model.base_url={endpoint.url}",
            f"generation.judges_rules_prompts_paths={{pedagogical_eval: {rule}}}",
        ]


@pytest.fixture(scope="module")
def server(world: Path, judged: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(world, tmp_path_factory.mktemp("lora"), *judged, *_LORA) as running:
        yield running


@pytest.fixture(scope="module")
def trained(server: RunningServer) -> RunningServer:
    """After a run of its own with ZeRO-2 in one process."""
    done = launch("1CPU", [*server.overrides, *_TRAINING])
    assert done.returncode == 0, done.stderr[-4000:]
    return server


def with_adapter(world: Path, adapter: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()


def differences(model: torch.nn.Module, run_folder: Path, step: int, processes: int = 1) -> torch.Tensor:
    """The engine's log-probs of a batch's sampled tokens minus those of transformers."""
    per_record = []
    for rank in range(processes):
        for record in read_records(run_folder / "rollouts" / f"step_{step:06d}-{rank}.parquet"):
            logps = scores(model, record.prompt_ids, record.completion_ids)
            mask = torch.tensor(record.mask).bool()
            per_record.append(logps[mask] - torch.tensor(record.logprobs)[mask])
    return torch.cat(per_record)


def assert_run_is_right(run_folder: Path, world: Path, processes: int) -> None:
    """Engine and trainer agree on every step, and what is left is the adapter and the model with it."""
    lines = metrics_of(run_folder)
    assert [line["step"] for line in lines] == list(range(1, _STEPS + 1))
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.002 for line in lines)
    assert all(line["sampling/sampling_logp_difference/max"] < 0.02 for line in lines)
    assert all(line["reward_std"] > 0.01 for line in lines)
    # The last batch was sampled with an adapter that had learned for all steps but one.
    last = differences(with_adapter(world, policy_path(run_folder, _STEPS - 1)), run_folder, _STEPS - 1, processes)
    assert last.abs().max() < 0.02 and last.abs().mean() < 0.002
    base = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    assert differences(base, run_folder, _STEPS - 1, processes).abs().mean() > 0.005
    published = load_file(policy_path(run_folder, _STEPS) / "adapter_model.safetensors")
    saved = load_file(run_folder / "adapter" / "adapter_model.safetensors")
    assert set(saved) == set(published) and all(torch.equal(saved[name], published[name]) for name in saved)
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    merged = AutoModelForCausalLM.from_pretrained(run_folder / "model")
    ids = torch.randint(0, merged.config.vocab_size, (4, 40))
    with torch.no_grad():
        adapter_logits, merged_logits, base_logits = (
            model.eval()(ids).logits for model in (with_adapter(world, run_folder / "adapter"), merged, base)
        )
    assert torch.allclose(merged_logits, adapter_logits, atol=1e-4) and not torch.allclose(
        merged_logits, base_logits, atol=1e-2
    )
    assert not list(run_folder.glob("*.unfinished"))


def test_a_run_over_http_trains_the_adapter_that_the_engine_samples_with(trained: RunningServer, world: Path) -> None:
    assert_run_is_right(trained.run_folder, world, processes=1)
    lines = metrics_of(trained.run_folder)
    assert abs(lines[0]["kl"]) < 1e-6 < 1e-5 < lines[-1]["kl"], "the reference is the model without the adapter"
    assert (trained.run_folder / "model" / "README.md").is_file()
    run_id = (trained.run_folder / "run_id").read_text()
    assert trained.client.health().policy == PolicyVersion(run_id, _STEPS)


def test_published_are_the_adapters_bytes_alone(trained: RunningServer, world: Path) -> None:
    lora = loaded(*_LORA).teacher_model.lora
    parameters = adapter_shape("teacher_model.lora", str(world / "blank"), lora).parameters
    for folder in (trained.run_folder / "policy").iterdir():
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert set(sizes) == {"adapter_model.safetensors", "adapter_config.json", MARKER}
        assert 4 * parameters < sizes["adapter_model.safetensors"] < 4 * parameters + 20_000
        assert sizes["adapter_model.safetensors"] < (world / "blank" / "model.safetensors").stat().st_size / 2
    checkpoint = trained.run_folder / "checkpoints" / f"checkpoint-{_STEPS}"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not list(checkpoint.glob("model*.safetensors"))


def test_openais_api_answers_with_the_adapter(trained: RunningServer, world: Path) -> None:
    """Prompts are scored, too, which an engine with room for an adapter in its output head would die of."""
    client = openai.OpenAI(base_url=f"{trained.client.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["teacher", str(world / "blank")]
    served_by, logprobs, prompt_ids, ids = scored_chat(client, seed=3)
    assert served_by == str(trained.client.health().policy)
    model = with_adapter(world, policy_path(trained.run_folder, _STEPS))
    difference = scores(model, prompt_ids, ids) - logprobs
    assert difference.abs().max() < 0.02 and difference.abs().mean() < 0.002
    base = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    assert (scores(base, prompt_ids, ids) - logprobs).abs().mean() > 0.005
    all_ids = prompt_ids + ids
    echoed = client.completions.create(
        model="teacher", prompt=all_ids, max_tokens=1, temperature=0, logprobs=1, echo=True
    ).choices[0]
    echoed_logprobs = torch.tensor(echoed.logprobs.token_logprobs[1 : len(all_ids)])
    assert torch.allclose(echoed_logprobs, scores(model, all_ids[:1], all_ids[1:]), atol=0.02)
    streamed = client.chat.completions.create(
        model="teacher", messages=SAY_HELLO, temperature=0, max_tokens=8, stream=True
    )
    assert len(list(streamed)) > 2 and trained.client.health().status == "ok"


def test_a_resumed_run_goes_on_with_its_adapter_and_a_new_server_takes_it_up(
    trained: RunningServer, world: Path, judged: list[str], tmp_path: Path
) -> None:
    """Both are started again on a copy of the run; the server has the last adapter before any trainer comes."""
    folder = tmp_path / "run"
    shutil.copytree(trained.run_folder, folder, ignore=shutil.ignore_patterns("*.lock"))
    journal = (folder / "journal.jsonl").read_text()
    (folder / "journal.jsonl").write_text(journal.replace(str(trained.run_folder), str(folder)))
    before = load_file(policy_path(folder, _STEPS) / "adapter_model.safetensors")
    with running_server(world, folder, *judged, *_LORA) as new_server:
        assert new_server.client.health().policy == trained.client.health().policy
        client = openai.OpenAI(base_url=f"{new_server.client.url}/v1", api_key="none")
        _, logprobs, prompt_ids, ids = scored_chat(client, seed=3)
        model = with_adapter(world, policy_path(folder, _STEPS))
        assert torch.allclose(scores(model, prompt_ids, ids), logprobs, atol=0.02)
        done = launch("1CPU", [*new_server.overrides, *_TRAINING, f"train.max_steps={_STEPS + 1}"])
        assert done.returncode == 0, done.stderr[-4000:]
        assert new_server.client.health().policy.version == _STEPS + 1
        changed = [f"train.max_steps={_STEPS + 2}", "teacher_model.lora.rank=4"]
        refused = launch("1CPU", [*new_server.overrides, *_TRAINING, *changed])
        assert refused.returncode == 2 and "teacher_model.lora.rank was 6 and is 4 now" in refused.stderr
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, _STEPS + 2))
    taken_up = load_file(policy_path(folder, _STEPS) / "adapter_model.safetensors")
    assert all(torch.equal(taken_up[name], before[name]) for name in before), "published again before the next batch"
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any(not torch.equal(saved[name], before[name]) for name in before)


def test_a_trainer_without_lora_is_told_before_its_first_batch(trained: RunningServer, tmp_path: Path) -> None:
    move_run(trained.run_folder, tmp_path)
    try:
        done = launch("1CPU", [*trained.overrides, *_TRAINING, "teacher_model.lora.enable=false"])
        assert done.returncode == 2
        assert "teacher_model.lora.enable is true there and false here" in done.stderr
    finally:
        (tmp_path / "refused").mkdir()
        move_run(trained.run_folder, tmp_path / "refused")
        move_run(tmp_path, trained.run_folder)


@pytest.mark.parametrize("accelerate_config", ["zero2_2CPU", "zero3_2CPU"])
def test_two_processes_publish_and_leave_the_adapter(
    accelerate_config: str, server: RunningServer, world: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    move_run(server.run_folder, tmp_path / "other")
    done = launch(accelerate_config, [*server.overrides, *_TRAINING])
    move_adapter_run(server.run_folder, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_run_is_right(tmp_path, world, processes=2)


@pytest.mark.parametrize("accelerate_config", [None, "1CPU", "zero3_2CPU"])
def test_16_bits_beside_the_adapter(
    accelerate_config: str | None, server: RunningServer, world: Path, tmp_path: Path
) -> None:
    """With bfloat16 the model's own weights are bfloat16, without DeepSpeed and with it; gradients are recomputed."""
    (tmp_path / "other").mkdir()
    move_run(server.run_folder, tmp_path / "other")
    overrides = [*server.overrides, *_TRAINING, "train.dtype=bfloat16", "train.gradient_checkpointing=true"]
    if accelerate_config is None:
        command = [sys.executable, "train_rl.py", *overrides]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    else:
        done = launch(accelerate_config, overrides)
    move_adapter_run(server.run_folder, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = metrics_of(tmp_path)
    assert all(line["mismatch/mean_abs_logprob_diff"] < 0.05 for line in lines)  # the engine is float32
    dtype = torch.float32 if accelerate_config is None else torch.bfloat16  # DeepSpeed's float32 masters are its own
    assert {weight.dtype for weight in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()} == {
        dtype
    }
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert merged.dtype == torch.bfloat16
    ids = torch.randint(0, merged.config.vocab_size, (4, 40))
    with torch.no_grad():
        expected = with_adapter(world, tmp_path / "adapter")(ids).logits
        assert (merged.float()(ids).logits - expected).abs().mean() < 0.02


def move_adapter_run(source: Path, target: Path) -> None:
    move_run(source, target)
    if (source / "adapter").exists():
        shutil.move(source / "adapter", target / "adapter")
