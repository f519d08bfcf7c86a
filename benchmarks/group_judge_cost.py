"""What it costs to judge a conversation by itself and in a group, with the language tutor's prompts.

    python -m benchmarks.group_judge_cost [--group 8] [--anchor-share 0.03]

The lessons are those of docs/conversations.yaml, and each twice and four times as long. A scripted endpoint answers at
the length that the prompts allow, and counts a token for every four bytes of prompt and answer; the prices are 0.30 and
2.50 dollars per million of them. A real judge's tokenizer, and what it makes of the allowed words, differ.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from classroom_rl.config.base import lesson_plans
from classroom_rl.config.load import ROOT
from classroom_rl.config.models import JudgeModelConfig
from classroom_rl.engines.api.call_ledger import CallLedger
from classroom_rl.engines.api.chat_api import ChatApi
from classroom_rl.judges.model_judge import KeptReplies, ModelJudge
from classroom_rl.judges.verdicts import CRITERIA, parse_group, parse_verdict, reason_key
from classroom_rl.rollout.datasets import load_problems
from tests.support.judge_endpoint import Behaviour, judge_endpoint, says

RULE = "pedagogical_eval"
PROMPT = "prompt_templates/judges/language_tutor_eval.txt"
WORDS_OF_A_REASON, WORDS_OF_COMPARISON, WORDS_IN_GROUP = 80, 100, 20
"""The most that the two prompts allow: for each criterion of a single call, for the comparison of a group, and for each
of its conversations."""

Dialogue = list[dict[str, str]]


def lessons() -> dict[str, tuple[str, Dialogue]]:
    """By id: the plan as the judge reads it, and a conversation on it."""
    plans = {}
    for split in ("train", "test"):
        source = lesson_plans(split)
        texts = [problem.text for problem in load_problems([source])]
        rows = Path(ROOT / source.name_or_path).read_text(encoding="utf-8").splitlines()
        plans |= dict(zip((json.loads(row)["id"] for row in rows), texts, strict=True))
    by_plan = {}
    for lesson in yaml.safe_load((ROOT / "docs/conversations.yaml").read_text(encoding="utf-8")):
        roles = ("teacher", "student")
        dialogue = [{"role": roles[index % 2], "content": text} for index, text in enumerate(lesson["turns"])]
        by_plan[lesson["plan"]] = (plans[lesson["plan"]], dialogue)
    return by_plan


def words(count: int) -> str:
    """So many words of five letters."""
    return " ".join(["messy"] * count)


def answers(body: Mapping[str, Any], nth: int) -> Behaviour:
    """A verdict at the length that the prompt allows."""
    scores = dict.fromkeys(CRITERIA, 0.5)
    schema = body["response_format"]["json_schema"]["schema"]["properties"]
    if "ranking" not in schema:
        reasons = {reason_key(name): words(WORDS_OF_A_REASON) for name in CRITERIA}
        return says(json.dumps({**reasons, **scores}))
    size = int(schema["ranking"]["description"].split()[2].rstrip(","))
    entries = [{"number": i + 1, "reasoning": words(WORDS_IN_GROUP), **scores} for i in range(size)]
    ranking = list(range(1, size + 1))
    return says(
        json.dumps({"comparison": words(WORDS_OF_COMPARISON), "ranking": ranking, "conversations": entries}, indent=2)
    )


async def tokens_and_dollars(
    url: str, folder: Path, problem: str, group: Sequence[Dialogue], together: bool
) -> tuple[float, float, float]:
    """Prompt tokens, answer tokens and dollars for each conversation of a group."""
    config = JudgeModelConfig(model_name_or_path="scripted", base_url=url)
    ledger = CallLedger(folder / f"{together}.sqlite")
    with closing(ledger):
        api = ChatApi(config, ledger, "judge")
        judge = ModelJudge(config, {RULE: str(ROOT / PROMPT)}, 2048, KeptReplies(config, ledger, api))
        before = ledger.prompt_tokens, ledger.completion_tokens, ledger.spent_usd
        if together:
            parse_group(RULE, 0, await judge.judge_group(RULE, group, problem, 0), len(group))
        else:
            for dialogue in group:
                parse_verdict(RULE, 0, await judge.judge(RULE, dialogue, problem, 0))
        after = ledger.prompt_tokens, ledger.completion_tokens, ledger.spent_usd
        return tuple((now - then) / len(group) for now, then in zip(after, before, strict=True))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--anchor-share", type=float, default=JudgeModelConfig().anchor_share)
    arguments = parser.parse_args()
    print(f"tokens and dollars per conversation; groups of {arguments.group}, {arguments.anchor_share:.0%} anchors")
    print("lesson   tokens of it   alone: prompt  answer      $   group: prompt  answer      $   ratio   with anchors")
    with judge_endpoint(answers) as endpoint, tempfile.TemporaryDirectory() as root:
        for times in (1, 2, 4):
            rows = []
            for name, (problem, dialogue) in lessons().items():
                group = [[*dialogue * times, {"role": "teacher", "content": str(i)}] for i in range(arguments.group)]
                folder = Path(root) / f"{name}-{times}"
                folder.mkdir()
                alone, grouped = (
                    asyncio.run(tokens_and_dollars(endpoint.url, folder, problem, group, together))
                    for together in (False, True)
                )
                rows.append(
                    (sum(len(message["content"].encode()) for message in dialogue) * times / 4, *alone, *grouped)
                )
            lesson_tokens, *figures = (fmean(column) for column in zip(*rows, strict=True))
            ratio = figures[5] / figures[2]
            cells = "{:12.0f} {:16.0f} {:7.0f} {:.5f} {:15.0f} {:7.0f} {:.5f}".format(lesson_tokens, *figures)
            print(f"× {times} {cells} {ratio:9.2f} {ratio + arguments.anchor_share:14.2f}")


if __name__ == "__main__":
    main()
