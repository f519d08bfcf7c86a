"""Tests of the figures on the page in a headless Chromium: steps, rewards below 0, and held-out lessons."""

import json
import re
from pathlib import Path

from classroom_rl.results.rollout_files import write_rollouts
from tests.support.browser import Browser
from tests.support.synthetic_run import step_line
from tests.support.viewer_run import LESSONS, conversation, make_run, shown

ROWS = ".list tbody tr"


def test_a_step_has_one_number_everywhere(browser: Browser, url: str) -> None:
    """The last of three logged steps, its conversations in lists, choices and records, and a click on its chart."""
    browser.open(url)
    browser.until_text(".tile", "3\nof 4")
    browser.driver.execute_script("document.querySelector('.chart svg').focus()")
    browser.one(".chart svg").send_keys("\ue014" * 3 + "\ue007")
    browser.until_text(".summary h2", "step 3")
    selected = browser.driver.execute_script(
        "const at = document.getElementById('where'); return at.options[at.selectedIndex].text"
    )
    assert selected == "step 3"
    browser.open(f"{url}/#/conversations?where=training&sort=longest")
    browser.one(ROWS)
    column = [heading.text for heading in browser.all(".list th")].index("Step")
    steps = {row.find_elements("css selector", "td")[column].text for row in browser.all(ROWS)}
    assert steps == {"1", "2", "3"}
    browser.open(f"{url}/#/conversation?where=step-2&id=run-step000002-rank0of1-abcd-0000")
    browser.click("summary", "Record")
    browser.until_text("dl", "3")
    assert browser.text(".crumbs a") == "step 3"
    record = dict(zip(texts(browser, "dt"), texts(browser, "dd"), strict=True))
    assert record["step"] == "3"


def texts(browser: Browser, selector: str) -> list[str]:
    return [element.text for element in browser.all(f"details[open] > dl {selector}")]


def test_held_out_lessons_have_a_chart_of_their_own(browser: Browser, shared_run: Path, url: str) -> None:
    browser.open(url)
    browser.until_text(".tile", "3\nof 4")
    training, held_out = browser.all(".chart")[:2]
    assert not training.find_elements("css selector", "circle.mark")
    assert len(held_out.find_elements("css selector", "circle.mark")) == 4
    means = {
        (name, sampling): metrics[sampling]["reward"]["mean"]
        for name in ("before", "after")
        for metrics in [json.loads((shared_run / "eval" / name / "metrics.json").read_text())]
        for sampling in ("sampled", "greedy")
    }
    legend = held_out.find_element("css selector", ".legend").text
    assert all(f"{sampling}, {name} {round(mean, 3):g}" in legend for (name, sampling), mean in means.items())


def with_penalties(folder: Path) -> Path:
    """A run whose rewards go below 0 and whose bands do, too."""
    run = make_run(folder, steps=2)
    lines = [step_line(step + 1, -0.3 + 0.2 * step, reward_std=0.5) for step in range(2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [
        conversation(1, i, LESSONS[0]).model_copy(update={"reward": reward}) for i, reward in enumerate(PENALISED)
    ]
    write_rollouts(run, 1, 0, records)
    return run


PENALISED = (-0.72, -0.3, -0.01, 0.0, 0.5, 1.0, None)


def test_rewards_below_0_are_shown_where_they_are(browser: Browser, tmp_path: Path) -> None:
    with shown(with_penalties(tmp_path / "run")) as address:
        browser.open(address)
        browser.one(".chart path.band")
        ticks = [float(tick.text) for tick in browser.all(".chart")[0].find_elements("css selector", "text.tick")]
        assert min(ticks) <= -0.8 and max(ticks) >= 0.4
        band = browser.all(".chart path.band")[0].get_attribute("d")
        assert len(set(re.findall(r"[ML]\S+ (\S+?)(?=[MLZ])", band))) == 4  # no two corners at the chart's edge
        browser.open(f"{address}/#/conversations?where=step-1")
        browser.one(".spread .fill")
        assert browser.text(".spread figcaption").split() == ["-0.8", "reward", "1"] and browser.all(".spread .zero")
        heights = [float(bar.get_attribute("height")) for bar in browser.all(".spread .fill")]
        bars = [i for i, height in enumerate(heights) if height]
        assert len(heights) == 18 and bars == [0, 5, 7, 8, 13, 17]
        browser.all(".spread .bar .fill")[5].click()
        browser.until_text("#count", "1 of 7 conversations, mean reward -0.300")
        assert browser.text(".spread figcaption").split() == ["-0.8", "reward", "1"]
        group = f"{address}/#/group?where=step-1&problem_id={conversation(1, 0, LESSONS[0]).problem_id}"
        browser.open(group)
        browser.click(".toggle", "Best first")
        browser.wait(
            lambda: (
                [reward.text for reward in browser.all(".column .reward")]
                == "1.00 0.50 0.00 -0.01 -0.30 -0.72 none".split()
            ),
            "those without a reward last",
        )
