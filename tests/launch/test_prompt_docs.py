"""docs/prompts.md shows the language tutor's prompts as they are."""

import runpy

from classroom_rl.system.shipped import ROOT


def test_the_command_writes_the_page_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["prompt_docs", str(tmp_path / "page.md")])
    runpy.run_module("classroom_rl.launch.prompt_docs", run_name="__main__")
    assert (tmp_path / "page.md").read_bytes() == (ROOT / "docs/prompts.md").read_bytes(), "run `make docs`"
