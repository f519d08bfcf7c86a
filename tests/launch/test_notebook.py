"""The notebook runs as it is, and its code runs from the installed library, on a model behind an API, too."""

import ast
import json
import os
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from tests.launch.test_wheel import built_wheel, distributions  # noqa: F401
from tests.support.judge_endpoint import judge_endpoint, says

NOTEBOOK = ROOT / "notebooks/rollouts.ipynb"
MOST_LINES = 40
ENGINE = "engine = HfEngine(tiny)"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_its_own_code_is_short_and_its_outputs_are_not_kept() -> None:
    lines = [line for cell in code_cells() for line in cell.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES
    assert sum(line == ENGINE for line in lines) == 1
    assert not any("sys.path" in line for line in lines), "the package is installed"
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_what_it_imports_is_there() -> None:
    for node in ast.walk(ast.parse("\n".join(code_cells()), feature_version=(3, 11))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("classroom_rl"):
            module = import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.full
def test_it_runs_from_top_to_bottom(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = str([cell.get("outputs") for cell in notebook.cells])
    assert "8 rollouts on 2 prompts" in outputs and "image/png" in outputs
    assert (tmp_path / "runs/guesses.parquet").is_file() and (tmp_path / "runs/plots/rewards.png").is_file()


def run_as_script(folder: Path, library: Path, engine: str) -> str:
    """Run the notebook's code in a folder outside the repository, with the installed library and this engine."""
    code = "\n".join(code_cells()).replace(ENGINE, engine)
    code = code.replace("done.summary()\n", "print(done.summary())\n")
    script = folder / "script.py"
    script.write_text(
        "import asyncio\nimport sys\n\nasync def main():\n"
        + textwrap.indent(code, "    ")
        + "\n    programs = {'classroom_rl.server', 'classroom_rl.trainer', 'hydra', 'vllm', 'deepspeed'}"
        + "\n    assert not programs & set(sys.modules) - allowed"
        + f"\n    assert sys.modules['classroom_rl'].__file__.startswith({str(library)!r})\n\n"
        + "allowed = {'deepspeed'}  # transformers imports it where it is installed\n"
        + "asyncio.run(main())\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(library), "MPLBACKEND": "Agg"}
    result = subprocess.run(
        [sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.full
def test_its_code_runs_with_the_installed_library(built_wheel: Path, tmp_path: Path) -> None:  # noqa: F811
    assert "8 rollouts on 2 prompts" in run_as_script(tmp_path, built_wheel, ENGINE)


@pytest.mark.full
def test_its_code_runs_with_an_api_after_one_line_is_changed(built_wheel: Path, tmp_path: Path) -> None:  # noqa: F811
    with judge_endpoint(
        lambda body, nth: says(f"<think>hm</think>I guess {1 + len(body['messages']) // 2}.")
    ) as endpoint:
        engine = f'engine = ApiEngine("m", base_url="{endpoint.url}", api_key_env=None)'
        output = run_as_script(tmp_path, built_wheel, engine)
    assert "8 stop (found)" in output
