"""A person takes a seat on the page, clicked through in a headless Chromium."""

from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.conftest import free_port
from tests.environments.marooned.support import game_app
from tests.support.browser import Browser
from tests.support.scripted_room import serving

GAME = {"problem": "island 3, seat 2", "seat": 4}


@pytest.fixture
def app(tokenizer, tmp_path: Path) -> FastAPI:
    return game_app(tokenizer, tmp_path / "run")


def test_somebody_takes_a_seat(browser: Browser, app: FastAPI) -> None:
    with serving(app, free_port()) as address:
        browser.open(f"{address}/#/chat")
        browser.until_text("#nav", "Take a seat")
        browser.fill("#island", "3")
        browser.fill("#model-seat", "2")
        browser.fill("#own-seat", "4")
        browser.click("#start")
        browser.until_text(".message.game", "You are sailor 4")
        browser.until_text(".message.teacher .said", "I wait <b>here</b>.")
        calls = len(app.state.engine.calls)
        browser.one("#say").send_keys("BUILD HULL\ue007")
        browser.until_text(".wrong", "BUILD HULL is not possible")
        assert len(app.state.engine.calls) == calls, "a slip costs no turn"
        browser.fill("#say", "wait.")
        browser.click("#send")
        browser.until_text(".message.student .said", "ACTION: WAIT")
        browser.wait(lambda: len(browser.all(".message.game")) == 2, "what the sailor sees next")
        browser.click(".possible button", "WAIT")
        browser.wait(lambda: len(browser.all(".message.game")) == 3, "the game after a click")
        assert len(app.state.engine.calls) == calls + 2
        browser.click(".system summary")
        assert "sailors are stranded" in browser.text(".system pre")
