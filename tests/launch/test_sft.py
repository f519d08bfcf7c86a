"""The program that fine-tunes."""

from tests.support.programs import run_program, start_program


def test_a_dry_run_shows_the_configuration() -> None:
    shown = run_program("train_sft.py", "--config-name", "quickstart", "train.max_steps=7", "dry_run=true")
    assert shown.returncode == 0 and "max_steps: 7" in shown.stdout


def test_it_does_not_import_vllm() -> None:
    code = "import sys; import classroom_rl.launch.sft, classroom_rl.trainer.sft.run; sys.exit('vllm' in sys.modules)"
    assert start_program("-c", code).returncode == 0
