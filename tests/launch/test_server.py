"""The program that serves: what ends it before a model is loaded."""

from pathlib import Path

from tests.launch.test_before_start import JUDGE
from tests.support.programs import run_program


def test_a_missing_key_ends_the_start() -> None:
    result = run_program("vllm_server.py", *JUDGE, "judge_model.api_key_env=NO_SUCH_KEY")
    assert result.returncode == 2 and "set the environment variable NO_SUCH_KEY" in result.stderr


def test_what_is_to_be_viewed_must_be_there(tmp_path: Path) -> None:
    result = run_program("vllm_server.py", "--view", str(tmp_path / "nowhere"))
    assert result.returncode == 2 and str(tmp_path / "nowhere") in result.stderr
