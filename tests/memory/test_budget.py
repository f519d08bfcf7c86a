"""Tests of the memory budget against numbers computed by hand for a model of known shape."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch.cli import main as launcher
from classroom_rl.memory.budget import (
    GIB,
    EngineJob,
    Launch,
    ModelShape,
    Part,
    TrainerJob,
    engine_memory,
    total,
    trainer_memory,
)
from classroom_rl.memory.report import moments, report, show
from classroom_rl.memory.sources import NotEstimated, launch_of_environment, launch_of_flags, read_shape
from tests.conftest import ROOT

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# Embedding (tied to the head) 151936 × 2560 = 388,956,160. A layer: queries 2560 × 4096, keys and values
# 2 × 2560 × 1024, result 4096 × 2560, MLP 3 × 2560 × 9728, norms 2 × 2560 + 2 × 128: 100,930,816. Last norm 2560.
PARAMETERS = 388_956_160 + 36 * 100_930_816 + 2_560
assert PARAMETERS == 4_022_468_096


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return write_config(tmp_path / "Qwen3-4B", {})


def write_config(folder: Path, changes: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B | changes))
    return str(folder)


def job(shape: ModelShape, launch: Launch, **changes) -> TrainerJob:
    """A training in bfloat16 with paged_adamw_8bit, a reference model, gradient checkpointing, and micro-batches of
    2 × 8192 tokens."""
    defaults = {"number_bytes": 2, "state_bytes": 2, "reference": True, "checkpointing": True, "tokens": 16384}
    return TrainerJob(shape=shape, launch=launch, **(defaults | changes))


def sizes(parts) -> dict[str, int]:
    return {part.name: part.size for part in parts}


# The shape of a model -----------------------------------------------------------------------------------------------


def test_a_models_shape_is_read_without_its_weights(qwen):
    assert read_shape(qwen) == ModelShape(
        parameters=4_022_468_096,
        layers=36,
        hidden=2560,
        mlp=9728,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=151936,
        windows=(None,) * 36,
        normed_heads=True,
    )


def test_windows_and_experts_count(tmp_path):
    mixture = {"model_type": "qwen3_moe", "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 16}
    assert read_shape(write_config(tmp_path / "mixture", mixture | {"num_hidden_layers": 2})).mlp == 8 * 768
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 4096}
    sliding = read_shape(write_config(tmp_path / "sliding", kinds | {"use_sliding_window": True}))
    assert sliding.windows == (4096, None)
    full = engine_memory(
        EngineJob(read_shape(write_config(tmp_path / "full", {"num_hidden_layers": 2})), 2, 1, 8192, 1)
    )
    assert engine_memory(EngineJob(sliding, 2, 1, 8192, 1)).conversation == full.conversation * 3 // 4
    assert engine_memory(EngineJob(sliding, 2, 1, 4096, 1)).conversation == full.conversation // 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("runs/of/nobody", "there is no folder runs/of/nobody"),
        ({"model_type": "no-such-kind"}, "no-such-kind"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
    ],
)
def test_what_cannot_be_reckoned_is_said(name, reason, tmp_path):
    with pytest.raises(NotEstimated, match=reason):
        read_shape(name if isinstance(name, str) else write_config(tmp_path / "model", name))


# The trainer --------------------------------------------------------------------------------------------------------

CONTEXT = 536_870_912
CHECKPOINTS = 3_019_898_880  # 36 layers × 2560 × 2 bytes × 16384 tokens
# A layer, in bytes per token: its norms 2 × (4 + 2) × 2560 = 30,720, those of the heads (4 + 2) × (4096 + 1024) =
# 30,720, inputs of projections 2 × 2 × 2560 = 10,240, attention 4 × 2 × 4096 = 32,768, MLP 4 × 2 × 9728 = 77,824:
# 182,272.
LAYER = 2_986_344_448  # × 16384 tokens
HEAD = 268_435_456 + 1_555_824_640 + 167_772_160  # 4096 × 32768 × 2; 388,956,160 × 4; 16384 × 2560 × 4


def test_one_process_with_zero_2(qwen):
    memory = trainer_memory(job(read_shape(qwen), Launch(1, zero_stage=2)))
    assert sizes(memory.held) == {
        "weights (16 bit)": 8_044_936_192,
        "master weights (32 bit)": 16_089_872_384,
        "optimizer states": 8_044_936_192,
        "reference model (16 bit)": 8_044_936_192,
        "CUDA context": CONTEXT,
    }
    assert sizes(memory.backward) == {
        "gradients": 8_044_936_192,
        "ZeRO's gradient bucket": 1_000_000_000,
        "activations kept (checkpoints)": CHECKPOINTS,
        "one layer again, or output head": LAYER,
    }
    assert sizes(memory.step) == {"gradients": 8_044_936_192, "gradients (32 bit)": 16_089_872_384}


def test_zero_3_splits_everything_over_four_processes(qwen):
    memory = trainer_memory(job(read_shape(qwen), Launch(4, zero_stage=3)))
    assert sizes(memory.held) == {
        "weights (16 bit)": 2_011_234_048,
        "master weights (32 bit)": 4_022_468_096,
        "optimizer states": 2_011_234_048,
        "reference model (16 bit)": 2_011_234_048,
        "CUDA context": CONTEXT,
    }
    assert sizes(memory.backward) == {
        "gradients": 2_011_234_048,
        "ZeRO's gradient bucket": 1_000_000_000,
        "weights gathered for a layer": 777_912_320,  # the head's matrix in 16 bits
        "activations kept (checkpoints)": CHECKPOINTS,
        "one layer again, or output head": LAYER,
    }
    # A share has 1,005,617,024 numbers; ZeRO-3 steps with 1,000,000,000 at a time.
    assert sizes(memory.step) == {"gradients": 2_011_234_048, "gradients (32 bit)": 4_000_000_000}


def test_fsdp2_splits_everything_over_four_processes_in_32_bits(qwen):
    memory = trainer_memory(job(read_shape(qwen), Launch(4, fsdp=True)))
    assert sizes(memory.held) == {
        "weights (32 bit)": 1_005_617_024 * 4,
        "optimizer states": 1_005_617_024 * 2,
        "reference model (32 bit)": 1_005_617_024 * 4,
        "CUDA context": CONTEXT,
    }
    assert sizes(memory.step) == {"gradients": 1_005_617_024 * 4}


def test_zero_1_and_2_split_the_master_weights_but_not_the_weights(qwen):
    first, second = (trainer_memory(job(read_shape(qwen), Launch(4, zero_stage=stage))) for stage in (1, 2))
    assert sizes(first.held) == sizes(second.held)
    assert sizes(first.held)["weights (16 bit)"] == sizes(first.held)["reference model (16 bit)"] == 8_044_936_192
    assert sizes(first.held)["master weights (32 bit)"] == 4_022_468_096
    assert sizes(first.backward)["gradients"] == 8_044_936_192 == 4 * sizes(second.backward)["gradients"]


def test_without_deepspeed_every_process_holds_all_in_32_bits(qwen):
    memory = trainer_memory(job(read_shape(qwen), Launch(2)))
    assert sizes(memory.held) == {
        "weights (32 bit)": 16_089_872_384,
        "optimizer states": 10_378_673_152,  # 2 × 3,633,511,936, and 8 × 388,956,160 of the embedding
        "reference model (32 bit)": 16_089_872_384,
        "CUDA context": CONTEXT,
    }
    assert sizes(memory.backward) == {
        "gradients": 16_089_872_384,
        "gradient buckets of DDP": 16_089_872_384,
        "autocast's copies of weights": 8_044_936_192,
        "activations kept (checkpoints)": 2 * CHECKPOINTS,
        "one layer again, or output head": LAYER,
    }


def test_in_32_bits_deepspeed_has_master_weights_all_the_same(qwen):
    alone, split = (
        trainer_memory(job(read_shape(qwen), launch, number_bytes=4, state_bytes=8, reference=False))
        for launch in (Launch(1), Launch(2, zero_stage=3))
    )
    assert sizes(alone.held)["optimizer states"] == 8 * PARAMETERS
    assert "autocast's copies of weights" not in sizes(alone.backward)
    assert sizes(split.held) == {
        "weights (32 bit)": 8_044_936_192,
        "master weights (32 bit)": 8_044_936_192,
        "optimizer states": 16_089_872_384,
        "CUDA context": CONTEXT,
    }


def test_without_checkpoints_every_layers_activations_stay(qwen):
    memory = trainer_memory(job(read_shape(qwen), Launch(1, zero_stage=2), checkpointing=False))
    assert sizes(memory.backward)["activations"] == 36 * LAYER and sizes(memory.backward)["output head"] == HEAD


def test_the_larger_of_layer_and_head_counts(qwen):
    memory = trainer_memory(job(read_shape(qwen), Launch(1, zero_stage=2), tokens=1024))
    # 1024 × 182,272 = 186,646,528 is less than 1024 × 32768 × 2 + 1,555,824,640 + 1024 × 2560 × 4.
    assert sizes(memory.backward)["one layer again, or output head"] == 67_108_864 + 1_555_824_640 + 10_485_760


def test_what_is_offloaded_is_not_on_the_gpu(qwen):
    offload = Launch(4, zero_stage=3, optimizer_on_host=True, weights_on_host=True)
    memory = trainer_memory(job(read_shape(qwen), offload, reference=False))
    assert sizes(memory.held) == {"CUDA context": CONTEXT} and memory.step == ()
    assert "gradients" not in sizes(memory.backward)


# The engines --------------------------------------------------------------------------------------------------------


def test_an_engines_weights_and_cache(qwen):
    memory = engine_memory(EngineJob(read_shape(qwen), number_bytes=2, gpus=1, max_length=8192, max_num_seqs=256))
    assert memory.weights == 8_044_936_192
    assert memory.sampling == 155_582_464  # 256 × 151936 × 4
    assert memory.conversation == 1_207_959_552  # 2 × 36 layers × 8 heads × 128 × 2 bytes = 147,456; × 8192 tokens
    assert memory.cache(20 * GIB) == 20 * GIB - 8_044_936_192 - 155_582_464


def test_several_gpus_share_an_engine_by_heads(qwen):
    shared = [engine_memory(EngineJob(read_shape(qwen), 2, gpus, 8192, 256)) for gpus in (4, 16)]
    assert shared[0].weights == 2_011_234_048 and shared[0].conversation == 1_207_959_552 // 4
    assert shared[1].conversation == 1_207_959_552 // 8, "a GPU has at least one of the 8 heads"


# Together -----------------------------------------------------------------------------------------------------------


def config(model: str, *overrides: str) -> TrainRLConfig:
    engine = "{dtype: auto, max_length: 8192, max_num_seqs: 256, gpu_memory_utilization: 0.25}"
    arguments = [
        f"teacher_model={{model_name_or_path: {model}, vllm: {engine}}}",
        f"student_model={{model_name_or_path: {model}, vllm: {engine}}}",
        "train.dtype=bfloat16",
        "train.optimizer=paged_adamw_8bit",
        "train.beta=0.001",
        "train.gradient_checkpointing=true",
        "train.per_device_train_batch_size=2",
        "generation.max_tokens_in_conversation=8192",
    ]
    return load(TrainRLConfig, "train_rl", [*arguments, *overrides], check_train_rl)


def test_a_shared_gpu_is_fullest_in_the_rollout_and_else_each_counts_for_itself(qwen):
    trainer = trainer_memory(job(read_shape(qwen), Launch(1, zero_stage=2)))
    held = 8_044_936_192 + 16_089_872_384 + 2 * 8_044_936_192 + CONTEXT
    backward = 8_044_936_192 + 1_000_000_000 + CHECKPOINTS + LAYER
    step = 8_044_936_192 + 16_089_872_384
    engines = [Part("engines", 40 * GIB), Part("contexts", 2 * CONTEXT)]
    shared = {name: total(parts) for name, parts in moments(trainer, engines, None).items()}
    assert shared == {
        "rollout": held + 40 * GIB + 2 * CONTEXT,
        "backward pass": held + backward + 2 * CONTEXT,
        "optimizer step": held + step + 2 * CONTEXT,
    }
    apart = {name: total(parts) for name, parts in moments(trainer, engines, False).items()}
    assert apart == {"engines": 40 * GIB + 2 * CONTEXT, "backward pass": held + backward, "optimizer step": held + step}


def test_what_cannot_fit_is_refused_and_fits_when_it_is_split(qwen):
    planned = config(qwen, "train.gpu_memory_gib=48")
    refused = report(planned, lambda: Launch(1, zero_stage=2))
    assert [refusal.split(":")[0] for refusal in refused.refusals] == [
        f"A GPU of 48.00 GiB cannot hold what the {moment} needs"
        for moment in ("rollout", "backward pass", "optimizer step")
    ]
    # held 37.96, 32-bit gradients 14.98, 16-bit gradients 7.49, contexts of two engines 1 GiB
    assert "needs: 61.44 GiB, most of it master weights (32 bit) 14.98 GiB, gradients (32 bit)" in refused.refusals[2]
    assert "zero3_4GPU.yaml" in refused.refusals[2]
    with pytest.raises(ConfigError, match="A GPU of 48.00 GiB cannot hold"):
        show(refused)
    assert report(planned, lambda: Launch(4, zero_stage=3)).refusals == []
    assert report(config(qwen), lambda: Launch(1, zero_stage=2)).refusals == [], "no limit is known"


def test_a_cache_too_small_for_one_conversation_is_refused(qwen):
    student = "student_model.vllm.gpu_memory_utilization"
    # Weights 7.492, logits 0.145, a conversation 1.125: 8.762 of 80 GiB is a share of 0.1096.
    tight, enough = (
        report(config(qwen, "train.gpu_memory_gib=80", f"{student}={share}"), None) for share in (0.109, 0.11)
    )
    assert enough.refusals == []
    assert len(tight.refusals) == 1
    assert "engine of the student needs 8.76 GiB" in tight.refusals[0]
    assert "may take 8.72 GiB of the GPU's 80.00 GiB" in tight.refusals[0]
    assert f"Raise {student} (0.109)" in tight.refusals[0]


def test_engines_that_ask_for_more_than_the_gpu_are_refused(qwen):
    overrides = ("train.gpu_memory_gib=80", "teacher_model.vllm.gpu_memory_utilization=0.8")
    refusals = report(config(qwen, *overrides), None).refusals
    assert len(refusals) == 1 and "what the engines needs: 85.00 GiB" in refusals[0]


def test_with_phases_the_engines_awake_together_count_and_the_others_on_the_host(qwen, tmp_path):
    """Shares of teacher, student and judge: 0.3, 0.2, 0.6. Dialogue 0.5, judging 0.6, solutions 0.2. Weights of each:
    4,022,468,096 × 2 bytes = 7.49 GiB."""
    (tmp_path / "rule.txt").write_text("{{ problem }} {{ conversation }}")
    shares = {"teacher": 0.3, "student": 0.2, "judge": 0.6}
    overrides = [f"{role}_model.vllm.gpu_memory_utilization={share}" for role, share in shares.items()]
    overrides += ["judge_model.vllm.dtype=auto", "judge_model.vllm.max_length=8192", "train.gpu_memory_gib=80"]
    overrides += [f"judge_model.model_name_or_path={qwen}", "generation.number_judge_attempts=1"]
    overrides += [f"generation.judges_rules_prompts_paths={{pedagogical_eval: {tmp_path / 'rule.txt'}}}"]
    together = report(config(qwen, *overrides), None)
    assert "what the engines needs: 89.50 GiB" in together.refusals[0]
    assert "set generation.schedule=phased" in together.refusals[0]
    apart = report(config(qwen, *overrides, "generation.schedule=phased"), None)
    assert apart.refusals == []
    assert found_in(apart.lines, "  engines  ") == "49.50 GiB"  # 0.6 × 80, and three CUDA contexts of half a GiB
    assert found_in(apart.lines, "weights of the engines") == "22.48 GiB", "all of them sleep while a trainer steps"
    alone = report(config(qwen, *overrides, "generation.schedule=phased", "generation.colocate=false"), None)
    assert found_in(alone.lines, "weights of the engines") == "14.98 GiB", "two of three sleep"
    tight = [*overrides, "generation.schedule=phased", "judge_model.vllm.gpu_memory_utilization=1.0"]
    assert "engines of the judging (1 of the GPU) 80.00 GiB" in report(config(qwen, *tight), None).refusals[0]


def found_in(lines: list[str], name: str) -> str:
    return next(line for line in lines if name in line).rpartition("  ")[2].strip()


def test_a_model_that_is_not_there_is_said_and_refuses_nothing(qwen):
    found = report(config(qwen, "train.gpu_memory_gib=80", "teacher_model.model_name_or_path=runs/of/nobody"), Launch)
    assert "trainer: not reckoned: there is no folder runs/of/nobody" in found.lines
    assert "engine of the teacher: runs/of/nobody: not reckoned: there is no folder runs/of/nobody" in found.lines
    assert found.refusals == []


# How the trainer is started -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "launch"),
    [
        (["--config_file", "config/deepspeed/1GPU.yaml"], Launch(1, 2)),
        (["--config_file", "config/deepspeed/zero2_4GPU.yaml"], Launch(4, 2)),
        (["--config_file", "config/deepspeed/zero3_4GPU.yaml"], Launch(4, 3)),
        (["--config_file", "config/deepspeed/zero3_4GPU.yaml", "--num_processes=8", "--zero_stage", "2"], Launch(8, 2)),
        (["--config_file", "config/fsdp/4GPU.yaml"], Launch(4, fsdp=True)),
        (["--config_file", "config/deepspeed/1GPU.yaml", "--offload_optimizer_device", "cpu"], Launch(1, 2, True)),
    ],
)
def test_the_launch_is_what_accelerate_makes_of_its_flags(flags, launch):
    assert launch_of_flags(flags) == launch


def test_the_launch_is_what_accelerate_told_this_process(tmp_path):
    assert launch_of_environment({}) == Launch(1)
    told = {"WORLD_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    assert launch_of_environment(told) == Launch(4, 3)
    assert launch_of_environment(told | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}) == Launch(
        4, 3, False, True
    )
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}))
    assert launch_of_environment(told | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == Launch(4, 1, True)
    fsdp = {"WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert launch_of_environment(fsdp) == Launch(4, fsdp=True)
    for other in ({"FSDP_VERSION": "1"}, {"FSDP_OFFLOAD_PARAMS": "true"}):
        with pytest.raises(NotEstimated, match="FSDP"):
            launch_of_environment(fsdp | other)


def dry_run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, program, *arguments, "dry_run=true"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_programs_and_launcher_print_it_below_the_configuration(qwen, capsys):
    models = [f"{role}_model.model_name_or_path={qwen}" for role in ("teacher", "student")]
    fits = ["teacher_model.vllm.gpu_memory_utilization=0.3", "student_model.vllm.gpu_memory_utilization=0.3"]
    server = dry_run("vllm_server.py", *models, *fits, "train.gpu_memory_gib=80")
    assert server.returncode == 0, server.stderr
    assert yaml.safe_load(server.stdout)["train"]["gpu_memory_gib"] == 80.0
    assert "# engine of the student: " in server.stdout and "ZeRO" not in server.stdout
    trainer = dry_run("train_rl.py", *models, *fits, "train.gpu_memory_gib=80")
    assert trainer.returncode == 2 and "Traceback" not in trainer.stderr
    assert "without DeepSpeed" in trainer.stdout and "error: A GPU of 80.00 GiB cannot hold" in trainer.stderr
    launch = ["--config-name", "quickstart", *models, *fits, "train.gpu_memory_gib=80", "dry_run=true"]
    launch += ["train.gradient_checkpointing=true", "train.dtype=bfloat16", "--config_file"]
    assert launcher([*launch, "config/deepspeed/zero3_4GPU.yaml"]) == 0
    assert "4 × GPU, ZeRO-3; micro-batches of 16 × 1024 tokens" in capsys.readouterr().out
    more = ["train.max_tokens_per_micro_batch=3000", "train.publish_through=memory", "train.keep_published_policies=1"]
    assert launcher([*launch, "config/deepspeed/zero3_4GPU.yaml", *more]) == 0
    printed = capsys.readouterr().out
    assert "micro-batches of 3000 tokens" in printed
    published = f"{2 * 2 * PARAMETERS / GIB:.2f} GiB"
    assert any(
        re.fullmatch(rf"#  +2 × published weights \(/dev/shm\) +{published}", line) for line in printed.splitlines()
    )
    several = ["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "10.0.0.1"]
    assert launcher([*launch, "config/deepspeed/zero3_4GPU.yaml", *several, *more]) == 2
    assert "launched on 2: set train.publish_through=disk" in capsys.readouterr().err
    assert launcher([*launch, "config/deepspeed/1GPU.yaml"]) == 2
