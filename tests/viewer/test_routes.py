"""Tests of the viewer's page and run routes on a run folder, without a browser and without a model."""

import re
from pathlib import Path

from starlette.testclient import TestClient

from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.server.view_only import create_viewer
from classroom_rl.viewer.routes import STATIC, page_files
from tests.support.viewer_run import LESSONS, client_on, conversation

TOKEN = "0123456789abcdef-0123456789"


def test_the_page_comes_from_the_package_with_headers_that_let_nothing_else_in(http: TestClient) -> None:
    for path in page_files():
        answer = http.get(path)
        assert answer.status_code == 200 and answer.content
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        cached = http.get(path, headers={"If-None-Match": answer.headers["ETag"]})
        assert cached.status_code == 304 and not cached.content
    assert http.get("/viewer/..%2froutes.py").status_code == 404
    assert http.get("/viewer/nothing.js").status_code == 404


def test_what_models_said_never_becomes_markup() -> None:
    for path in STATIC.iterdir():
        source = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|srcdoc", source
        )
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", source)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, f"{path.name} names {addresses}"
        assert len(source.splitlines()) < 500


def test_every_module_that_is_imported_is_there() -> None:
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8")):
            assert f"/viewer/{name}" in page_files(), f"{path.name} imports {name}"


def test_with_a_token_the_page_loads_and_its_data_does_not(run: Path) -> None:
    http = client_on(run, TOKEN, "http://elsewhere:8005")
    assert all(http.get(path).status_code == 200 for path in page_files())
    assert http.post("/").status_code == 401
    for path in ("/api/run", "/api/pulse", "/api/metrics", "/api/conversations?where=step-1", "/openapi.json"):
        assert http.get(path).status_code == 401, path
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert http.get("/api/run", headers=right).json()["steps"] == [0, 1, 2]


def test_without_a_token_the_page_and_its_data_are_for_this_machine_s_names(run: Path) -> None:
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert client_on(run, base_url=f"http://{name}:8005").get("/api/run").status_code == 200
    rebound = client_on(run, base_url="http://rebound.example:8005")
    for path in (*page_files(), "/api/run", "/openapi.json"):
        refused = rebound.get(path)
        assert refused.status_code == 403 and "not under 'rebound.example:8005'" in refused.json()["detail"]
    allowed = TestClient(create_viewer(run, None, ["Rebound.example"]), base_url="http://rebound.example:8005")
    assert allowed.get("/api/run").status_code == 200


def test_the_page_without_a_server_tells_its_health(http: TestClient, run: Path) -> None:
    assert http.get("/health").json() == {"status": "ok", "run_folder": str(run), "live": False}
    assert client_on(run, TOKEN).get("/health").status_code == 401


def test_the_run_tells_its_sets_its_configuration_and_why_there_is_no_chat(http: TestClient, run: Path) -> None:
    payload = http.get("/api/run").json()
    assert payload["steps"] == [0, 1, 2] and payload["evaluations"] == ["before", "after"] and not payload["live"]
    assert payload["personas"] == ["correct_student", "error_student"]
    assert ["teacher", "no/such/model"] in payload["facts"]
    assert not payload["chat"]["on"] and f"logging.save_dir={run}" in payload["chat"]["why"]
    refused = http.post("/api/chat", json={"problem": "fractions"})
    assert refused.status_code == 422 and refused.json()["detail"] == payload["chat"]["why"]


def test_the_pulse_changes_with_what_is_written(http: TestClient, run: Path) -> None:
    before = http.get("/api/pulse").json()
    assert before["latest_step"] == 2 and before["playing"] == before["played"] == 0
    assert http.get("/api/pulse").json() == before
    write_rollouts(run, 3, 0, [conversation(3, 0, LESSONS[0])])
    after = http.get("/api/pulse").json()
    assert after["latest_step"] == 3 and after["shelf"] != before["shelf"] and after["metrics"] == before["metrics"]
