"""Tests of the page in a headless Chromium, clicked through as by a user."""

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import httpx2
from fastapi import FastAPI, Request, Response

from classroom_rl.environments.classroom.routes import ChatBody, ChatOpening, ChatReply, OpenClassroom
from classroom_rl.judges.post_test.records import GIVEN, MISSED, PRODUCED, ExamAnswer, LedgerEntry, PostTest
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.thoughts import split_thoughts
from classroom_rl.rollout.tools.tool import ToolCall
from classroom_rl.server.error_responses import add_error_answers
from classroom_rl.viewer.routes import STATIC, add_viewer
from tests.conftest import RunningServer, free_port
from tests.support.browser import Browser
from tests.support.scripted_room import serving
from tests.support.synthetic_run import step_line
from tests.support.viewer_run import (
    CONVERSATIONS,
    HOSTILE,
    HOSTILE_LESSON,
    LESSONS,
    add_guards,
    add_tokenizer,
    conversation,
    make_large_run,
    make_run,
    shown,
)

TOKEN = "0123456789abcdef-0123456789"
ROWS = ".list tbody tr"


class Tutor:
    """A tutor that repeats the student's last message, and has new weights after its second answer."""

    def __init__(self) -> None:
        self.answers = 0
        self.lessons: list[str] = []

    @property
    def policy(self) -> str:
        return f"run v{7 + self.answers // 2}"

    def opening(self, request: ChatBody) -> ChatOpening:
        return ChatOpening(system=f"Teach this: {request.problem}", turns=[], next="teacher")

    async def reply(self, request: ChatBody) -> ChatReply:
        await asyncio.sleep(0.05)
        self.lessons.append(request.problem)
        policy, self.answers = self.policy, self.answers + 1
        message = request.turns[-1].text if request.turns else f"Hello {request.student_name}."
        text = f"<think>Repeat it.</think>You say: {message}"
        return ChatReply(text=text, parts=split_thoughts(text), tokens=9, ended=True, over=False, policy=policy)


def live_app(run: Path) -> FastAPI:
    """The application of a server that has a tutor."""
    app = FastAPI()
    add_error_answers(app)
    add_viewer(app, run, live=True)
    app.state.opened = OpenClassroom(Tutor(), judge_check=None)
    return app


