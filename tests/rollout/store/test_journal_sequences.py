"""Any sequence of events, seals, restarts and kills of the journal reads back what was appended."""

from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal, read_journal
from classroom_rl.rollout.store.journal_segments import decompress, segments_of


class AnySequence(RuleBasedStateMachine):
    """What is appended, and what befalls the files, against a list of the events."""

    @initialize(segment_bytes=st.sampled_from([1, 300, 1500]), block_bytes=st.sampled_from([1, 200, 4000]))
    def begin(self, segment_bytes: int, block_bytes: int) -> None:
        self._temporary = TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self.sizes = {"segment_bytes": segment_bytes, "block_bytes": block_bytes}
        self.written: list[tuple[int, dict[str, Any]]] = []
        self.of: dict[str, list[str]] = defaultdict(list)
        self.begun: dict[str, dict[str, str]] = {}
        self.weights: str | None = None
        self.journal = Journal(self.folder, **self.sizes)

    def append(self, event: str, **fields: Any) -> None:
        position = self.journal.append(event, **fields)
        self.written.append((position, {"event": event, **fields}))

    @rule(request=st.sampled_from(["a", "b-0001", "c"]), index=st.integers(0, 2), text=st.text(max_size=30))
    def say(self, request: str, index: int, text: str) -> None:
        conversation = f"{request}-{index:04d}"
        self.append("turn", conversation=conversation, text=text)
        self.of[conversation].append(text)

    @rule(request=st.sampled_from(["a", "b-0001", "c"]), body=st.sampled_from(["x", "y"]))
    def begin_batch(self, request: str, body: str) -> None:
        fields = {"weights": "w", "body": body}
        self.append("batch", request=request, **fields)
        if self.begun.get(request) not in (None, fields):
            for index in range(3):
                self.of.pop(f"{request}-{index:04d}", None)
        self.begun[request] = fields

    @rule(name=st.sampled_from(["v1", "v2"]))
    def load_weights(self, name: str) -> None:
        self.append("weights", policy=name)
        self.weights = name

    @rule(count=st.integers(9, 20))
    def begin_other_batches(self, count: int) -> None:
        """So many that the journal forgets the positions of earlier ones."""
        for number in range(count):
            self.append("batch", request=f"other{number}", weights="w", body="x")

    @rule()
    def compress(self) -> None:
        for thread in self.journal._threads:
            thread.join()

    @rule(torn=st.binary(max_size=40).filter(lambda torn: b"\n" not in torn))
    def restart(self, torn: bytes) -> None:
        self.journal.close()
        with (self.folder / JOURNAL_NAME).open("ab") as file:
            file.write(torn)
        self.journal = Journal(self.folder, **self.sizes)

    @rule(with_index=st.booleans(), half=st.binary(max_size=9), data=st.data())
    def restart_after_a_kill_while_compressing(self, with_index: bool, half: bytes, data: st.DataObject) -> None:
        """With the plain segment still there, and maybe half a compressed one, or a whole one."""
        self.journal.close()
        segments = segments_of(self.journal.path)
        for segment in data.draw(st.lists(st.sampled_from(segments), unique=True)) if segments else ():
            decompress(segment)
            segment.compressed.with_name(f"unfinished-{segment.compressed.name}").write_bytes(half)
            if not with_index:
                segment.index.unlink()
                segment.compressed.unlink()
        self.journal = Journal(self.folder, **self.sizes)

    @invariant()
    def everything_is_there(self) -> None:
        path = self.folder / JOURNAL_NAME
        told = [{k: v for k, v in event.items() if k != "time"} for event in read_journal(path)]
        assert told == [event for _, event in self.written]
        for request, fields in self.begun.items():
            assert self.journal.begun(request).items() >= fields.items()
        for position, event in self.written[-3:] + self.written[:3]:
            assert self.journal.read_at(position).items() >= event.items()
        weights = self.journal.loaded_weights()
        assert (weights and weights["policy"]) == self.weights
        for request in ("a", "b-0001", "c"):
            for index in range(3):
                found = self.journal.events(f"{request}-{index:04d}")
                assert [event["text"] for event in found] == self.of[f"{request}-{index:04d}"]

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self._temporary.cleanup()


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
