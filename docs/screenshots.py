"""Makes docs/screenshots/*.png of the viewer in a headless Chromium, from a finished run:

    python -m docs.screenshots runs/quickstart [http://127.0.0.1:8005]

The address is that of a server that has been started on the run; without it the chat is not taken.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from src.journal import JOURNAL_NAME, head_of
from src.viewer.serve import create_viewer
from tests.browser import Browser, open_browser
from tests.conftest import free_port
from tests.scripted_room import serving

FOLDER = Path(__file__).with_name("screenshots")
STEPS_OF_A_RUN_IN_PROGRESS = 18
ANSWERS = ("Every day my brother collect two maps.", "Every day my brother collects two maps.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a finished run of the quickstart")
    parser.add_argument("server", nargs="?", help="the address of a server on that run, for the chat")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open_browser(1360, 1080) as browser:
        rewound = rewind(options.run, Path(folder) / options.run.name, STEPS_OF_A_RUN_IN_PROGRESS)
        with serving(create_viewer(rewound, None), free_port()) as url:
            take_run(browser, url)
        with serving(create_viewer(options.run, None), free_port()) as url:
            take_conversations(browser, url)
        if options.server is not None:
            take_chat(browser, options.server.rstrip("/"))


def rewind(run: Path, folder: Path, steps: int) -> Path:
    """A copy of a run as it was while it played the batch after so many steps, times of files included."""
    shutil.copytree(run / "config", folder / "config")
    shutil.copytree(run / "eval" / "before", folder / "eval" / "before")
    (folder / "rollouts").mkdir()
    for path in (run / "rollouts").iterdir():
        if int(re.match(r"step_(\d+)", path.name)[1]) < steps:
            shutil.copy2(path, folder / "rollouts")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:steps]), encoding="utf-8")
    copy_journal(run / JOURNAL_NAME, folder / JOURNAL_NAME, steps)
    return folder


def copy_journal(path: Path, to: Path, step: int) -> None:
    """The journal until a third of the step's conversations have ended."""
    ended, wanted = 0, None
    with path.open("rb") as source, to.open("wb") as target:
        for line in source:
            event, _, subject = head_of(line[:400]) or ("", 0.0, "")
            if event == "batch" and json.loads(line)["step"] == step:
                wanted = subject
            ended += wanted is not None and event == "conversation" and subject.startswith(wanted)
            target.write(line)
            if ended > 20:
                return
    sys.exit(f"{path} does not hold step {step}: take a run of more than {step} steps, with its journal.")


def ask(url: str, route: str, **query: Any) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/api/{route}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.load(answer)


def take_run(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/run")
    browser.until_text(".status", "being played")
    browser.one(".chart path.line")
    save(browser, "run")


def take_conversations(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/conversations?where=step-3")
    browser.one(".list tbody tr")
    save(browser, "conversations")
    columns = ask(url, "conversations", where="step-3", limit=200)["columns"]
    shown = zip(columns["id"], columns["problem_id"], columns["reward"], columns["personas"], strict=True)
    found, problem = next(
        (each[0], each[1]) for each in shown if each[2] and 0.55 < each[2] < 0.8 and "error_student" in each[3]
    )
    browser.open(f"{url}/#/conversation?where=step-3&id={found}")
    browser.one(".message")
    save(browser, "conversation")
    browser.click(".toggle", "Tokens trained on")
    browser.one(".pieces mark")
    save(browser, "tokens")
    browser.open(f"{url}/#/group?where=step-3&problem_id={problem}")
    browser.one(".column .message")
    save(browser, "group")
    risen = ask(url, "compare", left="eval-before", right="eval-after", sampling="sampled", sort="risen")["columns"]
    browser.open(
        f"{url}/#/compare?left=eval-before&right=eval-after&sampling=sampled&problem_id={risen['problem_id'][9]}"
    )
    browser.one(".pairs .message")
    save(browser, "before_after")


def take_chat(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/chat")
    browser.fill("#lesson-search", "collect, every day")
    browser.click(".pick button", "collect, every day")
    browser.wait(lambda: "collect" in browser.one("#lesson").get_property("value"), "the lesson's text")
    browser.click("#start")
    for number, answer in enumerate(ANSWERS, start=1):
        browser.wait(lambda said=number: len(browser.all(".message.teacher")) == said, "the tutor's message")
        browser.one("#say").send_keys(answer)
        browser.click("#send")
    browser.wait(lambda: len(browser.all(".message.teacher")) == len(ANSWERS) + 1, "the tutor's last message")
    save(browser, "chat")


def save(browser: Browser, name: str) -> None:
    browser.driver.execute_script("document.activeElement?.blur()")
    browser.driver.save_screenshot(str(FOLDER / f"{name}.png"))
    print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
