"""What a budget shows and refuses, and that each program checks it before it loads anything."""

import logging

import pytest
import yaml

from classroom_rl.config.benchmark import BENCHMARKS
from classroom_rl.errors import ConfigError
from classroom_rl.launch import cli
from classroom_rl.memory.budget import GIB, Launch, Part, total, trainer_memory
from classroom_rl.memory.report import check_budget, moments, report, rows_of_micro_batch, show, show_evaluation_shares
from classroom_rl.memory.trainer_job import trainer_job
from tests.conftest import ROOT
from tests.memory.conftest import ADAPTER, PARAMETERS, job, size_of, small_training
from tests.support.configs import loaded, training
from tests.support.programs import run_program

ZERO_2 = Launch(1, zero_stage=2)
MEASURED = sorted({path.stem for path in (ROOT / "config/eval").glob("*.yaml")} - {*BENCHMARKS})
"""On a published benchmark nothing is played: the tutor's engine is alone on the GPU."""
PLANNED = "train.gpu_memory_gib=80"
RUBRIC = "supervisor_model.model_name_or_path=rubric"
SAME_STEP = (RUBRIC, "train.corrections.mode=same_step")
PASS = (RUBRIC, "train.corrections.mode=pass")


def roles_are(model: str, *roles: str) -> list[str]:
    return [f"{role}_model.model_name_or_path={model}" for role in roles or ("teacher", "student")]


def refusals(model: str, *overrides: str, launch: Launch | None = None) -> list[str]:
    budget = report(small_training(model, *overrides), None if launch is None else lambda: launch)
    return budget.refusals


# Moments and parts --------------------------------------------------------------------------------------------------


def test_a_shared_gpu_is_fullest_in_the_rollout_and_else_each_counts_for_itself():
    trainer = trainer_memory(job(ZERO_2))
    held, backward, step = (total(parts) for parts in (trainer.held, trainer.backward, trainer.step))
    engines = [Part("engines", 40 * GIB), Part("contexts", GIB)]
    assert {name: total(parts) for name, parts in moments(trainer, engines, None).items()} == {
        "rollout": held + 41 * GIB,
        "backward pass": held + backward + GIB,
        "optimizer step": held + step + GIB,
    }
    assert {name: total(parts) for name, parts in moments(trainer, engines, False).items()} == {
        "engines": 41 * GIB,
        "backward pass": held + backward,
        "optimizer step": held + step,
    }


def test_what_cannot_fit_is_refused_and_fits_when_it_is_split(qwen):
    planned = small_training(qwen, "train.gpu_memory_gib=48")
    refused = report(planned, lambda: ZERO_2)
    assert [refusal.split(":")[0] for refusal in refused.refusals] == [
        f"A GPU of 48.00 GiB cannot hold what the {moment} needs"
        for moment in ("rollout", "backward pass", "optimizer step")
    ]
    # held 38.24, 32-bit gradients 14.98, 16-bit gradients 7.49, contexts of two engines 1.56 GiB
    assert "needs: 62.28 GiB, most of it master weights (32 bit) 14.98 GiB, gradients (32 bit)" in refused.refusals[2]
    assert "zero3_4GPU.yaml" in refused.refusals[2] and "teacher_model.lora.enable=true" in refused.refusals[2]
    with pytest.raises(ConfigError, match="A GPU of 48.00 GiB cannot hold"):
        show(refused)
    assert report(planned, lambda: Launch(4, zero_stage=3)).refusals == []
    assert refusals(qwen, launch=ZERO_2) == [], "no limit is known"


def test_more_servers_than_processes_are_said_and_take_no_turns(qwen):
    urls = "generation.server_urls=[http://127.0.0.1:8005,http://127.0.0.1:8006]"
    lines = report(small_training(qwen, PLANNED, urls), lambda: ZERO_2).lines
    assert any(line.startswith("servers: 2 for 1 × trainer: each group") for line in lines)
    assert not any("servers: " in line for line in report(small_training(qwen, PLANNED), lambda: ZERO_2).lines)
    refused = report(small_training(qwen, PLANNED, urls, "generation.colocate=true"), lambda: ZERO_2).refusals
    assert any("only a server of its own takes turns" in refusal for refusal in refused)


