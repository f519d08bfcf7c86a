"""The program that fine-tunes."""

from tests.support.programs import start_program


def test_it_does_not_import_vllm() -> None:
    code = "import sys; import classroom_rl.launch.sft, classroom_rl.trainer.sft.run; sys.exit('vllm' in sys.modules)"
    assert start_program("-c", code).returncode == 0
