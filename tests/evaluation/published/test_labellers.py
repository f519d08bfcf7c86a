"""Judges that are asked closed questions about replies: failures, costs, interruptions; and labels without a model."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.errors import ConfigError, ProviderFailure, SpendingCapReached
from classroom_rl.evaluation.published.labellers import (
    JudgeAnswers,
    MessageLabels,
    ask_judge,
    choice_schema,
    ledger_name,
)
from classroom_rl.judges.moves.train import train
from classroom_rl.judges.readings import Exchange
from tests.support.judge_endpoint import Behaviour, JudgeEndpoint, cut_off, fails, judge_endpoint, says
from tests.support.tutor_messages import write_data

JUDGE, CHOICES = "owner/judge", {"tone": ("kind", "rude")}
KIND = json.dumps({"reasoning": "…", "tone": "kind"})
PROMPTS = [f"Is reply {number} kind?" for number in range(12)]


def ask(
    folder: Path, endpoint: JudgeEndpoint, prompts: list[str] = PROMPTS, max_tokens: int = 100, **options: Any
) -> JudgeAnswers:
    judge = JudgeModelConfig(JUDGE, base_url=endpoint.url, **options)
    return asyncio.run(ask_judge(judge, prompts, CHOICES, max_tokens, folder))


def prompt_of(body: dict) -> str:
    return body["messages"][0]["content"]


def test_every_reply_is_asked_about_in_one_call_with_a_schema(tmp_path: Path):
    with judge_endpoint(lambda body, _: says(KIND)) as endpoint:
        answers = ask(tmp_path, endpoint)
    assert answers.by_prompt == [{"tone": "kind"}] * 12 and sorted(map(prompt_of, bodies(endpoint))) == sorted(PROMPTS)
    sent = bodies(endpoint)[0]["response_format"]["json_schema"]
    assert sent["strict"] and sent["schema"] == choice_schema(CHOICES)
    assert answers.about() == {"asked": 12, "answered": 12, "failures": {}, "paid": answers.paid}
    assert answers.paid["cost_usd"] == pytest.approx(endpoint.billed_usd)


def bodies(endpoint: JudgeEndpoint) -> list[dict]:
    return [call.body for call in endpoint.calls]


def test_a_judge_that_takes_no_schema_is_asked_in_words(tmp_path: Path):
    with judge_endpoint(lambda body, _: says(KIND)) as endpoint:
        ask(tmp_path, endpoint, response_format="text")
    assert not any("response_format" in body for body in bodies(endpoint))


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        (says("I would say it is fine."), "unreadable"),
        (says(json.dumps({"reasoning": "…", "tone": "neutral"})), "unreadable"),
        (says(json.dumps({"reasoning": "…"})), "unreadable"),
        (cut_off(KIND), "unreadable"),
        (fails(400, {"message": "flagged by moderation", "code": 400}), "content refused"),
        (fails(400, {"message": "This model's maximum context length is 100 tokens"}), "too long"),
    ],
)
def test_a_failed_call_is_no_verdict_and_is_counted_by_its_cause(tmp_path: Path, behaviour: Behaviour, cause: str):
    with judge_endpoint(lambda body, _: behaviour if prompt_of(body) == PROMPTS[0] else says(KIND)) as endpoint:
        answers = ask(tmp_path, endpoint)
    assert answers.by_prompt == [None, *[{"tone": "kind"}] * 11] and answers.failures == {cause: 1}


def test_an_unreadable_reply_is_asked_for_again_up_to_the_limit(tmp_path: Path):
    with judge_endpoint(lambda body, nth: says(KIND if nth == 2 else "prose")) as endpoint:
        assert ask(tmp_path, endpoint).failures == {} and len(endpoint.calls) == 36


def test_the_same_questions_again_are_not_paid_for_twice(tmp_path: Path):
    with judge_endpoint(lambda body, _: says(KIND)) as endpoint:
        first, second = ask(tmp_path, endpoint), ask(tmp_path, endpoint, PROMPTS[::-1])
        assert len(endpoint.calls) == 12
    # The first run added the costs up call by call, the second one had the ledger do it: equal but for rounding.
    assert second.by_prompt == first.by_prompt and second.paid == pytest.approx(first.paid)


def test_after_an_interruption_only_the_rest_is_asked(tmp_path: Path):
    down = True

    def script(body: dict, _: int) -> Behaviour:
        return fails(401, "no such key") if down and prompt_of(body) == PROMPTS[5] else says(KIND)

    with judge_endpoint(script) as endpoint:
        with pytest.raises(ProviderFailure, match="refuses every request"):
            ask(tmp_path, endpoint, max_concurrent_requests=1)
        assert 0 < len(endpoint.of("says")) < 11
        down = False
        assert ask(tmp_path, endpoint).failures == {}
        assert len(endpoint.of("says")) == 12, "none of the paid ones again"


def test_a_judge_has_its_own_cap(tmp_path: Path):
    prices = {"usd_per_million_prompt_tokens": 0.3, "usd_per_million_completion_tokens": 2.5}
    with judge_endpoint(lambda body, _: says(KIND)) as endpoint:
        with pytest.raises(SpendingCapReached, match="is reached"):  # one request may cost up to 0.005
            ask(tmp_path, endpoint, max_tokens=2000, max_cost_usd=0.0051, **prices)
        assert 0 < len(endpoint.calls) < 12 and endpoint.billed_usd <= 0.0051


def test_ledgers_are_named_by_the_judge():
    names = {ledger_name(model) for model in ("a/b", "a-b", "../../etc/passwd", "ä", "x" * 300)}
    assert len(names) == 5 and all("/" not in name and len(name) < 120 and name[0] != "." for name in names)


def test_move_classifiers_that_were_trained_on_the_benchmark_are_refused(tmp_path: Path):
    mrbench = next(name for name in write_data(tmp_path) if "mrbench" in name.lower())
    train([mrbench], tmp_path / "readers", folds=4)
    generation = GenerationConfig(readers_path=str(tmp_path / "readers"))
    with pytest.raises(ConfigError, match="were trained on .*measures memory"):
        MessageLabels(generation, mrbench)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(Path(mrbench).read_text("utf-8").splitlines(keepends=True)[:60]), encoding="utf-8")
    labeller = MessageLabels(generation, str(part))
    about = labeller.about(["reveals_answer", "actionable", "hint"])
    assert about["by_readers"] == ["reveals_answer", "actionable"] and about["by_rules"] == ["hint"]
    assert labeller.reads("question", Exchange("Why?")) and not labeller.reads("question", Exchange("So it is."))
