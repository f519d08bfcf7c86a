"""Run folders for the viewer's tests, a small one with everything in it (hostile text included) and a large one, and a
client of the viewer."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from starlette.testclient import TestClient

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.verdicts import Verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.learning import Movement, write_learning
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.results.run_folder import JUDGE_CHECKS_NAME
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.view_only import create_viewer
from tests.conftest import free_port
from tests.support.scripted_room import serving
from tests.support.synthetic_run import FAILED, record_of, scored, step_line, write_evaluation, write_training

HOSTILE = {
    "markup": "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'><b id=\"owned\">bold</b>",
    "emoji": "Bravo 👩🏽‍🏫🎉 – 🇫🇷!",
    "right to left": "أريد فنجان قهوة من فضلك \u202e abc",
    "long": "word " * 40_000,
    "one word": "ä" * 20_000,
    "controls": "nul-ish \u0001 tab\tline\nline \u2028 end",
}
PERSONAS = {"correct_student": "correct.txt", "error_student": "error.txt"}
CONFIG = {
    "teacher_model": {"model_name_or_path": "no/such/model"},
    "generation": {"student_personas_prompts_paths": PERSONAS, "student_error_rate": 0.2},
    "train": {"max_steps": 4, "num_samples_per_problem": 4},
}
GROUP = 4
LESSONS = ("Lesson: at the market\nPlan: you, brother", "Lesson: a walk\nPlan: you, sister")
HOSTILE_LESSON = f"Lesson: {HOSTILE['markup']}\n{HOSTILE['right to left']}"
CONVERSATIONS = 10_000
HERE = "http://127.0.0.1:8005"


def client_on(folder: Path, token: str | None = None, base_url: str = HERE) -> TestClient:
    return TestClient(create_viewer(folder, token), base_url=base_url, raise_server_exceptions=False)


def listed(http: TestClient, **query: object) -> dict:
    answer = http.get("/api/conversations", params={"where": "step-1", **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


def turns_of(words: str, personas: Sequence[str], step: int) -> list[Turn]:
    """The teacher's message, then each persona's message with the teacher's answer; teacher turns have three tokens."""
    policy = PolicyVersion("run", step)
    turns = [Turn("teacher", words, tokens=3, span=(0, 3), policy=policy)]
    for i, persona in enumerate(personas, start=1):
        turns.append(Turn("student", f"Answer {i} as {persona}.", persona, tokens=5))
        turns.append(
            Turn("teacher", f"<think>Plan {i}.</think>Go on {i}.", tokens=3, span=(5 * i, 5 * i + 3), policy=policy)
        )
    return turns


def conversation(step: int, index: int, problem: str, words: str = "Hello.", **more: Any) -> ConversationRecord:
    """A conversation. Odd indices have the error persona, the third of each group has no verdict, and rewards rise with
    index and step."""
    personas = ("correct_student", "error_student" if index % 2 else "correct_student")
    judged = index % GROUP != 2
    reward = round(min(1.0, 0.1 * (index % GROUP + 1) + 0.1 * step), 4) if judged else None
    verdicts: list[Verdict] = [scored(reward, reward, 10 * reward)] if judged else [FAILED]
    record = record_of(problem, turns_of(words, personas, step), verdicts, index, reward, rejected=reward == 0.1)
    request = more.pop("request_id", f"run-step{step:06d}-rank0of1-abcd")
    ids = list(range(3, 3 + 13))
    tokens = {
        "prompt_ids": [1, 2],
        "completion_ids": ids,
        "mask": [1 if i % 5 < 3 else 0 for i in range(len(ids))],
        "logprobs": [-0.5 if i % 5 < 3 else 0.0 for i in range(len(ids))],
    }
    named = {"id": f"{request}-{index:04d}", "request_id": request, "step": step}
    return record.model_copy(update=named | tokens | more)


