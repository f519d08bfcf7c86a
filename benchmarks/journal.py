"""What the journal of a long run takes: bytes on the disk, seconds until a server has opened it again, memory.

    python -m benchmarks.journal [RUN_FOLDER] [--batches 1000] [--conversations 128]

The events of the conversations of RUN_FOLDER (default runs/quickstart, which `make quickstart` leaves) are written to a
journal in a temporary folder, batch by batch, in the order in which they happened and with new ids: the texts, tokens,
log-probs, verdicts and records of a real run. The run's conversations are taken in turn, again and again; the same
content comes back after megabytes only, which gzip, with its 32 kB, does not see.

The journal is then opened as by a server that starts again, also as if the process had been killed while it compressed
its newest segment. A look-up reads all events of one conversation: the first one of its batch, which searches for the
batch's events, and another one of the same batch. Files are in the page cache.
"""

import argparse
import random
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal, conversation_id, read_journal, request_of
from classroom_rl.rollout.store.journal_segments import decompress, segments_folder, segments_of

_LOOK_UPS = 50
_OPENINGS = 3

Events = list[dict[str, Any]]


def batches_of(run_folder: Path) -> Iterator[tuple[dict[str, Any], Events]]:
    """The `batch` event of each request of a run, with the events of its conversations in order, again and again."""
    batch_events: dict[str, dict[str, Any]] = {}
    events: dict[str, Events] = defaultdict(list)
    for event in read_journal(run_folder / JOURNAL_NAME):
        if event["event"] == "batch":
            batch_events[event["request"]] = event
        elif "conversation" in event:
            events[request_of(event["conversation"])].append(event)
    if not events:
        raise SystemExit(f"{run_folder / JOURNAL_NAME} holds no conversation: name the folder of a run that played.")
    return cycle([(batch_events[request], conversation_events) for request, conversation_events in events.items()])


def write_batch(journal: Journal, number: int, count: int, source: Iterator[tuple[dict[str, Any], Events]]) -> None:
    """Write a batch of so many conversations, taken from as many batches of the run as it needs. Their events follow on
    each other as they happened, those of several batches in turns."""
    request, parts, problems, indices = f"run-step{number:06d}-rank0of1-abcd", [], [], []
    names: dict[int, dict[str, int]] = {}
    while len(indices) < count:
        batch_event, events = next(source)
        chosen = sorted({event["conversation"] for event in events})[: count - len(indices)]
        names[len(parts)] = {name: len(indices) + index for index, name in enumerate(chosen)}
        indices += [len(problems) + index for index in batch_event["problem_of"][: len(chosen)]]
        problems += batch_event["problems"]
        parts.append([(len(parts), event) for event in events if event["conversation"] in set(chosen)])
    batch = {name: value for name, value in batch_event.items() if name not in ("event", "time")}
    journal.append("batch", **batch | {"request": request, "step": number, "problems": problems, "problem_of": indices})
    for part, event in _in_turns(parts):
        index = names[part][event["conversation"]]
        new = {"conversation": conversation_id(request, index)}
        if event["event"] == "conversation":
            about = {"id": new["conversation"], "request_id": request, "step": number, "index": index}
            new["record"] = event["record"] | about
        rest = {name: value for name, value in event.items() if name not in ("event", "time")}
        journal.append(event["event"], **rest | new)


def _in_turns(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The entries of all parts, each part in its order, as if they had happened in the same stretch of time."""
    placed = (
        (index / len(part), number, entry) for number, part in enumerate(parts) for index, entry in enumerate(part)
    )
    return [entry for *_, entry in sorted(placed, key=lambda item: item[:2])]


def size_of(folder: Path) -> int:
    """The bytes of a journal's files."""
    files = [folder / JOURNAL_NAME, *segments_folder(folder / JOURNAL_NAME).glob("*")]
    return sum(path.stat().st_size for path in files)


def seconds_of(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = act()
    return time.perf_counter() - started, result


def open_again(folder: Path) -> tuple[float, int]:
    """The median of the seconds in which the journal is opened, and the bytes of memory that it then holds."""
    seconds = []
    for _ in range(_OPENINGS):
        elapsed, journal = seconds_of(lambda: Journal(folder))
        seconds.append(elapsed)
        journal.close()
    tracemalloc.start()
    journal = Journal(folder)
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    journal.close()
    return median(seconds), memory


def open_after_a_kill(folder: Path) -> float:
    """Seconds in which the journal is opened if the newest segment is as it was before it was compressed."""
    newest = segments_of(folder / JOURNAL_NAME)[-1]
    decompress(newest)
    newest.compressed.unlink()
    newest.index.unlink()
    seconds, journal = seconds_of(lambda: Journal(folder))
    journal.close()
    return seconds


def look_up(folder: Path, batches: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of look-ups in random batches: of the first conversation in each, and of another one."""
    journal, generator = Journal(folder), random.Random(0)
    first, second = [], []
    for number in generator.sample(range(batches), min(_LOOK_UPS, batches)):
        request = f"run-step{number:06d}-rank0of1-abcd"
        one, other = (conversation_id(request, index) for index in generator.sample(range(count), 2))
        for name, seconds in ((one, first), (other, second)):
            elapsed, events = seconds_of(lambda name=name: journal.events(name))
            if events[-1]["record"]["id"] != name:
                raise SystemExit(f"The journal does not find {name}.")
            seconds.append(elapsed)
    journal.close()
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", nargs="?", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--conversations", type=int, default=128)
    arguments = parser.parse_args()
    if not (arguments.run_folder / JOURNAL_NAME).is_file():
        raise SystemExit(f"There is no journal in {arguments.run_folder}: run `make quickstart`, or name another run.")
    source, total = batches_of(arguments.run_folder), arguments.batches * arguments.conversations
    with tempfile.TemporaryDirectory() as name:
        folder, journal = Path(name), Journal(Path(name))
        started = time.perf_counter()
        for number in range(arguments.batches):
            write_batch(journal, number, arguments.conversations, source)
        written = time.perf_counter() - started
        journal.close()
        compressed, size = time.perf_counter() - started, size_of(folder)
        seconds, memory = open_again(folder)
        first, second = look_up(folder, arguments.batches, arguments.conversations)
        print(f"{arguments.batches} batches of {arguments.conversations}: {total} conversations")
        print(f"lines: {journal.end / 1e6:.0f} MB, {journal.end / total:.0f} bytes per conversation")
        print(f"files: {size / 1e6:.0f} MB, {size / total:.0f} bytes per conversation")
        print(f"for 128,000 conversations: {128_000 * size / total / 1e9:.3f} GB")
        print(f"written in {written:.0f} s, compressed {compressed - written:.1f} s later")
        print(
            f"opened again in {seconds:.3f} s; index {memory / 1e6:.2f} MB, {memory / total:.1f} bytes per conversation"
        )
        if segments_of(folder / JOURNAL_NAME):
            print(f"opened again in {open_after_a_kill(folder):.3f} s after a kill while a segment was compressed")
        for what, times in (("first of its batch", first), ("another of that batch", second)):
            print(f"look-up, {what}: median {1000 * median(times):.1f} ms, longest {1000 * max(times):.1f} ms")


if __name__ == "__main__":
    main()
