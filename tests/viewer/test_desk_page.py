"""Tests of reviews and of the teacher's desk in a headless Chromium, clicked through as by a user."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.remote.webelement import WebElement

from classroom_rl.results.rollout_files import write_rollouts
from tests.support.browser import Browser, open_browser
from tests.support.supervised_run import decisions_in, make_supervised_run, supervised
from tests.support.viewer_run import HOSTILE, make_run, shown

ROWS = ".list tbody tr"
CARDS = ".correction-card"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_supervised_run(tmp_path / "run", hostile=True)


@pytest.fixture
def url(run: Path) -> Iterator[str]:
    with shown(run) as address:
        yield address


def open_conversation(browser: Browser, url: str, index: int) -> None:
    browser.open(f"{url}/#/conversation?where=step-2&id=run-step000002-rank0of1-abcd-{index:04d}")
    browser.one(".message")


def versions(browser: Browser) -> list[tuple[str, str]]:
    """The heading of each version of a message, and its words."""
    pairs = [
        (version.find_element("css selector", "h4").text, version.find_element("css selector", ".words").text)
        for version in browser.all(".versions .version")
    ]
    return [(heading, words.removeprefix("Thought\n")) for heading, words in pairs]


def test_drafts_corrections_and_what_was_heard_stand_side_by_side(browser: Browser, url: str) -> None:
    open_conversation(browser, url, 1)
    assert [version[0] for version in versions(browser)] == ["Draft", "Correction", "What the student heard"]
    assert versions(browser)[0][1] == "It is *he goes*." and versions(browser)[2][1] == "Go on 1."
    boxes = [version.rect for version in browser.all(".version")]
    assert len({box["y"] for box in boxes}) == 1 and len({box["x"] for box in boxes}) == 3
    assert [badge.text for badge in browser.all(".message .who .badge")] == [
        *("✓ valid", "correct", "✓ valid", "attempt 2", "error", "✓ valid")
    ]
    review = browser.text(".version.draft .review")
    assert "ignores error" in review and "penalty −1" in review and "passes over it" in review
    open_conversation(browser, url, 2)
    assert versions(browser) == [
        ("Draft", "No, that is wrong."),
        ("What the student heard: the correction", "Right! And what does she buy?"),
    ]
    assert "replaced" in browser.text(".message.beside .who")


def test_what_was_heard_although_invalid_a_refused_correction_and_no_verdict(browser: Browser, url: str) -> None:
    open_conversation(browser, url, 0)
    assert [version[0] for version in versions(browser)] == ["What the student heard", "Correction"]
    assert [badge.text for badge in browser.all(".teacher .who .badge")] == ["✓ valid", "leak", "no verdict"]
    browser.driver.execute_script("document.querySelectorAll('.folded-review')[1].open = true")
    assert "holds no JSON object" in browser.text(".folded-review .wrong")
    open_conversation(browser, url, 3)
    assert versions(browser)[1] == ("Correction, refused", "Say: the baker sells bread.")
    assert browser.text(".version.refused s") == "Say: the baker sells bread."
    assert "It is no correction: It hands over the answer itself." in browser.text(".version.refused .review")
    assert not browser.all(".version.correction")
    open_conversation(browser, url, 5)
    headings = [version[0] for version in versions(browser)]
    assert headings == ["Draft 1", "Correction, refused", "Draft 2", "Correction", "What the student heard"]


def test_the_list_is_filtered_by_the_supervisor_s_reviews(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/conversations?where=step-2")
    browser.until_text("#count", "7 conversations")
    browser.fill("#review", "invalid")
    browser.until_text("#count", "6 of 7")
    browser.fill("#review", "category:off_topic")
    browser.until_text("#count", "2 of 7")
    assert [badge.text for badge in browser.all(f"{ROWS} .badge.invalid")] == ["off topic", "off topic", "leak"]
    assert browser.one("#review").get_property("value") == "category:off_topic"
    browser.fill("#review", "none")
    browser.until_text("#count", "1 of 7")
    browser.until_text(f"{ROWS} .flags", "review failed")


def test_the_run_page_draws_categories_and_corrections(browser: Browser, url: str) -> None:
    browser.open(f"{url}/#/run")
    browser.until_text(".tile", "Valid messages")
    charts = {chart.find_element("css selector", "h3").text: chart for chart in browser.all(".chart")}
    assert {"The tutor's messages, as reviewed", "Learning from corrections", "Supervised passes"} <= set(charts)
    chart = charts["What is wrong with messages"]
    assert len(chart.find_elements("css selector", "rect.area")) == 3 * 12
    legend = [entry.text for entry in chart.find_elements("css selector", ".legend li")]
    assert sorted(legend) == ["false correction", "ignores error", "leak"], "none that never came"
    ticks = [tick.text for tick in browser.all(".chart .tick")]
    assert not any("e" in tick for tick in ticks), ticks
    drawing = chart.find_element("css selector", "svg")
    browser.driver.execute_script("arguments[0].focus()", drawing)
    drawing.send_keys("\ue014")  # arrow right
    browser.wait(lambda: "step 1" in chart.text and "leak 15 %" in chart.text, "the first step's shares")


def test_a_run_without_a_supervisor_shows_none_of_it(browser: Browser, tmp_path: Path) -> None:
    with shown(make_run(tmp_path / "plain")) as address:
        browser.open(address)
        browser.until_text(".tile", "3\nof 4")
        assert "desk" not in browser.text("#nav") and "Valid messages" not in browser.text(".tiles")
        assert not {"What is wrong with messages", "Corrections"} & {
            heading.text for heading in browser.all(".chart h3")
        }
        browser.open(f"{address}/#/conversations?where=step-1")
        browser.until_text("#count", "8 conversations")
        assert not browser.all("#review")
        browser.open(f"{address}/#/desk")
        browser.until_text(".empty", "This run has no corrections")


def card(browser: Browser, heading: str) -> WebElement:
    return [element for element in browser.all(CARDS) if heading in element.find_element("css selector", "h3").text][0]


def press(browser: Browser, heading: str, button: str) -> None:
    def click() -> bool:
        element = card(browser, heading).find_element("css selector", f".decide .{button}")
        browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        return True

    browser.wait(click, f"{button} of {heading}")


def figures(browser: Browser) -> dict[str, str]:
    rows = [row.text.splitlines() for row in browser.all(".figures tbody tr, .figures tfoot tr")]
    joined = [" ".join(row) for row in rows]
    names = [heading.text for heading in browser.all(".figures tbody th, .figures tfoot th")]
    return {name: row.removeprefix(name).strip() for name, row in zip(names, joined, strict=True)}


def test_a_person_edits_one_correction_rejects_another_and_sees_the_precision(
    browser: Browser, url: str, run: Path
) -> None:
    browser.open(url)
    browser.click("#nav a", "Teacher's desk")
    browser.until_text("#undecided", "13 of 13 corrections to be decided")
    assert figures(browser)["leak"] == "7 no decision yet" and "%" not in browser.text(".figures")
    first, second, third = (f"Step 3, conversation {number}, message 3" for number in (1, 2, 3))
    assert browser.text(f"{CARDS} .before .message.student .said") == "Answer 1 as correct_student."

    press(browser, first, "edit-it")
    assert browser.one("textarea.edit").get_property("value") == "What could you call the person who sells bread?"
    browser.fill("textarea.edit", "  ")
    press(browser, first, "save")
    browser.until_text(f"{CARDS} [role=alert]", "Write the message")
    browser.fill("textarea.edit", "What is her job, <b>do you think</b>?")
    press(browser, first, "save")
    browser.until_text(f"{CARDS} .decided", "edited")
    press(browser, second, "reject")
    browser.until_text(f"{CARDS} .decided", "rejected")
    press(browser, third, "fine")
    browser.until_text(f"{CARDS} .decided", "rejected: the message was fine")
    browser.until_text("#undecided", "10 of 13")
    assert browser.driver.execute_script("return document.activeElement.classList.contains('correction-card')")

    browser.driver.refresh()
    browser.until_text("#undecided", "10 of 13")
    assert all(first not in heading.text for heading in browser.all(f"{CARDS} h3")), "decided ones make room"
    assert figures(browser) == {
        "false correction": "3 0 % 1 0 0 1 1",
        "ignores error": "3 0 % 1 0 0 1 0",
        "leak": "7 100 % 1 0 1 0 0",
        "all": "13 33 % 3 0 1 2 1",
    }
    browser.fill("#decision", "edit")
    browser.wait(lambda: len(browser.all(CARDS)) == 1, "the edited one alone")
    assert browser.text(".version.correction .said") == "What is her job, <b>do you think</b>?"
    assert browser.text(".version.refused s") == "What could you call the person who sells bread?"
    lines = [(line["decision"], line["text"], line["message_was_fine"]) for line in decisions_in(run)]
    edited = ("edit", "What is her job, <b>do you think</b>?", False)
    assert lines == [edited, ("reject", "", False), ("reject", "", True)]

    press(browser, first, "accept")
    browser.until_text(f"{CARDS} .decided", "accepted")
    assert len(decisions_in(run)) == 4 and decisions_in(run)[-1]["decision"] == "accept"


def test_the_next_page_passes_over_nothing_and_a_new_step_is_told(browser: Browser, url: str, run: Path) -> None:
    browser.open(f"{url}/#/desk")
    browser.until_text(".pager", "1–10 of 13")
    for heading in ("Step 3, conversation 1,", "Step 3, conversation 2,"):
        press(browser, heading, "accept")
    browser.until_text("#undecided", "11 of 13")
    browser.click(".pager button", "Next")
    browser.until_text(".pager", "9–11 of 11")
    assert [heading.text.partition(", message")[0] for heading in browser.all(f"{CARDS} h3")] == [
        f"Step 1, conversation {number}" for number in (2, 3, 6)
    ]
    write_rollouts(run, 3, 0, supervised(3))
    browser.click("[role=status] button", "Show its corrections")
    browser.until_text("#undecided", "15 of 17")


def test_a_decision_that_cannot_be_written_is_told_and_the_text_kept(browser: Browser, url: str, run: Path) -> None:
    (run / "correction_decisions.jsonl").mkdir()
    browser.open(f"{url}/#/desk?decision=all")
    press(browser, "Step 3, conversation 1,", "edit-it")
    browser.fill("textarea.edit", "A long thought.")
    press(browser, "Step 3, conversation 1,", "save")
    browser.until_text(f"{CARDS} [role=alert]", "correction_decisions.jsonl: Is a directory")
    assert browser.one("textarea.edit").get_property("value") == "A long thought."
    assert all("507" in complaint for complaint in browser.complaints())
    (run / "correction_decisions.jsonl").rmdir()
    press(browser, "Step 3, conversation 1,", "save")
    browser.until_text(f"{CARDS} .decided", "edited")
    assert [line["text"] for line in decisions_in(run)] == ["A long thought."]


def test_markup_in_a_correction_is_shown_as_text_and_a_narrow_window_holds_it(run: Path) -> None:
    with open_browser(420, 900, dark=True) as browser, shown(run) as url:
        for page in ("desk", "conversation?where=step-2&id=run-step000002-rank0of1-abcd-0006", "run"):
            browser.open(f"{url}/#/{page}")
            browser.one(".page > *")
            if page != "run":
                browser.until_text(".version.correction .said", HOSTILE["markup"])
            state = "return [window.owned ?? null, document.querySelectorAll('#owned, main script, main img').length]"
            assert browser.driver.execute_script(state) == [None, 0]
            width = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert browser.driver.execute_script(width) == 0
        assert not browser.complaints()