def test_the_run_page_shows_figures_and_charts(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.until_text(".tile", "3\nof 4")
    assert browser.text("#run-name") == "run"
    assert browser.all(".step-time .shares rect") and "training 31 %" in browser.text(".step-time .legend")
    titles = [heading.text for heading in browser.all(".chart h3")]
    assert titles[:4] == ["Reward", "Reward on held-out lessons", "What the judge says", "Seconds per step"]
    assert len(browser.all(".chart path.line")) >= 4 and len(browser.all(".chart path.area")) == 3
    browser.driver.execute_script("document.querySelector('.chart svg').focus()")
    browser.one(".chart svg").send_keys("\ue014\ue014")  # arrow right, twice
    browser.until_text(".chart .reading", "step 2")
    browser.one(".chart svg").send_keys("\ue007")  # enter
    browser.until_text(".summary h2", "step 2")


PREFIX = "/lab/tutor"


def behind_a_path(upstream: str) -> FastAPI:
    """A reverse proxy that serves an address below a path of its own, as `location /lab/tutor/` of nginx does."""
    proxy = FastAPI(openapi_url=None)

    @proxy.api_route(f"{PREFIX}/{{path:path}}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as client:
            headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
            answer = await client.request(
                request.method,
                f"{upstream}/{path}",
                params=request.query_params,
                headers=headers | {"host": request.headers["host"]},
                content=await request.body(),
            )
        answer_headers = {name: answer.headers[name] for name in FORWARDED if name in answer.headers}
        return Response(answer.content, answer.status_code, answer_headers)

    return proxy


FORWARDED = ("content-type", "content-security-policy", "cross-origin-resource-policy", "etag", "www-authenticate")


def test_the_page_works_below_a_path_of_a_reverse_proxy(browser: Browser, shared_run: Path) -> None:
    with serving(live_app(shared_run), free_port()) as upstream, serving(behind_a_path(upstream), free_port()) as proxy:
        browser.open(f"{proxy}{PREFIX}/")
        browser.until_text(".tile", "3\nof 4")
        assert browser.one("link[rel=icon]").get_property("href") == f"{proxy}{PREFIX}/viewer/icon.svg"
        assert len(browser.all(".chart path.line")) >= 4
        browser.click("#nav a", "Conversations")
        browser.one(ROWS).click()
        browser.one(".message")
        browser.open(f"{proxy}{PREFIX}/#/chat")
        browser.click(".pick button")
        browser.click("#start")
        browser.until_text(".message .said", "You say: Hello Alex.")
        addresses = browser.driver.execute_script(
            "return performance.getEntriesByType('resource').map((each) => each.name)"
        )
        assert addresses and all(address.startswith(f"{proxy}{PREFIX}/") for address in addresses), addresses


def test_no_address_on_the_page_begins_at_the_host() -> None:
    for path in STATIC.iterdir():
        source = path.read_text(encoding="utf-8")
        absolute = re.findall(
            r"""(?:(?:href|src|action)=["']|url\(["']?|(?:fetch|ask|import|from|href:|src:)[\s(]*["'`])/[^"'`)]*""",
            source,
        )
        assert not absolute, f"{path.name}: {absolute}"


def test_the_run_page_says_what_the_guards_found(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    planted = {"guard/canary_praise": 0.9, "guard/canary_empty": 0.0}
    checked = {"guard/gap": 0.25, "guard/gap_growth": 0.2} | planted
    lines = [step_line(1, 0.2, **dict.fromkeys(checked, 0.0)), step_line(2, 0.3), step_line(3, 0.4, **checked)]
    with shown(run) as address:
        browser.open(address)
        browser.until_text(".tile", "2\nof 4")
        assert not browser.all(".guards")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        add_guards(run)
        browser.until_text(".guards h2", "Did the tutor learn? No evidence of it")
        browser.until_text(".guards h2", "Is the judge being fooled? 2 warnings in 2 checks")
        browser.until_text(".guards li", "The parameters did not move at all")
        browser.until_text(".guards li", "Step 3: The judge can be fooled: b.")
        titles = [heading.text for heading in browser.all(".chart h3")]
        assert {"Training's judge against the held-out one", "Planted conversations"} <= set(titles)
        planted = browser.all(".chart")[titles.index("Planted conversations")]
        assert "praise" in planted.text and len(planted.find_elements("css selector", "path.line")) == 2


def test_from_the_list_to_a_conversation_its_tokens_and_back(browser: Browser, url: str, shared_run: Path) -> None:
    add_tokenizer(shared_run)
    browser.open(f"{url}/#/conversations?where=step-1")
    browser.until_text("#count", "8 conversations")
    browser.click(f"{ROWS} .lesson a", "market")
    browser.until_text(".reward-card .figure", "0.2000")
    assert [message.text for message in browser.all(".message .said")][:2] == ["Hello.", "Answer 1 as correct_student."]
    assert browser.text(".message.student .persona") == "correct" and "3 tokens, all trained on" in browser.text(
        ".tokens"
    )
    assert "because" in browser.text(".verdict .reason")
    thought = browser.one(".thought p")
    assert not thought.is_displayed()
    browser.click(".toggle", "Show thoughts")
    browser.wait(thought.is_displayed, "the thought")
    assert thought.text == "Plan 1."
    browser.click(".toggle", "Tokens trained on")
    browser.until_text(".token-view mark", "t3")
    assert [mark.text for mark in browser.all(".pieces mark")] == [f"t{i}" for i in range(3, 16) if (i - 3) % 5 < 3]
    browser.click(".actions a", "Next")
    browser.until_text(".crumbs", "conversation 2")
    browser.click(".crumbs a", "step 2")
    browser.until_text("#count", "8 conversations")


def test_a_message_shows_the_tools_that_were_called_for_it(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    calls = (
        ToolCall("a", "calculator", {"expression": "6*7 < 50"}, "<tool_call>", "42 <b>bold</b>", seconds=0.25),
        ToolCall("b", "", {}, '{"name": "calcul', "No JSON.", error="bad_json"),
    )
    record = conversation(0, 0, LESSONS[0])
    first = next(index for index, turn in enumerate(record.turns) if turn.role == "teacher")
    turns = [replace(turn, tool_calls=calls) if n == first else turn for n, turn in enumerate(record.turns)]
    write_rollouts(run, 0, 0, [record.model_copy(update={"turns": turns})])
    with shown(run) as url:
        browser.open(f"{url}/#/conversation?where=step-0&id={record.id}")
        browser.until_text(".tool-calls", "calculator")
        good, bad = browser.all(".tool-call")
        assert "0.25 s" in good.text and "expression" not in good.text, "folded"
        assert "unreadable call" in bad.text and "bad json" in bad.text
        for call in (good, bad):
            call.find_element("css selector", "summary").click()
        assert '{"expression": "6*7 < 50"}' in good.text and "42 <b>bold</b>" in good.text
        assert '{"name": "calcul' in bad.text and "No JSON." in bad.text


def test_what_the_student_still_knows_stands_at_the_end(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    ledger = (
        LedgerEntry("What do <b>you</b> cook?", "…", PRODUCED, 1, True),
        LedgerEntry("What do they cook?", "…", GIVEN, 2, False),
        LedgerEntry("What does she cook?", "…", MISSED),
    )
    answers = tuple(
        ExamAnswer(student, item, f"Question {item}?", f"{student} says {item}.", item == 0 or student == "student")
        for student in ("ledger", "student")
        for item in range(3)
    )
    record = conversation(0, 0, LESSONS[0], post_test=PostTest(ledger, answers))
    write_rollouts(run, 0, 0, [record])
    with shown(run) as url:
        browser.open(f"{url}/#/conversation?where=step-0&id={record.id}")
        browser.until_text(".post-test .note", "1 of 3 questions right; the student's model: 3 of 3 questions right")
        entries = browser.all(".post-test li")
        produced, given, missed = (" ".join(entry.text.split()) for entry in entries)
        assert produced.startswith("What do <b>you</b> cook? said by itself message 2 known before")
        assert "given away message 3 not known before" in given
        assert "not said" in missed and "message" not in missed
        entries[1].find_element("css selector", "summary").click()
        answers = entries[1].text
        assert "student says 1." in answers and "right" in answers and "wrong" in answers


def test_filters_narrow_the_list(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/conversations?where=step-1")
    browser.until_text("#count", "8 conversations")
    browser.fill("#problem", "walk")
    browser.until_text("#count", "4 of 8")
    browser.fill("#persona", "error_student")
    browser.until_text("#count", "2 of 8")
    browser.fill("#low", "0.4")
    browser.until_text("#count", "1 of 8")
    browser.fill("#high", "0.45")
    browser.until_text(".empty", "No conversation passes these filters")
    browser.click(".empty a", "Clear the filters")
    browser.until_text("#count", "8 conversations")
    browser.fill("#judge", "failed")
    browser.until_text("#count", "2 of 8")
    assert browser.text(f"{ROWS} .badge.bad") == "judge failed" and browser.text(f"{ROWS} .reward") == "none"
    browser.fill("#where", "eval-before")
    browser.until_text(".summary h2", "held out, before")


def test_rewards_above_one_are_drawn_and_a_twice_trained_batch_keeps_its_figures(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", steps=1)
    first, second = step_line(1, 1.1), step_line(2, 1.5, **{"judge/run_cost_usd": 2.5, "judge/failed_share": 0.1})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, second, {"step": 3})))
    with shown(run) as address:
        browser.open(address)
        browser.until_text(".tile", "$2.50\nof the judge, so far")
        assert "1.500" in browser.text(".tiles") and "10 %" in browser.text(".tiles")
        line = browser.one(".chart path.line").get_attribute("d")
        heights = [float(point.split()[1]) for point in line.replace("L", "M").split("M")[1:]]
        assert len(set(heights)) == len(heights) == 2, "not cut at 1"


def test_other_sets_are_compared_whatever_sampling_was_chosen_before(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/compare?left=eval-before&right=eval-after&sampling=sampled")
    browser.until_text(".summary p", "2 lessons")
    browser.fill("#left", "step-1")
    browser.wait(lambda: browser.one("#left").get_property("value") == "step-1", "the other set")
    browser.fill("#right", "step-2")
    browser.until_text(".summary p", "2 lessons, mean reward")
    assert browser.text(".summary h2").lower() == "step 2 → step 3" and not browser.all("#sampling")


def test_over_all_steps_a_group_is_that_of_its_step(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/conversations?where=training&problem=market")
    browser.click(f"{ROWS} a.quiet", "group")
    browser.wait(lambda: len(browser.all(".column")) == 4, "the four conversations of one step")
    assert browser.text(".crumbs a") == "step 1"
    browser.open(f"{url}/#/group?where=training&problem_id={Problem.of(LESSONS[0]).id}")
    browser.wait(lambda: len(browser.all(".column")) == 12, "those of all steps")
    assert not browser.all(".column .advantage"), "GRPO compares none of these with each other"


def test_a_group_stands_side_by_side(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/conversations?where=step-1")
    browser.click(f"{ROWS} a.quiet", "group")
    browser.wait(lambda: len(browser.all(".column")) == 4, "four columns")
    assert [reward.text for reward in browser.all(".column .reward")] == ["0.20", "0.30", "none", "0.50"]
    assert [advantage.text for advantage in browser.all(".column .advantage")] == ["−0.13", "−0.03", "+0.17"]
    tops = {column.location["y"] for column in browser.all(".column")}
    assert len(tops) == 1
    browser.click(".toggle", "Best first")
    browser.wait(lambda: browser.text(".column .reward") == "0.50", "the best one first")


def test_the_same_lesson_before_and_after(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.click("#nav a", "Before and after")
    browser.until_text(".summary p", "2 lessons, mean reward 0.233 → 0.633")
    assert browser.text(".advantage") == "+0.40"
    browser.click(".list .lesson a", "a walk")
    browser.wait(lambda: len(browser.all(".pairs")) == 4, "four pairs")
    assert [reward.text for reward in browser.all(".pairs .reward")][:2] == ["0.10", "0.50"]
    assert [heading.text for heading in browser.all(".pairs h3")][:2] == ["held out, before", "held out, after"]


def test_hostile_text_is_shown_as_text(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/conversations?where=step-0")
    browser.until_text(f"{ROWS} .lesson", "<script>window.owned")
    for i, text in enumerate(HOSTILE.values()):
        browser.open(f"{url}/#/conversation?where=step-0&id=run-step000000-rank0of1-abcd-{8 + i:04d}")
        message = browser.one(".message .said .text")
        if len(text) > 4000:
            assert len(message.get_property("textContent")) <= 4002
            browser.click(".message .said button", f"Show all {len(text.strip()):,} characters")
        assert browser.wait(lambda element=message: element.get_property("textContent"), "text") == text.strip()
        assert message.get_attribute("dir") == "auto"
        assert browser.one("h1").text.startswith("Lesson: <script>")
    state = "return [window.owned ?? null, document.querySelectorAll('#owned, main script, main img').length]"
    assert browser.driver.execute_script(state) == [None, 0]
    width = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.driver.execute_script(width) == 0
    for page in ("group?where=step-0", "chat?where=step-0"):
        browser.open(f"{url}/#/conversations?where=step-0&sort=played")
        problem = Problem.of(HOSTILE_LESSON).id
        browser.open(f"{url}/#/{page}&problem_id={problem}")
        browser.one(".column .text" if page.startswith("group") else "#lesson")
        assert browser.driver.execute_script(state) == [None, 0]
        assert browser.driver.execute_script(width) == 0


def test_without_a_model_the_chat_says_why_it_is_off(browser: Browser, url: str, shared_run: Path) -> None:
    browser.open(f"{url}/#/chat")
    browser.until_text("#chat-off", f"python vllm_server.py --config-name … logging.save_dir={shared_run}")
    assert not browser.one("#start").is_enabled() and not browser.one("#say").is_enabled()


def test_somebody_talks_to_the_tutor(browser: Browser, shared_run: Path) -> None:
    app = live_app(shared_run)
    with serving(app, free_port()) as address:
        browser.open(f"{address}/#/chat")
        browser.fill("#lesson-search", "market")
        browser.wait(lambda: len(browser.all(".pick button")) == 1, "one lesson")
        browser.click(".pick button", "market")
        browser.wait(lambda: browser.one("#lesson").get_property("value") == LESSONS[0], "the lesson's text")
        browser.fill("#student-name", "Ada")
        browser.click("#start")
        browser.until_text(".message.teacher .said", "You say: Hello Ada.")
        assert "run v7" in browser.text(".policy-line")
        browser.one("#say").send_keys("<b>I goes</b> home.\ue007")
        browser.until_text(".message.teacher .said", "You say: <b>I goes</b> home.")
        browser.fill("#lesson", "Another lesson, not begun yet.")
        browser.one("#say").send_keys("I went home.")
        browser.click("#send")
        browser.until_text(".policy-line", "New weights: run v8")
        assert len(browser.all(".message")) == 5 and not browser.one(".thought p").is_displayed()
        browser.click(".system summary")
        assert browser.text(".system pre") == f"Teach this: {LESSONS[0]}"
    assert app.state.opened.tutor.lessons == [LESSONS[0]] * 3


def test_a_server_with_engines_shows_its_run_and_lets_its_tutor_be_talked_to(
    browser: Browser, server: RunningServer, lessons: list[str]
) -> None:
    """The page of a running vllm_server.py shows a conversation that its engines played, and chats with its teacher."""
    request = SampleRequest(problems=[lessons[0]] * 2, answers=[""] * 2, request_id="page", seed=1, step=0)
    record = server.client.sample(request).conversations[1]
    browser.open(f"{server.client.url}/#/conversation?where=now&id={record.id}")
    texts = [turn.text.strip() for turn in record.turns]
    browser.wait(lambda: len(browser.all(".message")) == len(texts), "its messages")
    displayed = [element.get_property("textContent").strip() for element in browser.all(".message .said .text")]
    assert displayed == [text for text in texts if text]
    browser.click(".actions a", "Take this lesson yourself")
    for messages in (1, 3):
        browser.wait(lambda count=messages: len(browser.all(".message")) == count, f"{messages} messages")
        assert browser.text(".policy-line") == str(server.client.health().policy)
        browser.one("#say").send_keys("I go to the park.\ue007")
    browser.wait(lambda: len(browser.all(".message")) == 5, "the last answer")


def test_a_run_that_goes_on_is_followed(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    with shown(run) as address:
        browser.open(f"{address}/#/run")
        browser.until_text(".tile", "1\nof 4")
        line = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(line + line.replace('"step": 1', '"step": 2'))
        browser.until_text(".tile", "2\nof 4")
        write_rollouts(run, 7, 0, [conversation(7, 0, LESSONS[0])])
        browser.click("#nav a", "Conversations")
        browser.wait(lambda: "step 8" in browser.one("#where").text, "the new step among the sets")


def test_the_token_is_asked_for_once(browser: Browser, shared_run: Path) -> None:
    with shown(shared_run, TOKEN) as address:
        browser.open(address)
        browser.wait(lambda: browser.one("#token-dialog").is_displayed(), "the question for the token")
        browser.one("#token").send_keys("wrong\ue007")
        browser.wait(lambda: browser.one("#token-wrong").is_displayed(), "that it was wrong")
        browser.one("#token").send_keys(f"{TOKEN}\ue007")
        browser.until_text(".tile", "3\nof 4")
        browser.driver.refresh()
        browser.until_text(".tile", "3\nof 4")
        assert not browser.one("#token-dialog").is_displayed()


def test_ten_thousand_conversations_open(browser: Browser, tmp_path: Path) -> None:
    run = make_large_run(tmp_path / "run")
    with shown(run) as address:
        for where in ("step-39", "training"):
            started = time.monotonic()
            browser.open(f"{address}/#/conversations?where={where}")
            browser.wait(lambda: len(browser.all(ROWS)) == 100, "the first hundred")
            seconds = time.monotonic() - started
            print(f"{where}: {seconds:.2f} s from nothing to the first list, of {browser.text('#count')}")
        assert f"{CONVERSATIONS:,} conversations" in browser.text("#count")
        script = "return performance.getEntriesByType('resource').reduce((sum, each) => sum + each.encodedBodySize, 0)"
        assert browser.driver.execute_script(script) < 256 * 1024
        browser.click(".pager a", "Next")
        browser.until_text(".pager", "101–200 of 10,000")
        started = time.monotonic()
        browser.click(f"{ROWS} .lesson a")
        browser.one(".dialogue .message")
        print(f"a conversation of it: {time.monotonic() - started:.2f} s")
