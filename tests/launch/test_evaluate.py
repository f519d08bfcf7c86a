"""The program that measures a tutor: a dry run of it, and a start that cannot write."""

import re
from pathlib import Path

from tests.support.programs import run_program


def test_a_dry_run_shows_the_shares_of_the_engines() -> None:
    shown = run_program("eval.py", "--config-name", "quickstart", "server_url=null", "dry_run=true")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^# engines: [\d.]+ of a GPU \(teacher_model\.vllm\.gpu_memory_utilization=", shown.stdout, re.M)


def test_a_run_folder_that_cannot_be_made_ends_it_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "p.jsonl").write_text('{"problem": "p", "answer": ""}\n')
    data = f"dataset.eval_datasets=[{{name_or_path: {tmp_path / 'p.jsonl'}}}]"
    refused = run_program("eval.py", f"logging.save_dir={tmp_path / 'file' / 'run'}", data)
    assert refused.returncode == 2, refused.stderr[-3000:]
    assert f"error: {tmp_path / 'file'}" in refused.stderr and "Not a directory" in refused.stderr
    assert "Traceback" not in refused.stderr
