"""Where engines are placed on machines of one to eight GPUs, which this machine does not have."""

from collections.abc import Callable

import pytest

import classroom_rl.memory.placement
import classroom_rl.memory.report
import classroom_rl.memory.trainer_job
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.environment import PHASES
from classroom_rl.errors import ConfigError
from classroom_rl.launch.commands import GpuSplit, gpu_split, split_arguments
from classroom_rl.memory.budget import CUDA_CONTEXT, GIB, Launch, ModelShape, engine_memory
from classroom_rl.memory.placement import Gpus, Placement, engine_job, idle_gpus, place_engines
from classroom_rl.memory.report import place_on_this_machine, report
from classroom_rl.memory.sources import NotEstimated, awake_together, read_shape
from classroom_rl.rollout.environment import models_on_engines, phases_of
from tests.conftest import ROOT
from tests.memory.conftest import QWEN3_SHAPE
from tests.support.configs import training

SIZE = 80 * GIB
# Public figures of these models' config.json.
SHAPES = {
    "unsloth/Qwen3-4B-Instruct-2507": QWEN3_SHAPE,
    "Qwen/Qwen2.5-7B-Instruct": ModelShape(7_615_616_512, 28, 3584, 18944, 28, 4, 128, 152064, (None,) * 28),
    "meta-llama/Llama-3.1-8B-Instruct": ModelShape(8_030_261_248, 32, 4096, 14336, 32, 8, 128, 128256, (None,) * 32),
    "Qwen/Qwen2.5-1.5B-Instruct": ModelShape(1_543_714_304, 28, 1536, 8960, 12, 2, 128, 151936, (None,) * 28),
    "Qwen/Qwen2.5-3B-Instruct": ModelShape(3_085_938_688, 36, 2048, 11008, 16, 2, 128, 151936, (None,) * 36),
}
CONFIGS = sorted(path.stem for path in (ROOT / "config/train_rl").glob("*.yaml"))
NOT_SPLIT = [f"{role}_model.vllm.number_of_gpus_per_instance=1" for role in ("teacher", "student", "judge")]
NO_SHARES = [f"{role}_model.vllm.gpu_memory_utilization=null" for role in ("teacher", "student", "judge")]


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(name: str) -> ModelShape:
        return SHAPES[name] if name in SHAPES else read_shape(name)

    for module in (classroom_rl.memory.placement, classroom_rl.memory.trainer_job):
        monkeypatch.setattr(module, "read_shape", known)
    for name in ("refuse_context", "why_unfit"):  # they would look for each model on the Hub, again and again
        monkeypatch.setattr(classroom_rl.memory.report, name, lambda *_: None)


def models(**options: VllmConfig) -> dict[str, ModelConfig]:
    return {role: ModelConfig("unsloth/Qwen3-4B-Instruct-2507", vllm) for role, vllm in options.items()}


def free(count: int, held: int = 0, size: int = SIZE) -> Gpus:
    return Gpus(size, (held,) * count)


def check_fits(placement: Placement, gpus: Gpus, phases: tuple) -> None:
    """On each GPU the shares of engines that are awake together fit beside what the trainer holds, and each share
    holds weights, logits and a conversation."""
    for gpu in range(gpus.count):
        engines = placement.on(gpu)
        for group in awake_together(list(engines), phases).values():
            shares = sum(engines[role].vllm.gpu_memory_utilization for role in group)
            assert shares * gpus.size + len(engines) * CUDA_CONTEXT + gpus.held[gpu] <= gpus.size
        for role, model in engines.items():
            try:
                memory = engine_memory(engine_job(model))
            except NotEstimated:
                continue
            assert memory.cache(int(model.vllm.gpu_memory_utilization * gpus.size)) >= memory.conversation, role


def test_two_models_get_a_copy_on_every_gpu_and_equal_room_for_conversations() -> None:
    vllm = VllmConfig(max_length=6144, max_num_seqs=64)
    placement = place_engines(models(teacher=vllm, student=vllm), (), free(4))
    assert not placement.apart
    for model in placement.models.values():
        assert (model.vllm.gpus, model.vllm.data_parallel_size) == ([0, 1, 2, 3], 4)
        # Half of 80 GiB less headroom and two contexts: (80 − 4 − 1.56) / 2 = 37.22 GiB, rounded down to hundredths.
        assert model.vllm.gpu_memory_utilization == 0.465
    check_fits(placement, free(4), ())


