"""The search for a better prompt: with scripted models it finds one, within its budget, and plays nothing twice."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.environments.classroom.prompt_check import check_prompts
from classroom_rl.environments.toy_language.lessons import make_lessons, render_problem
from classroom_rl.errors import ConfigError, DataError, ProviderFailure
from classroom_rl.evaluation.prompt_search import PromptAdapter, example_of
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.verdicts import Verdict
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.store.journal import read_journal
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.sampling_service import SamplingService
from tests.support.configs import loaded, training
from tests.support.judge_endpoint import JudgeEndpoint, fails, judge_endpoint, says
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import SCORES, Room
from tests.support.synthetic_run import record_of

FIRST = "You are a teacher. {{ problem }}"
BROKEN, BETTER = "You ask. {{ problem }} {{ lesson }}", "You ask the student a question. {{ problem }}"
KEY, THRESHOLD = "zanzibar", 0.2718
TRAIN, HELD_OUT = (
    [render_problem(lesson) for lesson in group[:count]] for group, count in zip(make_lessons(1), (12, 7), strict=True)
)
SEARCH = {"conversations": 40, "selection_lessons": 4, "minibatch_lessons": 3, "max_rounds": 5}


class Search:
    """A search in a folder of its own, whose scripted models count what they are asked."""

    def __init__(self, tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.tokenizer, self.run, self.asked = folder, tokenizer, folder / "run", 0
        (folder / "first.txt").write_text(FIRST)
        for name, lessons in (("train", TRAIN), ("heldout", HELD_OUT)):
            rows = [{"problem": text, "answer": KEY} for text in lessons]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        async def open_service(config: EvalConfig, _: object, folder: Path) -> SamplingService:
            return self.room(folder).open(config.generation)

        monkeypatch.setattr("classroom_rl.server.sampling_service.open_service", open_service)

    def room(self, folder: Path) -> Room:
        room = Room(self.tokenizer, folder)
        room.teacher = ScriptedEngine(self.tokenizer, self.teach)
        room.judge = ScriptedJudge(self.judge)
        return room

    def teach(self, prompt: str) -> str:
        self.asked += 1
        if "The template now" in prompt:
            return f"Well:\n```\n{BETTER}\n```"
        return "What do you say?" if "question" in prompt else "I like it."

    def judge(self, rule: str, conversation: list[dict[str, str]], attempt: int) -> str:
        good = "What" in conversation[0]["content"]
        reasons = {"forward_progression_reasoning": f"It asks. {KEY.title()} is right." if good else "It never asks."}
        return json.dumps(SCORES | reasons | {"forward_progression_score": 1 if good else 0})

    def config(self, *overrides: str) -> EvalConfig:
        return loaded(
            "eval",
            *(
                "server_url=null",
                "samplings=[sampled]",
                "num_samples_per_problem=1",
                f"generation.teacher_prompt_path={self.folder / 'first.txt'}",
            ),
            *(
                f"dataset.eval_datasets=[{{name_or_path: {self.folder / 'heldout.jsonl'}}}]",
                f"logging.save_dir={self.run}",
            ),
            f"prompt_search.train_datasets=[{{name_or_path: {self.folder / 'train.jsonl'}}}]",
            f"generation.low_score_threshold={THRESHOLD}",
            *(f"prompt_search.{name}={value}" for name, value in SEARCH.items()),
            *overrides,
        )

    def config_at(self, endpoint: JudgeEndpoint) -> EvalConfig:
        model = "prompt_search.reflection_model"
        return self.config(f"{model}.base_url={endpoint.url}", f"{model}.model_name_or_path=mirror")

    def played(self) -> list[str]:
        """The ids of the conversations that were played."""
        return [
            event["conversation"]
            for event in read_journal(self.run / "journal.jsonl")
            if event["event"] == "conversation"
        ]


@pytest.fixture
def search(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    return Search(tokenizer, tmp_path, monkeypatch)


def proposes(*prompts: str):
    """A reflection model that gives these prompts one after the other, and then the last."""
    replies: Iterator[str] = iter(prompts)

    def script(body: dict, nth: int):
        return says(f"It never asks.\n```jinja\n{next(replies, prompts[-1])}\n```")

    return script


def test_a_better_prompt_is_found_and_measured_on_held_out_lessons(search: Search, capsys: pytest.CaptureFixture):
    pytest.importorskip("gepa")
    with judge_endpoint(proposes(BROKEN, BETTER)) as mirror:
        metrics = evaluate(search.config_at(mirror))
    result, printed = metrics["prompt_search"], capsys.readouterr().out
    first, better = result["candidates"]
    assert better["reward"] > first["reward"] and result["best"] == 1
    (reason,) = result["refused"]
    assert "the template uses lesson. It may use: include_thinking, problem, student_name" in reason
    assert BROKEN in mirror.calls[1].prompt and reason in mirror.calls[1].prompt, "it is told why"
    (change,) = metrics["sampled"]["paired"]["reward"]
    assert change["mean"] == pytest.approx(0.4) and change["lessons"] == len(HELD_OUT) and change["ci95"] is not None
    assert "Search: " in printed and "against base, lesson by lesson" in printed
    held_out = 2 * len(HELD_OUT)
    assert result["conversations"] == len(search.played()) - held_out <= SEARCH["conversations"]
    assert result["paid"]["reflection"]["cost_usd"] == pytest.approx(mirror.billed_usd)
    assert result["teacher_tokens"] > result["conversations"]

    requests = "\n".join(call.prompt for call in mirror.calls)
    assert "It never asks" in requests and "[the answer] is right" in requests
    assert any(text in requests for text in TRAIN) and not any(text in requests for text in HELD_OUT)
    assert KEY not in requests.lower() and str(THRESHOLD) not in requests

    best = search.run / "best_prompt.txt"
    assert best.read_text() == BETTER
    check_prompts(training(f"generation.teacher_prompt_path={best}").generation, judge_reads_templates=False)


def test_an_interrupted_search_goes_on_and_plays_nothing_twice(search: Search):
    pytest.importorskip("gepa")
    prompts = [BETTER, "You ask twice. {{ problem }}", "You ask thrice. {{ problem }}"]
    with judge_endpoint(proposes(*prompts)) as mirror:
        uninterrupted = evaluate(search.config_at(mirror))
        asked, played, calls = search.asked, search.played(), len(mirror.calls)
        assert evaluate(search.config_at(mirror))["prompt_search"] == uninterrupted["prompt_search"]
        assert search.asked == asked and search.played() == played and len(mirror.calls) == calls

    replies = proposes(*prompts)
    search.run, search.asked, broken = search.folder / "interrupted", 0, True

    def script(body: dict, nth: int):
        return fails(401) if broken and search.asked > asked // 2 else replies(body, nth)

    with judge_endpoint(script) as mirror:
        with pytest.raises(ProviderFailure):
            evaluate(search.config_at(mirror))
        assert 0 < len(search.played()) < len(played) and not (search.run / "metrics.json").exists()
        broken = False
        resumed = evaluate(search.config_at(mirror))
    assert sorted(search.played()) == sorted(played) and search.asked == asked
    assert resumed["sampled"] == uninterrupted["sampled"]
    assert resumed["prompt_search"]["candidates"] == uninterrupted["prompt_search"]["candidates"]


def test_the_budget_is_never_exceeded_and_useless_proposals_end_the_search(search: Search):
    pytest.importorskip("gepa")
    number = iter(range(1000))
    with judge_endpoint(lambda body, nth: says(f"```\nI ask {next(number)}. {{{{ problem }}}}\n```")) as mirror:
        for budget in (14, 25):
            search.run = search.folder / str(budget)
            config = search.config_at(mirror)
            config.prompt_search.conversations, config.prompt_search.max_rounds = budget, 50
            result = evaluate(config)["prompt_search"]
            assert budget - 10 < result["conversations"] == len(search.played()) - len(HELD_OUT) <= budget
            assert result["best"] == 0 and (search.run / "best_prompt.txt").read_text() == FIRST
    search.run = search.folder / "useless"
    with judge_endpoint(proposes("{{ problem")) as mirror:
        result = evaluate(search.config_at(mirror))["prompt_search"]
    assert result["rounds"] == 5 and len(result["refused"]) == len(mirror.calls) == 15, "three replies a round"


def test_the_teacher_proposes_its_own_prompt_and_its_replies_are_kept(search: Search):
    pytest.importorskip("gepa")
    metrics = evaluate(search.config())
    assert (search.run / "best_prompt.txt").read_text() == BETTER
    asked = search.asked
    repeated = evaluate(search.config())
    assert repeated["prompt_search"] == metrics["prompt_search"] and search.asked == asked


GUARD = f"{{% if problem | length > 1 and problem != {TRAIN[0]!r} %}}"
UNUSABLE = {
    "{{ problem": "does not parse",
    "Ask.": "does not use problem",
    "{{ problem }} {{ answer }}": "uses answer",
    "{{ problem }} {% include 'other.txt' %}": "does not parse",
    "{{ problem[9999] }}": "has no element 9999",
    "{{ problem }}" + " ask" * 2000: "makes a teacher prompt of",
    f"{GUARD}{{{{ problem[9999] }}}}{{% endif %}}": "for a lesson that is not among these",
    BETTER: None,
}


@pytest.mark.parametrize("prompt", UNUSABLE)
def test_a_proposal_has_to_be_a_prompt_for_every_lesson(search: Search, prompt: str):
    lessons = [Problem.of(text) for text in TRAIN[:1]], [Problem.of(text) for text in HELD_OUT[:1]]

    async def reason() -> str | None:
        service = search.room(search.folder).open(search.config().generation)
        with closing(CallLedger(search.folder / "calls.sqlite")) as ledger:
            return PromptAdapter(search.config(), service, search.folder, *lessons, ledger).why_unusable(prompt)

    refusal, expected = asyncio.run(reason()), UNUSABLE[prompt]
    assert refusal is None if expected is None else re.search(expected, refusal)
    assert refusal is None or (str(search.folder) not in refusal and HELD_OUT[0][:30] not in refusal)


@pytest.mark.parametrize(
    ("answer", "reason", "shown"),
    [
        ("", "It says 12.", "It says 12."),
        ("12", "It says 12, not 121.", "It says [the answer], not 121."),
        ("so \\boxed{12}", "It says 12.", "It says [the answer]."),
        ("a+b", "A+B is said.", "[the answer] is said."),
    ],
)
def test_the_reference_answer_is_removed_from_reasons(answer: str, reason: str, shown: str):
    record = record_of("2 + 10", [Turn("teacher", "<think>12</think>Well?")])
    verdicts = [Verdict("leak", 0, accepted=False, reasons={"leak": reason}), Verdict("leak", 1, error="broken")]
    example = example_of(record.model_copy(update={"verdicts": verdicts, "answer": answer}))
    assert example["verdicts"] == [{"rule": "leak", "accepted": False, "scores": {}, "reasons": [shown]}]
    assert example["messages"] == [{"role": "teacher", "content": "Well?"}]


REFUSED = [
    (["server_url=http://h:1"], "server_url is set beside prompt_search"),
    (["samplings=[sampled,supervised]", "supervisor_model.model_name_or_path=rubric"], "names supervised"),
    (["benchmark.name=mrbench"], "prompt_search is set beside benchmark"),
    (["prompt_search.conversations=13"], "conversations is 13; the first proposal alone may cost 14"),
    (["generation.schedule=phased"], "the teacher may be asleep"),
    (["prompt_search.reflection_model.model_name_or_path=m"], "a model for an engine"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_be_searched_is_refused(search: Search, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        search.config(*overrides)


def test_lessons_and_package_are_checked_before_models_are_loaded(search: Search, monkeypatch: pytest.MonkeyPatch):
    config = search.config()
    monkeypatch.setitem(sys.modules, "gepa", None)
    with pytest.raises(ConfigError, match="pip install gepa==0"):
        evaluate(config)
    monkeypatch.setitem(sys.modules, "gepa", sys)
    config.prompt_search.selection_lessons = 10
    with pytest.raises(ConfigError, match="has 12 lessons"):
        evaluate(config)
    config.prompt_search.train_datasets = config.dataset.eval_datasets
    with pytest.raises(DataError, match="7 of the held-out lessons are among"):
        evaluate(config)
