"""A small run folder, and a client of the viewer on it."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.support.viewer_run import client_on, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def http(run: Path) -> TestClient:
    return client_on(run)