def test_a_longer_context_gets_more_of_the_cache() -> None:
    placement = place_engines(
        models(teacher=VllmConfig(max_length=2048), student=VllmConfig(max_length=8192)), (), free(1)
    )
    rooms = []
    for model in placement.models.values():
        memory = engine_memory(engine_job(model))
        rooms.append(memory.cache(int(model.vllm.gpu_memory_utilization * SIZE)) // memory.conversation)
    assert abs(rooms[0] - rooms[1]) <= 3 and min(rooms) > 20


def test_what_the_configuration_says_stays() -> None:
    configured = VllmConfig(gpus=[2], gpu_memory_utilization=0.3)
    placed = place_engines(models(teacher=configured, student=VllmConfig(), judge=VllmConfig()), (), free(4)).models
    assert (placed["teacher"].vllm.gpus, placed["teacher"].vllm.gpu_memory_utilization) == ([2], 0.3)
    assert placed["student"].vllm.gpus == [0, 1, 2, 3]
    assert placed["student"].vllm.gpu_memory_utilization <= (80 - 4 - 3 * 0.78 - 24) / 80 / 2
    split = place_engines(models(teacher=VllmConfig(number_of_gpus_per_instance=2)), (), free(5)).models["teacher"]
    assert (split.vllm.gpus, split.vllm.data_parallel_size) == ([0, 1, 2, 3], 2)
    one = place_engines(models(teacher=VllmConfig(data_parallel_size=1)), (), free(4)).models["teacher"]
    assert one.vllm.gpus == [0]


def test_models_that_do_not_fit_side_by_side_get_gpus_of_their_own() -> None:
    small = 16 * GIB  # weights 7.5, logits 0.1, a conversation of 8192 tokens 1.1: two do not fit beside 4 of headroom
    placement = place_engines(models(teacher=VllmConfig(), student=VllmConfig()), (), free(3, size=small))
    assert placement.apart
    assert [model.vllm.gpus for model in placement.models.values()] == [[0, 1], [2]]
    check_fits(placement, free(3, size=small), ())
    config = training("--config-name", "language_tutor")
    assert idle_gpus(config, placement, free(3, size=small), with_trainer=False) == []
    judged = place_engines(
        models(teacher=VllmConfig(), student=VllmConfig(), judge=VllmConfig()), (), free(3, size=small)
    )
    assert judged.apart
    (dialogue, judging) = idle_gpus(config, judged, free(3, size=small), with_trainer=False)
    assert dialogue.startswith("GPU 2 idle in the dialogue phase: teacher and student")
    assert judging.startswith("GPUs 0, 1 idle in the judging phase: judge")
    assert "generation.schedule=phased" in dialogue


def test_engines_of_other_phases_share_a_gpu_that_would_not_hold_them_together() -> None:
    small = 24 * GIB
    roles = models(teacher=VllmConfig(), student=VllmConfig(), judge=VllmConfig())
    assert place_engines(roles, (), free(3, size=small)).apart
    phased = place_engines(roles, PHASES, free(3, size=small))
    assert not phased.apart and all(model.vllm.gpus == [0, 1, 2] for model in phased.models.values())
    check_fits(phased, free(3, size=small), PHASES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (VllmConfig(number_of_gpus_per_instance=4), "needs 4 GPUs, but the server sees 2"),
        (VllmConfig(data_parallel_size=3), "needs 3 GPUs, but the server sees 2"),
        (VllmConfig(gpus=[0, 5]), "needs 6 GPUs, but the server sees 2"),
        (VllmConfig(gpus=[0, 1], number_of_gpus_per_instance=2, data_parallel_size=2), r"but 2 × 2 different GPUs"),
        (VllmConfig(gpus=[1, 1]), r"gpus is \[1, 1\], but 2 × 1 different GPUs"),
    ],
)
def test_gpus_that_are_not_there_are_refused_before_anything_loads(options: VllmConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_engines(models(teacher=options), (), free(2))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_on_every_machine_is_planned_or_refused_with_what_to_change(
    name: str, count: int, gpus: Callable[..., None], qwen: str
) -> None:
    """Server and trainer share the GPUs; the trainer has a process on each, with ZeRO-3."""
    gpus(count, mebibytes=SIZE // 2**20)
    config = training("--config-name", name, "train.gradient_checkpointing=true")
    if config.teacher_model.adapter is not None:  # its shape is read from the model, which the Hub has
        config.teacher_model.model_name_or_path = qwen
    budget = report(config, lambda: Launch(processes=count, zero_stage=3))
    if name == "7b" and count < 4:
        assert budget.placement is None
        assert any(
            "needs 4 GPUs" in refusal and "number_of_gpus_per_instance" in refusal for refusal in budget.refusals
        )
        return
    is_tiny = config.teacher_model.vllm.data_parallel_size == 1  # a toy model that needs no second copy
    idle = [line for line in budget.lines if "idle in the dialogue" in line]
    assert bool(idle) == (is_tiny and count > 1), "a GPU without an engine is named"
    for gpu in range(1 if is_tiny else count):
        assert budget.placement.on(gpu), f"GPU {gpu} has no engine"
    if not budget.refusals:
        check_fits(budget.placement, free(count), tuple(phases_of(config)))
    for refusal in budget.refusals:
        assert "Ways out: " in refusal or "Raise " in refusal


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_papers_configuration_needs_no_shares(count: int, gpus: Callable[..., None]) -> None:
    """Three engines at vLLM's usual half of a GPU would be refused. Each copy of the four gets its share."""
    config = training("--config-name", "7b", *NO_SHARES, *NOT_SPLIT, "generation.schedule=phased")
    gpus(count)
    engines = models_on_engines(config, reward_weights(config))
    placement = place_on_this_machine(config, engines)
    assert all(model.vllm.gpus == list(range(count)) for model in placement.models.values())
    check_fits(placement, free(count, size=81559 * 2**20), tuple(phases_of(config)))


def test_a_trainer_on_the_same_gpus_gets_its_room_unless_nothing_would_fit(gpus: Callable[..., None]) -> None:
    gpus(1)
    names = ["teacher_model.vllm.gpu_memory_utilization=null", "student_model.vllm.gpu_memory_utilization=null"]
    shares = {}
    for colocate in ("null", "false"):
        config = training("--config-name", "language_tutor", *names, f"generation.colocate={colocate}")
        placement = place_on_this_machine(config, models_on_engines(config, reward_weights(config)))
        shares[colocate] = [model.vllm.gpu_memory_utilization for model in placement.models.values()]
    # AdamW in 8 bits beside bfloat16: the trainer of a 4B model always holds about 38 of 80 GiB.
    assert sum(shares["null"]) <= 0.45 < 0.9 < sum(shares["false"]) < 0.95


def test_gpus_without_a_process_of_the_trainer_are_named() -> None:
    config = training("--config-name", "language_tutor", "train.gpu_memory_gib=80", "teacher_model.vllm.gpus=[0,1,2,3]")
    lines = report(config, lambda: Launch(zero_stage=2)).lines
    (idle,) = [line for line in lines if "idle" in line]
    assert "GPUs 1, 2, 3 idle while the trainer steps" in idle and "--num_processes 4" in idle
    apart = report(config, lambda: Launch(processes=4, zero_stage=3), server_gpus=4).lines
    (idle,) = [line for line in apart if "idle" in line]
    assert "train.max_staleness=1 does both at a time" in idle


def test_the_plan_is_printed_and_handed_to_the_server_as_overrides() -> None:
    config: TrainRLConfig = training("--config-name", "language_tutor", "train.gpu_memory_gib=80")
    budget = report(config, lambda: Launch(processes=4, zero_stage=3))
    start = budget.lines.index("placement on 4 GPUs of 80.00 GiB:")
    assert budget.lines[start + 1].startswith("  GPU 0-3   teacher 32.0 GiB (0.4); student 32.0 GiB (0.4); trainer ")
    assert "teacher_model.vllm.gpus=[0,1,2,3]" in budget.placement.overrides
    again = training("--config-name", "language_tutor", *budget.placement.overrides)
    assert again.student_model.vllm.data_parallel_size == 4 and again.teacher_model.vllm.gpu_memory_utilization == 0.4


# GPUs of each program's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "count", "apart", "split"),
    [
        ([], 8, False, None),
        ([], 8, True, GpuSplit((0, 1, 2, 3), (4, 5, 6, 7))),
        ([], 1, True, None),
        (["--server-gpus", "0-5"], 8, False, GpuSplit((0, 1, 2, 3, 4, 5), (6, 7))),
        (["--trainer-gpus=0,2"], 4, False, GpuSplit((1, 3), (0, 2))),
        (["--server-gpus", "0", "--trainer-gpus", "1-2"], 0, False, GpuSplit((0,), (1, 2))),
    ],
)
def test_gpus_are_divided_by_flags_or_where_both_programs_work_at_once(
    flags: list[str], count: int, apart: bool, split: GpuSplit | None
) -> None:
    arguments = split_arguments([*flags, "--config-name", "mine", "seed=1"])
    assert arguments.hydra == ["--config-name", "mine", "seed=1"] and arguments.accelerate == []
    assert gpu_split(arguments.gpus, count, apart) == split


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--server-gpus", "all"], "it is a list of GPUs, such as 0-3"),
        (["--server-gpus"], "without a value"),
        (["--server-gpus", "0-3", "--trainer-gpus", "3-5"], "each needs GPUs of its own"),
        (["--server-gpus", "0-7"], "--trainer-gpus none"),
        (["--server-gpus", "0", "--trainer-gpus", "9"], "this machine has 8"),
    ],
)
def test_a_division_that_cannot_be_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gpu_split(split_arguments(flags).gpus, 8, apart=False)


def test_a_program_sees_its_gpus_among_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    split = GpuSplit((0, 1), (2, 3))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert split.environment(split.trainer) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert split.environment(split.trainer) == {"CUDA_VISIBLE_DEVICES": "6,7"}