def test_an_adapter_is_counted_and_not_advised(qwen):
    lora = ["teacher_model.lora={enable: true, rank: 20}", "teacher_model.vllm.dtype=bfloat16"]
    lines = report(small_training(qwen, PLANNED, *lora), lambda: ZERO_2).lines
    trainer = next(line for line in lines if line.startswith("trainer: "))
    assert f"4,022,468,096 parameters, an adapter of {ADAPTER * 20 // 16:,} learns, bfloat16" in trainer
    assert not any("reference" in line for line in lines)
    # vLLM has room for two adapters of rank 32.
    assert size_of(lines, "asleep: on the host") == f"{(PARAMETERS + 2 * 2 * ADAPTER) * 2 / GIB:.2f} GiB"
    too_small = refusals(qwen, "train.gpu_memory_gib=12", *lora, launch=ZERO_2)
    assert too_small and not any("lora" in refusal for refusal in too_small)


def test_a_strong_tutor_is_counted(qwen):
    lines = report(small_training(qwen, PLANNED, f"train.distillation.model={qwen}"), lambda: ZERO_2).lines
    assert size_of(lines, "strong tutor (16 bit)") == f"{2 * PARAMETERS / GIB:.2f} GiB"
    for options, expected in [([], False), (["kl=jsd"], True), (["top_k=5"], True)]:
        overrides = [f"train.distillation.{option}" for option in (f"model={qwen}", *options)]
        assert trainer_job(small_training(qwen, PLANNED, *overrides), ZERO_2).distributions == expected


def test_a_critic_with_a_layer_of_its_own_is_counted(qwen):
    """13,117,441 parameters: at 4 bytes 0.05 GiB."""
    masters = [
        size_of(report(small_training(qwen, PLANNED, *more), lambda: ZERO_2).lines, "master weights")
        for more in ([], ["train.ppo.head=mlp"], ["train.algorithm=ppo"], ["train.algorithm=ppo", "train.ppo.head=mlp"])
    ]
    assert masters == [f"{4 * PARAMETERS / GIB:.2f} GiB"] * 3 + [f"{4 * (PARAMETERS + 13_117_441) / GIB:.2f} GiB"]


def test_a_cache_too_small_for_one_conversation_is_refused(qwen):
    # Weights 7.492, logits 0.145, a conversation 1.125: 8.762 of 80 GiB is a share of 0.1096.
    student = "student_model.vllm.gpu_memory_utilization"
    assert refusals(qwen, PLANNED, f"{student}=0.11") == []
    (refused,) = refusals(qwen, PLANNED, f"{student}=0.109")
    assert "engine of the student needs 8.76 GiB" in refused
    assert "may take 8.72 GiB of the GPU's 80.00 GiB" in refused
    assert f"Raise {student} (0.109)" in refused


def test_with_phases_the_engines_awake_together_count_and_the_others_on_the_host(qwen, tmp_path):
    """Shares of teacher, student and judge: 0.3, 0.2, 0.6. Dialogue 0.5, judging 0.6, solutions 0.2. Weights of each:
    4,022,468,096 × 2 bytes = 7.49 GiB."""
    (tmp_path / "rule.txt").write_text("{{ problem }} {{ conversation }}")
    shares = {"teacher": 0.3, "student": 0.2, "judge": 0.6}
    judged = [
        *(f"{role}_model.vllm.gpu_memory_utilization={share}" for role, share in shares.items()),
        *("judge_model.vllm.dtype=auto", "judge_model.vllm.max_length=8192", *roles_are(qwen, "judge")),
        *("generation.number_judge_attempts=1", PLANNED),
        f"generation.judges_rules_prompts_paths={{pedagogical_eval: {tmp_path / 'rule.txt'}}}",
    ]
    (together,) = refusals(qwen, *judged)
    assert "what the engines needs: 90.34 GiB" in together and "set generation.schedule=phased" in together
    judged.append("generation.schedule=phased")
    apart = report(small_training(qwen, *judged), None)
    assert apart.refusals == []
    assert size_of(apart.lines, "  engines  ") == "50.34 GiB"  # 0.6 × 80, and three CUDA contexts of 0.78 GiB
    assert size_of(apart.lines, "weights of the engines") == "22.48 GiB", "all of them sleep while a trainer steps"
    alone = report(small_training(qwen, *judged, "generation.colocate=false"), None)
    assert size_of(alone.lines, "weights of the engines") == "14.98 GiB", "two of three sleep"
    tight = refusals(qwen, *judged, "judge_model.vllm.gpu_memory_utilization=1.0")
    assert "engines of the judging (1 of the GPU) 80.00 GiB" in tight[0]


