"""Which program gets which argument, and with which flags accelerate starts the trainer."""

from pathlib import Path

import pytest

from classroom_rl.errors import ConfigError
from classroom_rl.launch.commands import check_accelerate_flags, split_arguments, with_accelerate_config, with_precision
from classroom_rl.models.precision import PRECISIONS


@pytest.mark.parametrize(
    ("line", "accelerate", "hydra"),
    [
        ("--config-name x.yaml", "", "--config-name x.yaml"),
        ("--config-name=x a=1", "", "--config-name=x a=1"),
        ("-cn x -cd my_folder", "", "-cn x -cd my_folder"),
        (
            "--config_file config/deepspeed/zero3_4GPU.yaml --config-name language_tutor.yaml",
            "--config_file config/deepspeed/zero3_4GPU.yaml",
            "--config-name language_tutor.yaml",
        ),
        (
            "train.learning_rate=1e-4 --num_machines 2 --machine_rank 1 generation.max_turns=5 --config-name=q",
            "--num_machines 2 --machine_rank 1",
            "train.learning_rate=1e-4 generation.max_turns=5 --config-name=q",
        ),
        ("--multi_gpu a.b=[1,2] --debug --config-name q", "--multi_gpu --debug", "a.b=[1,2] --config-name q"),
        ("--num_machines=2 --main_process_ip ::1 ++a.b=1", "--num_machines=2 --main_process_ip ::1", "++a.b=1"),
        ("--rdzv_conf join_timeout=60 seed=3", "--rdzv_conf join_timeout=60", "seed=3"),
        ("--rdzv-conf join_timeout=60 seed=3", "--rdzv-conf join_timeout=60", "seed=3"),
        ("~a.b +c=1 ~d=2 -cn q", "", "~a.b +c=1 ~d=2 -cn q"),
        ("dataset.train_datasets.0.ratio=/a/b.x -cn q", "", "dataset.train_datasets.0.ratio=/a/b.x -cn q"),
    ],
)
def test_flags_are_accelerates_the_rest_is_hydras(line, accelerate, hydra):
    split = split_arguments(line.split())
    assert split.accelerate == accelerate.split()
    assert split.hydra == hydra.split()


def test_an_override_with_spaces_stays_whole():
    arguments = ["-cn", "q", "logging.wandb_tags=[one tag, another]", "logging.run_group=a b"]
    assert split_arguments(arguments).hydra == arguments


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--config-name", "--config-name needs a value"),
        ("--config-dir --config-name q", "--config-dir needs a value"),
        ("--multirun --config-name q", "--multirun"),
        ("-m", "-m"),
        ("--config-path conf", "--config-dir"),
        ("--config-name q language_tutor.yaml", "language_tutor.yaml is neither"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(line, named):
    with pytest.raises(ConfigError, match=named):
        split_arguments(line.split())


def test_values_of_accelerates_flags_are_found():
    split = split_arguments(["--machine-rank", "3", "--num_machines=4", "-cn", "q"])
    assert split.accelerate_value("--machine_rank") == "3"
    assert split.accelerate_value("--num_machines") == "4"
    assert split.accelerate_value("--main_process_ip") is None


def test_the_accelerate_config_must_be_there():
    with pytest.raises(ConfigError, match="1CPU.yaml"):
        with_accelerate_config(["--config_file", "nowhere.yaml"])
    arguments = ["--num_machines", "2", "--config_file=config/deepspeed/1CPU.yaml"]
    assert with_accelerate_config(arguments) == arguments
    completed = with_accelerate_config(["--debug"])
    assert completed[0] == "--config_file" and Path(completed[1]).is_file() and completed[2:] == ["--debug"]


@pytest.mark.parametrize("flags", [["--num_processes", "2"], ["--zero_stage=3"], ["--num-machines", "2"]])
def test_deepspeed_comes_with_more_processes_on_the_cpu(flags, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert with_accelerate_config([])[1] == "config/accelerate/1CPU.yaml"
    assert with_accelerate_config(flags) == ["--config_file", "config/deepspeed/1CPU.yaml", *flags]


def test_accelerate_looks_at_its_flags_before_anything_starts():
    check_accelerate_flags(["--config_file", "config/deepspeed/1CPU.yaml", "--num_machines", "2"])
    with pytest.raises(ConfigError, match="nu_machines"):
        check_accelerate_flags(["--config_file", "config/deepspeed/1CPU.yaml", "--nu_machines", "2"])


@pytest.mark.parametrize("settings", ["mixed_precision: 'no'", "mixed_precision: no", "num_processes: 1"])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_accelerates_no_leaves_the_precision_to_the_dtype(settings, dtype, tmp_path):
    (tmp_path / "own.yaml").write_text(settings, encoding="utf-8")
    flags = ["--config_file", str(tmp_path / "own.yaml")]
    assert with_precision(flags, dtype) == [*flags, "--mixed_precision", PRECISIONS[dtype]]


def test_a_precision_that_contradicts_the_dtype_is_refused_in_the_file_and_as_a_flag(tmp_path):
    config_file = tmp_path / "own.yaml"
    config_file.write_text("mixed_precision: bf16", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{config_file} has mixed_precision bf16, but train.dtype is float32"):
        with_precision(["--config_file", str(config_file)], "float32")
    with pytest.raises(ConfigError, match="accelerate's flags have mixed_precision bf16, but train.dtype is float32"):
        with_precision(["--config_file", "config/deepspeed/1GPU.yaml", "--mixed_precision=bf16"], "float32")
