"""The memory budget of a supervised training, against numbers worked out by hand."""

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.memory.budget import Launch, trainer_memory
from classroom_rl.memory.report import report, rows_of_micro_batch
from classroom_rl.memory.sources import read_shape
from tests.memory.test_budget import config, found_in, job, qwen, sizes  # noqa: F401

RUBRIC = "supervisor_model.model_name_or_path=rubric"
SAME_STEP = (RUBRIC, "train.corrections.mode=same_step")
CREDIT = "train.turn_credit.mode=immediate"
PROMPT = "generation.supervisor.prompt_path=prompt_templates/supervisors/language_tutor.txt"


@pytest.mark.parametrize(
    ("overrides", "processes", "rows"),
    [
        ((), 1, 2),
        ((RUBRIC, CREDIT), 1, 2),
        ((RUBRIC, "train.corrections.mode=pass"), 1, 2),
        ((RUBRIC, "train.corrections.mode=pass", "train.corrections.pass_batch_size=7"), 1, 7),
        ((RUBRIC, "train.corrections.mode=pass", "train.corrections.pass_batch_size=1"), 1, 2),
        ((RUBRIC, "train.corrections.mode=none", "train.corrections.pass_batch_size=7"), 1, 2),
        ((*SAME_STEP, "train.corrections.weight=0"), 1, 2),
        # 64 conversations in 32 micro-batches of 2, and as many corrections: 128 / 32.
        (SAME_STEP, 1, 4),
        # 10 corrections: 74 / 32 = 2.3, rounded up, because all micro-batches are padded to one size.
        ((*SAME_STEP, "train.corrections.rows_per_batch=10"), 1, 3),
        # 200: 264 / 32 = 8.25.
        ((*SAME_STEP, "train.corrections.rows_per_batch=200"), 1, 9),
        # 16 conversations on each of 4 processes, in 8 micro-batches, and 16 corrections: 32 / 8.
        (SAME_STEP, 4, 4),
        # One correction at least on each process, although 2 are fewer than the processes: 17 / 8.
        ((*SAME_STEP, "train.corrections.rows_per_batch=2"), 4, 3),
    ],
)
def test_the_rows_of_a_micro_batch_at_its_largest(qwen, overrides, processes, rows):  # noqa: F811
    assert rows_of_micro_batch(config(qwen, *overrides), processes) == rows


def test_corrections_in_the_same_step_are_counted_and_said(qwen):  # noqa: F811
    """4 rows instead of 2, each of at most 8192 tokens: 32,768 tokens, twice 16,384."""
    planned = "train.gpu_memory_gib=80"
    plain, mixed = (
        report(config(qwen, planned, *more), lambda: Launch(1, zero_stage=2)) for more in ((), (*SAME_STEP, CREDIT))
    )
    memory = trainer_memory(job(read_shape(qwen), Launch(1, zero_stage=2), tokens=32_768))
    assert sizes(memory.backward)["activations kept (checkpoints)"] == 2 * 3_019_898_880
    assert found_in(plain.lines, "activations kept") == "2.81 GiB"
    assert found_in(mixed.lines, "activations kept") == "5.62 GiB"  # 36 layers × 2560 × 2 bytes × 32,768
    assert any("micro-batches of 2 × 8192 tokens" in line for line in plain.lines)
    assert any("micro-batches of 4 × 8192 tokens" in line for line in mixed.lines)
    (said,) = [line for line in mixed.lines if "at its largest" in line]
    assert said.strip() == "a micro-batch at its largest: 2 conversations and 2 corrections"
    assert not any("drafts" in line for line in mixed.lines)


def test_what_mixed_corrections_need_too_much_can_be_a_pass(qwen):  # noqa: F811
    planned = ("train.gpu_memory_gib=56", *SAME_STEP)
    refused = report(config(qwen, *planned), lambda: Launch(1, zero_stage=2)).refusals
    (backward,) = [each for each in refused if "what the backward pass needs" in each]
    assert "train.corrections.mode=pass, or lower train.corrections.rows_per_batch" in backward
    passes = report(config(qwen, *planned, "train.corrections.mode=pass"), lambda: Launch(1, zero_stage=2)).refusals
    assert not any("what the backward pass needs" in each for each in passes)


def test_passes_of_too_many_rows_can_have_fewer(qwen):  # noqa: F811
    planned = ("train.gpu_memory_gib=56", RUBRIC, "train.corrections.mode=pass", "train.corrections.pass_batch_size=8")
    refused = report(config(qwen, *planned), lambda: Launch(1, zero_stage=2)).refusals
    (backward,) = [each for each in refused if "what the backward pass needs" in each]
    assert "lower train.corrections.pass_batch_size" in backward


@pytest.mark.parametrize(
    ("more", "drafts"),
    [
        # 9 messages, of which the tutor writes 5.
        (("generation.supervisor.on_invalid=retry", "generation.supervisor.max_retries=2"), 10),
        (("generation.supervisor.on_invalid=replace",), 5),
    ],
)
def test_drafts_are_said_to_be_left_out(qwen, more, drafts):  # noqa: F811
    found = report(config(qwen, RUBRIC, CREDIT, "generation.max_turns=9", *more), lambda: Launch(1, zero_stage=2))
    assert any(f"not counted: rejected drafts, up to {drafts} more rows for each" in line for line in found.lines)
    assert any("micro-batches of 2 × 8192 tokens" in line for line in found.lines)


def test_a_supervisor_on_an_engine_is_a_role_like_the_others(qwen):  # noqa: F811
    engine = "{dtype: auto, max_length: 8192, max_num_seqs: 256, gpu_memory_utilization: 0.25}"
    supervisor = f"supervisor_model={{model_name_or_path: {qwen}, vllm: {engine}}}"
    planned = ("train.gpu_memory_gib=80", PROMPT)
    two = report(config(qwen, planned[0]), None)
    three = report(config(qwen, *planned, supervisor), None)
    # Shares of teacher and student 0.25 each, and CUDA contexts of half a GiB.
    assert found_in(two.lines, "  engines  ") == "41.00 GiB" and found_in(three.lines, "  engines  ") == "61.50 GiB"
    assert any(line.startswith("engine of the supervisor: ") for line in three.lines)
    # With phases it is awake in the dialogue, beside teacher and student.
    phased = report(config(qwen, *planned, supervisor, "generation.schedule=phased"), None)
    assert found_in(phased.lines, "  engines  ") == "61.50 GiB"
    remote = report(
        config(qwen, *planned, f"supervisor_model={{model_name_or_path: {qwen}, use_openrouter: true}}"), None
    )
    assert found_in(remote.lines, "  engines  ") == "41.00 GiB"
    small = supervisor.replace("0.25", "0.109")
    (refused,) = report(config(qwen, *planned, small), None).refusals
    assert (
        "engine of the supervisor needs 8.76 GiB" in refused
        and "supervisor_model.vllm.gpu_memory_utilization" in refused
    )


def test_where_every_message_is_a_row_an_episode_counts_as_many(qwen):  # noqa: F811
    """2 games of 24 decisions; in self-play, 5 sailors make them."""
    games = ("generation.max_turns=24", "train.per_device_train_batch_size=2", "train.corrections.mode=none")
    for more, rows in (((), 48), (("generation.self_play=true",), 240)):
        found = load(TrainRLConfig, "train_rl", ["--config-name", "marooned", *games, *more], check_train_rl)
        assert rows_of_micro_batch(found, 1) == rows