def test_a_model_that_is_not_there_is_said_and_refuses_nothing(qwen):
    budget = report(small_training(qwen, PLANNED, *roles_are("runs/of/nobody", "teacher")), Launch)
    assert "trainer: not reckoned: there is no folder runs/of/nobody" in budget.lines
    assert "engine of the teacher: runs/of/nobody: not reckoned: there is no folder runs/of/nobody" in budget.lines
    assert budget.refusals == []


# Supervision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "processes", "rows"),
    [
        ((), 1, 2),
        (PASS, 1, 2),
        ((*PASS, "train.corrections.pass_batch_size=7"), 1, 7),
        ((*PASS, "train.corrections.pass_batch_size=1"), 1, 2),
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
def test_the_rows_of_a_micro_batch_at_its_largest(qwen, overrides, processes, rows):
    assert rows_of_micro_batch(small_training(qwen, *overrides), processes) == rows


@pytest.mark.parametrize(("more", "rows"), [((), 48), (("generation.self_play=true",), 240)])
def test_where_every_message_is_a_row_an_episode_counts_as_many(more, rows):
    """2 games of 24 decisions; in self-play, 5 sailors make them."""
    games = ("generation.max_turns=24", "train.per_device_train_batch_size=2", "train.corrections.mode=none")
    assert rows_of_micro_batch(training("--config-name", "marooned", *games, *more), 1) == rows


def test_corrections_in_the_same_step_are_counted(qwen):
    """4 rows instead of 2, each of at most 8192 tokens: 36 layers × 2560 × 2 bytes × 32,768."""
    lines = report(small_training(qwen, PLANNED, *SAME_STEP), lambda: ZERO_2).lines
    assert size_of(lines, "activations kept") == "5.62 GiB"
    assert any("micro-batches of 4 × 8192 tokens" in line for line in lines)


@pytest.mark.parametrize(
    ("corrections", "advice"),
    [
        (SAME_STEP, "train.corrections.mode=pass, or lower train.corrections.rows_per_batch"),
        ((*PASS, "train.corrections.pass_batch_size=8"), "lower train.corrections.pass_batch_size"),
        (PASS, None),
    ],
)
def test_too_many_corrections_at_a_time_are_refused_with_what_to_lower(qwen, corrections, advice):
    refused = refusals(qwen, "train.gpu_memory_gib=56", *corrections, launch=ZERO_2)
    backward = [refusal for refusal in refused if "what the backward pass needs" in refusal]
    assert len(backward) == (advice is not None) and all(advice in refusal for refusal in backward)


def test_a_supervisor_on_an_engine_is_a_role_like_the_others(qwen):
    options = "{dtype: auto, max_length: 8192, max_num_seqs: 256, gpu_memory_utilization: 0.25}"
    supervisor = f"supervisor_model={{model_name_or_path: {qwen}, vllm: {options}}}"
    planned = (PLANNED, "generation.supervisor.prompt_path=prompt_templates/supervisors/language_tutor.txt")
    remote = f"supervisor_model={{model_name_or_path: {qwen}, use_openrouter: true}}"
    # Shares of teacher and student 0.25 each, and CUDA contexts of 0.78 GiB each.
    for overrides, engines in (
        ((PLANNED,), "41.56 GiB"),
        ((*planned, remote), "41.56 GiB"),
        ((*planned, supervisor), "62.34 GiB"),
        ((*planned, supervisor, "generation.schedule=phased"), "62.34 GiB"),  # awake in the dialogue, as the others
    ):
        assert size_of(report(small_training(qwen, *overrides), None).lines, "  engines  ") == engines
    (refused,) = refusals(qwen, *planned, supervisor.replace("0.25", "0.109"))
    assert "engine of the supervisor needs 8.76 GiB" in refused
    assert "supervisor_model.vllm.gpu_memory_utilization" in refused


# The host -----------------------------------------------------------------------------------------------------------


def test_what_a_machine_cannot_hold_is_refused_where_it_would_run_and_told_elsewhere(qwen, machine, monkeypatch):
    """Two engines of 7.49 GiB sleep beside four processes that offload their optimizer to host memory."""
    launch = Launch(4, zero_stage=2, optimizer_on_host=True)
    # 4 processes of 1 GiB, 10 bytes for each parameter, 4 processes of engines, 14.985 of weights asleep
    needed = 8 * GIB + 10 * PARAMETERS + 4 * PARAMETERS
    machine(80, memory=60)
    planned = report(small_training(qwen, PLANNED), lambda: launch)
    (warning,) = [line for line in planned.lines if line.startswith("warning: A machine")]
    expected = f"A machine with 60.00 GiB of memory cannot hold what server and trainer need of it: {needed / GIB:.2f}"
    assert planned.refusals == [] and expected in warning
    assert "generation.colocate=false" in warning and "offload_optimizer_device" in warning
    local_budget = report(small_training(qwen), lambda: launch, (80 * GIB, "by nvidia-smi"))
    assert local_budget.refusals == [warning.removeprefix("warning: ")]
    machine(80, memory=61)
    assert report(small_training(qwen), lambda: launch, (80 * GIB, "by nvidia-smi")).refusals == []


def test_without_a_gpu_a_machine_too_small_is_a_warning_only(qwen, machine, caplog):
    machine(None, memory=8)
    with caplog.at_level(logging.WARNING):
        check_budget(small_training(qwen), lambda: ZERO_2, with_engines=False)
    assert "A machine with 8.00 GiB of memory cannot hold what server and trainer need of it" in caplog.text
    lines = report(small_training(qwen), lambda: ZERO_2).lines
    assert any("if all of it is on CPUs (this machine has 8.00 GiB)" in line for line in lines)


# Starts -------------------------------------------------------------------------------------------------------------

STARTS = {"server": (None, True), "trainer": (Launch, False), "launcher": (lambda: ZERO_2, True)}


@pytest.mark.parametrize("program", STARTS)
def test_a_start_looks_at_the_gpu_that_is_here_and_not_at_the_planned_one(qwen, machine, program):
    machine(8)
    with pytest.raises(ConfigError, match=r"8\.00 GiB"):
        check_budget(small_training(qwen, "train.gpu_memory_gib=800"), *STARTS[program])
    machine(800)
    check_budget(small_training(qwen, "train.gpu_memory_gib=8"), *STARTS[program])


def test_a_trainer_alone_on_its_gpu_is_not_charged_for_the_engines_of_a_server(qwen, machine):
    """Weights, states and gradients of 4 billion parameters take 67 GiB; the engines beside them would not fit."""
    machine(80)
    lora = ("train.optimizer=adamw_bnb_8bit", "train.beta=0", "teacher_model.lora.enable=true")
    check_budget(small_training(qwen, *lora), Launch, with_engines=False)
    with pytest.raises(ConfigError, match="A GPU of 80.00 GiB cannot hold what the (backward pass|optimizer step)"):
        check_budget(small_training(qwen, "train.optimizer=adamw_torch"), Launch, with_engines=False)


@pytest.mark.parametrize(
    "name",
    ["quickstart", "quickstart_ppo", "quickstart_online_dpo", "quickstart_supervised", "marooned", "small_tutor"],
)
def test_what_runs_on_a_small_cpu_today_is_not_refused(name, machine):
    machine(None, memory=4)
    for find_launch, with_engines in STARTS.values():
        check_budget(training("--config-name", name), find_launch, with_engines)


@pytest.mark.parametrize("program", ["train_rl.py", "vllm_server.py", "launcher"])
def test_the_programs_check_before_they_load(qwen, program, gpus, tmp_path, monkeypatch, capsys):
    gpus(1, mebibytes=4096)
    arguments = [*roles_are(qwen), f"logging.save_dir={tmp_path / 'run'}"]
    if program == "launcher":
        monkeypatch.setattr(cli, "launch", lambda *_: pytest.fail("something was started"))
        assert cli.main(["--config-name", "quickstart", *arguments]) == 2
        errors = capsys.readouterr().err
    else:
        result = run_program(program, *arguments)
        assert result.returncode == 2
        errors = result.stderr
    assert "4.00 GiB" in errors and not (tmp_path / "run").exists()


# Dry runs -----------------------------------------------------------------------------------------------------------


def test_programs_and_launcher_print_it_below_the_configuration(qwen, tmp_path, capsys):
    shares = [f"{role}_model.vllm.gpu_memory_utilization=0.3" for role in ("teacher", "student")]
    overrides = [*roles_are(qwen), *shares, PLANNED, "dry_run=true", f"logging.save_dir={tmp_path / 'run'}"]
    server = run_program("vllm_server.py", *overrides)
    assert server.returncode == 0, server.stderr
    assert yaml.safe_load(server.stdout)["train"]["gpu_memory_gib"] == 80.0
    assert "# engine of the student: " in server.stdout and "ZeRO" not in server.stdout
    trainer = run_program("train_rl.py", *overrides)
    assert trainer.returncode == 2 and "Traceback" not in trainer.stderr
    assert "without DeepSpeed" in trainer.stdout and "error: A GPU of 80.00 GiB cannot hold" in trainer.stderr

    overrides += ["train.gradient_checkpointing=true", "train.dtype=bfloat16", "--config-name", "quickstart"]
    split = ["--config_file", "config/deepspeed/zero3_4GPU.yaml"]
    assert cli.main([*overrides, *split]) == 0
    assert "4 × GPU, ZeRO-3; micro-batches of 16 × 1024 tokens" in capsys.readouterr().out
    more = ["train.max_tokens_per_micro_batch=3000", "train.publish_through=memory", "train.keep_published_policies=1"]
    assert cli.main([*overrides, *split, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("micro-batches of 3000 tokens" in line for line in lines)
    assert size_of(lines, "2 × published weights (/dev/shm)") == f"{2 * 2 * PARAMETERS / GIB:.2f} GiB"
    several = ["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "10.0.0.1"]
    assert cli.main([*overrides, *split, *several, *more]) == 2
    assert "launched on 2: set train.publish_through=disk" in capsys.readouterr().err
    assert cli.main([*overrides, "--config_file", "config/deepspeed/1GPU.yaml"]) == 2


def test_a_dry_run_refuses_shares_of_more_than_a_gpu_on_any_machine():
    """Also without a GPU and without train.gpu_memory_gib. If the memory is known, CUDA contexts count as well."""
    shares = "teacher_model.vllm.gpu_memory_utilization={} + student_model.vllm.gpu_memory_utilization=0.5"
    quick = ["--config-name", "quickstart", *shares.format(0.5).split(" + ")]
    crowded = [*quick, "teacher_model.vllm.gpu_memory_utilization=0.7"]
    for find_launch in (None, Launch):
        (refusal,) = report(training(*crowded), find_launch).refusals
        assert f"ask for 1.2 of it: {shares.format(0.7)}" in refusal
    assert report(training(*quick), Launch).refusals == [], "two halves on CPUs"
    (refusal,) = report(training(*quick, "train.gpu_memory_gib=24"), None).refusals
    assert "cannot hold what the engines needs" in refusal and shares.format(0.5) in refusal
    with pytest.raises(ConfigError, match=r"ask for 1\.2 of it"):
        show_evaluation_shares(loaded("eval", *crowded, "server_url=null"))


@pytest.mark.parametrize("name", MEASURED)
def test_the_engines_of_every_evaluation_fit_side_by_side(name, gpus, capsys):
    gpus(1)
    show_evaluation_shares(loaded("eval", "--config-name", name, "server_url=null"))
    assert "student_model.vllm.gpu_memory_utilization=" in capsys.readouterr().out
