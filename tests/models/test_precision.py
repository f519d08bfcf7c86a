"""The precision of a training: accelerate and DeepSpeed are set up for the one of `train.dtype`, or refused."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import ROOT, load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError
from classroom_rl.launch.cli import main as launcher
from classroom_rl.memory.sources import NotEstimated
from classroom_rl.models.precision import PRECISIONS, check_precision
from classroom_rl.trainer.arguments import training_arguments
from classroom_rl.trainer.model_loading import Policy, device_for_weights, load_policy, weights_dtype
from classroom_rl.trainer.run import train

TRAINED = sorted(path.stem for path in (ROOT / "config/train_rl").glob("*.yaml"))
LAUNCHED = sorted(path.stem for path in (ROOT / "config/deepspeed").glob("*.yaml"))
PAIRS = {(name, "1GPU") for name in TRAINED} | {(name, file) for name in ("quickstart", "7b") for file in LAUNCHED}
"""Every configuration under one launch, and one of either precision under every launch."""


def trained(*arguments: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", arguments, check_train_rl)


@pytest.fixture
def options_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainRLConfig], SimpleNamespace]:
    """The options that transformers' TrainingArguments would get; the class itself would set up the processes."""
    monkeypatch.setattr(
        "classroom_rl.trainer.arguments.TrainingArguments", lambda **options: SimpleNamespace(**options, n_gpu=1)
    )
    return lambda config: training_arguments(config, Path("runs/nowhere"))


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Sets the environment variables that `accelerate launch` with these flags sets for the trainer."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    def launch(flags: list[str]) -> None:
        arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args([*flags, "train_rl.py"]))
        arguments.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
        _, environment = prepare_deepspeed_cmd_env(arguments)
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            if name.startswith("ACCELERATE_"):
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("WORLD_SIZE", str(arguments.num_processes))

    return launch


@pytest.mark.parametrize(("name", "launched"), sorted(PAIRS))
def test_every_configuration_trains_in_its_precision_under_every_launch(
    name, launched, gpus, accelerated, options_of, monkeypatch, capsys
):
    from accelerate import DeepSpeedPlugin

    def nothing(name: str) -> None:
        raise NotEstimated(f"nobody is asked for {name}")

    gpus(4 if name == "7b" else 1)  # copies of engines on more of them need more memory than this machine has
    for module in ("placement", "trainer_job"):
        monkeypatch.setattr(f"classroom_rl.memory.{module}.read_shape", nothing)
    file = f"config/deepspeed/{launched}.yaml"
    config = trained("--config-name", name)
    assert launcher(["--config-name", name, "--config_file", file, "dry_run=true"]) == 0
    trainer = next(
        shlex.split(line) for line in capsys.readouterr().out.splitlines() if " classroom_rl.launch.train" in line
    )
    by_launcher = trainer[trainer.index("classroom_rl.launch.accelerate_launch") + 1 : trainer.index("--module")]
    precision = PRECISIONS[config.train.dtype]
    assert by_launcher == ["--config_file", file, "--mixed_precision", precision]
    for flags in (by_launcher, ["--config_file", file]):  # the second as typed by a user
        accelerated(flags)
        check_precision(config.train.dtype, os.environ)
        options = options_of(config)
        assert (options.bf16, options.fp16) == (precision == "bf16", precision == "fp16")
        assert options.optim == config.train.optimizer
        plugin = DeepSpeedPlugin()  # what transformers makes of it:
        effective = "bf16" if options.bf16 else "fp16" if options.fp16 else os.environ["ACCELERATE_MIXED_PRECISION"]
        plugin.set_mixed_precision(effective)
        enabled = {block: plugin.deepspeed_config[block]["enabled"] for block in ("bf16", "fp16")}
        assert enabled == {"bf16": precision == "bf16", "fp16": precision == "fp16"}
        assert plugin.zero_stage == (3 if "zero3" in launched else 2)