def make_run(folder: Path, steps: int = 3) -> Path:
    """A run with two lessons and four conversations on each per step, hostile texts in the first step, and both
    evaluations."""
    write_training(folder, [step_line(step + 1, 0.2 + 0.2 * step) for step in range(steps)], CONFIG)
    for step in range(steps):
        records = [conversation(step, i, LESSONS[i // GROUP]) for i in range(GROUP * len(LESSONS))]
        if step == 0:
            first = len(records)
            records += [conversation(step, first + i, HOSTILE_LESSON, text) for i, text in enumerate(HOSTILE.values())]
        write_rollouts(folder, step, 0, records)
    for name, lift in (("before", 0), ("after", 4)):
        sampled = [conversation(lift, i, LESSONS[i // GROUP], request_id=f"eval-{name}") for i in range(2 * GROUP)]
        greedy = [conversation(lift, 0, LESSONS[0], request_id=f"eval-{name}-greedy")]
        write_evaluation(folder / "eval" / name, {"sampled": sampled, "greedy": greedy})
    return folder


def make_large_run(folder: Path, conversations: int = CONVERSATIONS, steps: int = 40) -> Path:
    """A run with this many conversations of 15 messages and about 1,500 tokens each, over this many steps."""
    write_training(folder, [step_line(step + 1, 0.5) for step in range(steps)], CONFIG)
    words = "This is a message of the length that messages have in a lesson. " * 6
    ids = list(range(1500))
    tokens = {"prompt_ids": ids[:300], "completion_ids": ids, "mask": [1] * 1500, "logprobs": [-0.25] * 1500}
    count = conversations // steps
    records = []
    for i in range(count):
        record = conversation(0, i, f"Lesson: number {i // 8}\nPlan: {words}", words)
        talk = [
            Turn(turn.role, words, turn.persona, 90, span=turn.span, policy=turn.policy) for turn in record.turns * 3
        ]
        records.append(record.model_copy(update=tokens | {"turns": talk}))
    first = write_rollouts(folder, 0, 0, records)
    for step in range(1, steps):
        _copy_for_step(first, step)
    return folder


def _copy_for_step(path: Path, step: int) -> None:
    table = pq.read_table(path)
    columns = {
        "id": [f"run-step{step:06d}-rank0of1-abcd-{i:04d}" for i in range(len(table))],
        "step": [step] * len(table),
    }
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    pq.write_table(table, path.with_name(f"step_{step:06d}-0.parquet"), row_group_size=128)


def write_journal(folder: Path, events: Sequence[dict[str, Any]]) -> Path:
    """Write a journal with these events; an event without a time gets a late one."""
    path = folder / "journal.jsonl"
    lines = [{"event": event["event"], "time": event.get("time", 4e9), **event} for event in events]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def add_guards(folder: Path) -> None:
    """Add the files of the guards: whether the tutor learned, and three checks of the judge, the second with two
    warnings, the third without a score."""
    write_learning(folder, Movement(0.0, 7, 7))
    warned = ["The judge can be fooled: b.", "The judge may be being fooled: a."]
    checks = [{"step": 0, "warnings": []}, {"step": 2, "warnings": warned}]
    checks = [check | {"gap": {"mean": 0.1}, "canaries": {"praise": 0.9}} for check in checks]
    checks.append({"step": 4, "warnings": [], "gap": {"mean": None}, "canaries": {"praise": None}})
    text = "".join(json.dumps(check) + "\n" for check in checks)
    (folder / JUDGE_CHECKS_NAME).write_text(text, encoding="utf-8")


def add_tokenizer(folder: Path) -> None:
    """Add a tokenizer of the trained model, whose tokens are t0 to t19."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(20)}, unk_token="t0"))
    tokenizer.decoder = decoders.Fuse()
    (folder / "model").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))


@contextmanager
def shown(folder: Path, token: str | None = None) -> Iterator[str]:
    """Serve the page of a run folder until the end of the block; yields its address."""
    with serving(create_viewer(folder, token), free_port()) as address:
        yield address


def one(http: TestClient, index: int, where: str = "step-1", route: str = "conversation") -> dict:
    page = listed(http, where=where)
    answer = http.get(f"/api/{route}", params={"where": where, "id": page["columns"]["id"][index]})
    assert answer.status_code == 200, answer.text
    return answer.json()
