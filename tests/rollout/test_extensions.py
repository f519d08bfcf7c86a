"""An environment's own routes and its own view of a run: of a package that a test writes."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from fastapi import FastAPI
from matplotlib.figure import Figure
from starlette.testclient import TestClient

from classroom_rl.results.panels import panel_of
from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.extensions import extension_of, view_of
from classroom_rl.server.error_responses import add_error_answers
from classroom_rl.viewer.routes import add_viewer
from tests.support.synthetic_run import step_line, write_training

ROUTES = """
def add_routes(router, opened):
    @router.get("/api/board")
    def board() -> dict[str, int]:
        return {"moves": opened()}
"""
CONFIG = """
from classroom_rl.rollout.extensions import MetricPanel, RunView

RUN_VIEW = RunView(
    live_tab="game",
    facts=lambda config: {"board": config["generation"]["size"], "handicap": None},
    personas=lambda config: ["white", "black"],
    panels=[MetricPanel("Games", "share", [("chess/won", "won", "green"), ("chess/lost", "lost", "red")])],
)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of an environment of somebody's own, whose package can be imported."""
    package = tmp_path / "packages" / "some_chess"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "routes": ROUTES, "config": CONFIG}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(package.parent)
    folder = tmp_path / "run"
    lines = [step_line(step, 0.5, **{"chess/won": step / 10}) for step in (1, 2)]
    write_training(folder, lines, {"environment": "some_chess", "generation": {"size": 8}})
    yield folder
    for name in [name for name in sys.modules if name.startswith("some_chess")]:
        del sys.modules[name]


def client_of(run: Path, opened: object) -> TestClient:
    app = FastAPI()
    add_error_answers(app)
    add_viewer(app, run, live=opened is not None)
    app.state.opened = opened
    return TestClient(app, raise_server_exceptions=False)


def test_a_package_brings_its_routes_and_its_view(run: Path) -> None:
    import_module("some_chess")  # as the server and the trainer of the run do

    http = client_of(run, 7)
    assert http.get("/api/board").json() == {"moves": 7}
    payload = http.get("/api/run").json()
    assert payload["game"] and payload["chat"]["on"] and payload["personas"] == ["white", "black"]
    assert ["board", "8"] in payload["facts"] and "handicap" not in dict(payload["facts"])
    refused = client_of(run, None).get("/api/board")
    assert refused.status_code == 422 and "no model is loaded" in refused.json()["detail"]


def test_a_package_brings_its_plot(run: Path) -> None:
    import_module("some_chess")

    data = load_run(run)
    assert [path.name for path in write_plots(data)] == ["reward.png", "some_chess.png"]
    axes = Figure().subplots()
    assert panel_of(view_of(data.config).panels[0])(axes, data)
    (line,) = [line for line in axes.get_lines() if line.get_label() == "won"]
    assert line.get_color() == "#0f766e" and axes.get_title(loc="left") == "Games" and axes.get_ylabel() == "share"


def test_a_package_is_not_imported_because_a_run_folder_names_it(run: Path) -> None:
    assert extension_of("some_chess", "config") is None and "some_chess" not in sys.modules
    assert client_of(run, None).get("/api/board").status_code == 404
    assert [path.name for path in write_plots(load_run(run))] == ["reward.png"]


def test_no_hook_is_needed() -> None:
    """The guessing game of docs/environments.md brings neither."""
    import tests.support.guessing.config  # noqa: F401

    assert extension_of("tests.support.guessing", "routes") is None
    assert view_of({"environment": "tests.support.guessing"}).live_tab == ""


@pytest.mark.parametrize(("environment", "tab"), [(None, "chat"), ("classroom", "chat"), ("marooned", "game")])
def test_a_run_that_names_no_environment_is_one_of_lessons(environment: str | None, tab: str) -> None:
    config = {} if environment is None else {"environment": environment}
    assert view_of(config).live_tab == tab