@pytest.mark.parametrize(
    ("told", "dtype", "message"),
    [
        ("bf16", "float32", r"mixed_precision bf16, but train.dtype is float32, for which it is no\..*=bfloat16\.$"),
        ("fp16", "bfloat16", r"mixed_precision fp16, but train.dtype is bfloat16, for which it is bf16\..*=float16\.$"),
        ("fp8", "bfloat16", r"mixed_precision fp8, .* set it to bf16\.$"),
    ],
)
def test_a_contradiction_of_precisions_is_refused_before_anything_is_loaded(
    told, dtype, message, tmp_path, monkeypatch, capsys
):
    """By the launcher, and by the trainer if accelerate was started by hand."""
    flags = ["--config_file", "config/deepspeed/1GPU.yaml", "--mixed_precision", told]
    assert launcher(["--config-name", "quickstart", f"train.dtype={dtype}", "dry_run=true", *flags]) == 2
    with pytest.raises(ConfigError, match=message) as refused:
        check_precision(dtype, {"ACCELERATE_MIXED_PRECISION": told})
    assert str(refused.value).partition(" mixed_precision ")[2] in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
    with pytest.raises(ConfigError, match=message):
        train(trained(f"train.dtype={dtype}", f"logging.save_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_accelerates_no_fits_every_dtype(dtype):
    for precision in (None, "no", PRECISIONS[dtype]):
        check_precision(dtype, {} if precision is None else {"ACCELERATE_MIXED_PRECISION": precision})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", None),
        ('{"bf16": {"enabled": "auto"}}', None),
        ('{"bf16": {"enabled": true}}', None),
        ('{"fp16": {"enabled": false}}', None),
        ('{"bf16": {"enabled": false}}', "bf16.enabled is false in .*zero.json, but train.dtype is bfloat16"),
        ('{"fp16": {"enabled": true}}', "fp16.enabled is true in .*zero.json, but train.dtype is bfloat16"),
        ("{", "deepspeed_config_file .*zero.json cannot be read"),
    ],
)
def test_a_deepspeed_file_of_another_precision_is_refused(text, message, tmp_path):
    (tmp_path / "zero.json").write_text(text, encoding="utf-8")
    environment = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "zero.json")}
    if message is None:
        check_precision("bfloat16", environment)
    else:
        with pytest.raises(ConfigError, match=message):
            check_precision("bfloat16", environment)


# Loading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "has_adapter", "with_deepspeed", "loaded_in"),
    [
        ("bfloat16", False, False, "float32"),
        ("bfloat16", True, False, "bfloat16"),
        ("bfloat16", False, True, "bfloat16"),
        ("float16", False, True, "float16"),
        ("float32", False, True, "float32"),
    ],
)
def test_weights_are_loaded_in_the_type_that_they_are_kept_in(
    dtype, has_adapter, with_deepspeed, loaded_in, world, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(with_deepspeed).lower())
    assert weights_dtype(dtype, has_adapter) == loaded_in
    policy = policy_of(world, f"train.dtype={dtype}", f"teacher_model.lora.enable={has_adapter}")
    base_model = policy.model.get_base_model() if has_adapter else policy.model
    assert base_model.dtype == getattr(torch, loaded_in) and (policy.reference is None) == has_adapter
    if policy.reference is not None:
        assert policy.reference.dtype == getattr(torch, loaded_in)


def policy_of(world: Path, *overrides: str) -> Policy:
    """A policy that is compared with a reference."""
    model = f"teacher_model.model_name_or_path={world / 'blank'}"
    config = trained("--config-name", "quickstart", model, "train.beta=0.1", *overrides)
    return load_policy(config, SimpleNamespace(gradient_checkpointing=False))


@pytest.mark.parametrize(("device", "found"), [("meta", "meta"), (None, "cpu")])
def test_policy_and_reference_go_to_their_device_as_they_are_read(device, found, world, monkeypatch):
    """The device `meta` takes no memory; a model that was loaded to the host first would."""
    target_device = None if device is None else torch.device(device)
    monkeypatch.setattr("classroom_rl.trainer.model_loading.device_for_weights", lambda: target_device)
    policy = policy_of(world)
    for model in (policy.model, policy.reference):
        assert {parameter.device.type for parameter in model.parameters()} == {found}


@pytest.mark.parametrize(
    ("device", "zero3", "wanted"), [("cuda:2", False, "cuda:2"), ("cuda:2", True, None), ("cpu", False, None)]
)
def test_the_device_is_this_processs_gpu(device, zero3, wanted, monkeypatch):
    monkeypatch.setattr(
        "classroom_rl.trainer.model_loading.PartialState", lambda: SimpleNamespace(device=torch.device(device))
    )
    monkeypatch.setattr("classroom_rl.trainer.model_loading.is_deepspeed_zero3_enabled", lambda: zero3)
    assert device_for_weights() == (None if wanted is None else torch.device(wanted))
