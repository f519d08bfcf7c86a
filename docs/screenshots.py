"""Makes docs/screenshots/*.png from a finished run of the quickstart: the page in a headless Chromium, and a chart.

    python -m docs.screenshots runs/quickstart                  all of them
    python -m docs.screenshots runs/quickstart --chart-only     the chart alone, without a browser
    python -m docs.screenshots runs/marooned --game             those of docs/marooned.md, from a run of `make marooned`

The run in progress is that run as it was in the middle of a batch. In the chat its trained model answers, greedily and
without an engine. The chart is the plot `held_out.png` of the run, drawn again.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.roles import Roles
from classroom_rl.environments.classroom.routes import OpenClassroom, ServerTutor
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import load_run
from classroom_rl.rollout.chat_template import ReplyFrame
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.store.journal import HEAD_LENGTH, JOURNAL_NAME, head_of
from classroom_rl.rollout.store.journal_segments import JournalStream
from classroom_rl.server.view_only import create_viewer
from classroom_rl.viewer.routes import add_viewer
from tests.conftest import free_port
from tests.support.browser import Browser, open_browser
from tests.support.scripted_room import serving

FOLDER = Path(__file__).with_name("screenshots")
CHART = "reward_before_after"
STEPS_OF_A_RUN_IN_PROGRESS = 18
SHOW_FIRST_DIFFERENCE = """
const said = [...document.querySelector(".pairs").querySelectorAll(".message.teacher")], half = said.length / 2;
const first = said.findIndex((message, place) =>
    place < half && message.querySelector(".said").innerText !== said[place + half].querySelector(".said").innerText);
said[Math.max(first, 0)].scrollIntoView({block: "end"});
"""
"""Games of equal length stand one beside the other; the first message that differs comes into sight."""
ANSWERS = ("Every day I collect two map in the garden.", "Every day I collect two maps in the garden.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a finished run of the quickstart")
    parser.add_argument("--chart-only", action="store_true", help="draw the chart, and open no browser")
    parser.add_argument("--game", action="store_true", help="a run of `make marooned`: an island before and after")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if options.game:
        take_game(options.run)
        return
    draw_chart(options.run)
    if options.chart_only:
        return
    with tempfile.TemporaryDirectory() as folder, open_browser(1360, 1080) as browser:
        rewound = rewind(options.run, Path(folder) / options.run.name, STEPS_OF_A_RUN_IN_PROGRESS)
        with serving(create_viewer(rewound, None), free_port()) as url:
            take_run(browser, url)
        with serving(create_viewer(options.run, None), free_port()) as url:
            take_conversations(browser, url)
        take_chat(browser, options.run)


def draw_chart(run: Path) -> None:
    """Draw the reward on held-out lessons before and after the training; the run folder stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / run.resolve().name
        place.mkdir()
        plots = {path.stem: path for path in write_plots(replace(load_run(run), folder=place))}
        if "held_out" not in plots:
            sys.exit(f"{run} holds no measurement on held-out lessons: take a run of `make quickstart`.")
        shutil.copyfile(plots["held_out"], FOLDER / f"{CHART}.png")
    print(FOLDER / f"{CHART}.png")


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
    with JournalStream(path) as source, to.open("wb") as target:
        for _, line in source.lines():
            event, _, subject = head_of(line[:HEAD_LENGTH]) or ("", 0.0, "")
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
    browser.open(f"{url}/#/run")
    browser.one(".guards li")
    browser.one(".chart path.line")
    save(browser, "learned")
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


def take_game(run: Path) -> None:
    """The island whose reward rose most, before and after the training, and the plot of the training."""
    shutil.copyfile(run / "plots" / "supervision.png", FOLDER / "marooned_training.png")
    print(FOLDER / "marooned_training.png")
    with open_browser(1360, 1400) as browser, serving(create_viewer(run, None), free_port()) as url:
        sides = {"left": "eval-before", "right": "eval-after"}
        risen = ask(url, "compare", **sides, sampling="", sort="risen")["columns"]["problem_id"][0]
        browser.open(f"{url}/#/compare?left=eval-before&right=eval-after&problem_id={risen}")
        browser.one(".pairs .message")
        browser.driver.execute_script(SHOW_FIRST_DIFFERENCE)
        save(browser, "marooned_game")


def take_chat(browser: Browser, run: Path) -> None:
    generation = load(TrainRLConfig, "train_rl", ["--config-name", "quickstart"]).generation
    engine = TrainedModel(run)
    roles = Roles(engine, Sampling(0.0, max_tokens=generation.max_tokens_per_turn), engine, Sampling(0.0), None)
    app = FastAPI()
    add_viewer(app, run, live=True)
    app.state.opened = OpenClassroom(ServerTutor(roles, generation, longest_s=60), judge_check=None)
    with serving(app, free_port()) as url:
        talk(browser, url)


class TrainedModel:
    """The teacher's seat, taken by the run's trained model in this process."""

    def __init__(self, run: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        safe = {"trust_remote_code": False, "use_safetensors": True}
        self._model = AutoModelForCausalLM.from_pretrained(run / "model", **safe)
        self.tokenizer = AutoTokenizer.from_pretrained(run / "model", trust_remote_code=False)
        self.frame = ReplyFrame(self.tokenizer)
        version = max(int(path.name[1:]) for path in (run / "policy").iterdir())
        self.policy = PolicyVersion((run / "run_id").read_text(encoding="utf-8").strip(), version)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        import torch

        prompt = torch.tensor([list(prompt_ids)])
        end = self.frame.turn_end_id
        options = {"max_new_tokens": sampling.max_tokens, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        ids = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[
            0, len(prompt_ids) :
        ].tolist()
        ended = ids[-1:] == [end]
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        return Completion(tuple(ids), (), text, ended, self.policy)


def talk(browser: Browser, url: str) -> None:
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
