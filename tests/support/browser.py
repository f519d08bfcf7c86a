"""Drives a headless Chromium that makes no requests of its own, so that it only loads what a test serves."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 120
Found = TypeVar("Found")
_QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --force-color-profile=srgb"
).split()


def missing() -> str:
    """What must be installed before a browser can be driven; "" if nothing is missing."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(programs)} here (Debian: apt install chromium chromium-driver)" if programs else ""


@contextmanager
def open_browser(width: int = 1360, height: int = 900, dark: bool = False) -> Iterator["Browser"]:
    """Open a browser with its own profile; it is closed at the end of the block."""
    if missing():
        pytest.skip(f"{missing()}: the page is not looked at")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for argument in (*_QUIET, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
            yield Browser(driver)
        finally:
            driver.quit()


class Browser:
    """An open browser: finds elements, waits for them, clicks, types."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page from scratch, even if it is the current one."""
        self.driver.get("about:blank")
        self.driver.get(url)

    def wait(self, what: Callable[[], Found], said: str) -> Found:
        """Wait until `what` returns a true value, and return it. Missing and stale elements count as not yet."""
        ignored = (NoSuchElementException, StaleElementReferenceException, IndexError)
        return WebDriverWait(self.driver, WAIT_S, 0.05, ignored).until(lambda _: what(), f"waited for {said}")

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Wait for an element that matches the selector; returns the first."""
        return self.wait(lambda: self.all(selector)[0], selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def click(self, selector: str, text: str = "") -> None:
        """Wait for an element that matches the selector and holds the text, and click the first."""

        def press() -> bool:
            element = next((element for element in self.all(selector) if text in element.text), None)
            if element is None:
                return False
            self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
            element.click()
            return True

        self.wait(press, f"{selector} with {text!r}")

    def until_text(self, selector: str, text: str) -> None:
        self.wait(lambda: any(text in element.text for element in self.all(selector)), f"{text!r} in {selector}")

    def fill(self, selector: str, text: str) -> None:
        """Replace the content of a field, and leave the field."""
        script = (
            "arguments[0].value = arguments[1];"
            "for (const kind of ['input', 'change']) arguments[0].dispatchEvent(new Event(kind, {bubbles: true}))"
        )

        def put() -> bool:
            self.driver.execute_script(script, self.all(selector)[0], text)
            return True

        self.wait(put, selector)

    def complaints(self) -> list[str]:
        """Errors and violations of the page's security policy in the browser's console."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
