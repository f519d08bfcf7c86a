"""A soak: batch after batch on one server with scripted engines, as a trainer asks for them. Memory, file descriptors,
threads and the time of a batch are to stay as they are.

Each batch publishes a policy, plays its conversations, asks for their rewards, and keeps them in a file as a trainer
does; every tenth also looks at the page.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import psutil
import requests

from classroom_rl.models.policy_folder import policies_folder, policy_path, remove_old_policies, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import write_rollouts
from classroom_rl.rollout.intervals import Estimate, student_t
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import JOURNAL_NAME
from classroom_rl.server.client import ClassroomClient
from tests.chaos.cases import Case, Result, Settings, table
from tests.chaos.programs import overrides_of, running_server
from tests.models.test_policy_folder import save_model

GROUPS, GROUP = 4, 8
WARM_UP = 0.3
"""The share of the batches that are played before anything is compared."""
_BLOCKS = 10
_LARGEST_GROWTH_KB, _LARGEST_SLOWDOWN = 16.0, 0.25
"""What is still flat: kilobytes per batch (the server keeps the place of every conversation in its journal), and the
share by which batches may become slower over the whole soak."""
_MEASURES = {"memory_kb": "memory, KB", "fds": "file descriptors", "threads": "threads", "seconds": "seconds per batch"}


def slope(values: Sequence[float]) -> Estimate:
    """The change from one value to the next, from those in the first half and their counterparts in the second, with
    Student's 95 % interval over blocks of neighbours: these values have no bounds, and all may be equal."""
    half = len(values) // 2
    changes = [(values[i + half] - values[i]) / half for i in range(half)]
    size = max(1, half // _BLOCKS)
    blocks = [fmean(changes[start : start + size]) for start in range(0, half, size)]
    mean = fmean(blocks)
    margin = student_t(len(blocks) - 1) * stdev(blocks) / math.sqrt(len(blocks))
    return {"mean": mean, "ci95": [mean - margin, mean + margin], "n": half}


class Soak:
    """Plays batches on a server, and measures it after each.

    Attributes:
        measured: by measure, its value after each batch.
    """

    def __init__(self, client: ClassroomClient, pid: int, folder: Path, problems: Sequence[str]):
        self._client, self._process = client, psutil.Process(pid)
        self._folder, self._problems = folder, problems
        self.measured: dict[str, list[float]] = {name: [] for name in _MEASURES}
        self.conversations = 0

    def play(self, step: int) -> None:
        policy = PolicyVersion("soak", step)
        folder = policy_path(self._folder, step)
        started = time.perf_counter()
        write_policy(folder, policy, save_model)
        self._client.load_weights(policy, folder)
        remove_old_policies(policies_folder(self._folder), keep=2, version=step)
        first_group = step * GROUPS
        problems = [self._problems[(first_group + i // GROUP) % len(self._problems)] for i in range(GROUPS * GROUP)]
        request = SampleRequest(
            problems=problems,
            answers=[""] * len(problems),
            request_id=f"soak-step{step:06d}-rank0of1",
            seed=1,
            step=step,
            run_id=policy.run_id,
            policy_version=policy.version,
        )
        records = self._client.sample(request).conversations
        rewards = self._client.rewards("pedagogical", [record.id for record in records])
        assert rewards == [record.reward for record in records] and None not in rewards
        write_rollouts(self._folder, step, 0, records)
        self.measured["seconds"].append(time.perf_counter() - started)
        self.conversations += len(records)
        if step % 10 == 0:
            self._look_at_the_page()
        self._measure()

    def _look_at_the_page(self) -> None:
        for path in ("/metrics", "/api/pulse", "/api/conversations?where=now", "/api/run"):
            requests.get(self._client.url + path, timeout=60).raise_for_status()

    def _measure(self) -> None:
        self.measured["memory_kb"].append(self._process.memory_info().rss / 1024)
        self.measured["fds"].append(self._process.num_fds())
        self.measured["threads"].append(self._process.num_threads())


def play(folder: Path, world: Path, batches: int) -> Result:
    """Play a soak; its result holds the slopes, and the first and last values."""
    overrides, port = overrides_of(folder, world)
    lessons = (world / "lessons_train.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line)["problem"] for line in lessons]
    with running_server(overrides, port, folder / "server.log") as (server, client):
        soak = Soak(client, server.pid, folder, problems)
        for step in range(batches):
            soak.play(step)
    figures = figures_of(soak.measured)
    journal = (folder / JOURNAL_NAME).stat().st_size
    figures |= {"batches": batches, "conversations": soak.conversations, "journal": journal / soak.conversations}
    return Result(figures, wrong_in(figures))


def figures_of(measured: Mapping[str, Sequence[float]]) -> dict:
    """By measure: its mean in the first and the last tenth after the warm-up, and its slope per batch."""
    figures = {}
    for name, values in measured.items():
        warm = values[int(len(values) * WARM_UP) :]
        tenth = max(1, len(warm) // 10)
        first, last = (sum(part) / tenth for part in (warm[:tenth], warm[-tenth:]))
        figures[name] = {"first": first, "last": last, "slope": slope(warm)}
    return figures


def wrong_in(figures: Mapping) -> list[str]:
    """What grew."""
    wrong = []
    for name in ("fds", "threads"):
        if figures[name]["slope"]["ci95"][0] > 0:
            wrong.append(f"{_MEASURES[name]} grow: {figures[name]}")
    if figures["memory_kb"]["slope"]["ci95"][0] > _LARGEST_GROWTH_KB:
        wrong.append(f"memory grows by more than {_LARGEST_GROWTH_KB:g} KB per batch: {figures['memory_kb']}")
    seconds = figures["seconds"]
    slowdown = seconds["slope"]["ci95"][0] * figures["batches"] / seconds["first"]
    if slowdown > _LARGEST_SLOWDOWN:
        wrong.append(f"batches become slower by at least {slowdown:.0%}: {seconds}")
    return wrong


def cases(settings: Settings) -> list[Case]:
    """One soak."""
    return [Case("soak", "one", lambda folder, own: play(folder / "run", own.world, own.batches))]


def summary(results: Sequence[Result]) -> str:
    """What changed from the first batches to the last."""
    rows = []
    for result in results:
        figures = result.figures
        for name, label in _MEASURES.items():
            figure = figures[name]
            low, high = figure["slope"]["ci95"]
            growth = f"{figure['slope']['mean']:+.2g} [{low:+.2g}, {high:+.2g}]"
            rows.append((label, f"{figure['first']:.4g}", f"{figure['last']:.4g}", growth))
        rows.append(("journal, bytes per conversation", "", round(figures["journal"]), ""))
        rows.append(("batches; conversations", "", f"{figures['batches']}; {figures['conversations']}", ""))
    return table(("", "first tenth", "last tenth", "per batch, 95 % interval"), rows)
