"""A small run folder, a client of the viewer on it, and a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.support.browser import Browser, open_browser
from tests.support.viewer_run import client_on, make_run, shown


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def http(run: Path) -> TestClient:
    return client_on(run)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of all tests of a file."""
    return make_run(tmp_path_factory.mktemp("viewer") / "run")


@pytest.fixture(scope="module")
def url(shared_run: Path) -> Iterator[str]:
    """The address of its page."""
    with shown(shared_run) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_complained_of(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that the console has no error and no violation of the page's security policy."""
    yield
    if "browser" in request.fixturenames:
        complaints = request.getfixturevalue("browser").complaints()
        expected = ("401 (Unauthorized)", "net::ERR_")  # without the token; after a server has ended with its test
        assert not [complaint for complaint in complaints if not any(part in complaint for part in expected)]
