"""Files of rollouts: JSONL and Parquet, with a schema version. Reading gives exactly what was written.

Both formats hold the fields of `Rollout`, one rollout per row. JSONL begins with a line that gives the format, the
version and the number of rollouts. Parquet has these as metadata, and JSON text in the columns of messages, meta, notes
and tool calls. A step holds only the messages and prompt ids that are new since the step before; `messages_kept` and
`prompt_ids_kept` are the numbers of those that it shares with that step. So the size of a file is linear in the length
of the rollouts, not quadratic.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from classroom_rl.errors import DataError
from classroom_rl.rollout.step import Rollout
from classroom_rl.system.storage import storage_errors

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT, SCHEMA_VERSION = "rollouts", 1
SUFFIXES = (".jsonl", ".parquet")
_ROLLOUT = TypeAdapter(Rollout)
_JSON_COLUMNS = ("opening", "meta", "notes")
_JSON_COLUMNS_OF_STEPS = ("messages", "tool_calls")
_ROWS_PER_GROUP = 128


def write(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write a file; an existing one is replaced atomically. Missing folders are created.

    Raises:
        DataError: if the suffix is unknown, or a rollout holds a value that cannot be stored: NaN, or in meta and notes
            one that is not JSON.
        StorageError: if the disk is full or may not be written to.
    """
    save = {".jsonl": _write_jsonl, ".parquet": _write_parquet}[_suffix(path)]
    rows = [_stored(rollout) for rollout in rollouts]
    unfinished = path.with_name(f"unfinished-{path.name}")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save(unfinished, rows)
        except UnicodeEncodeError as error:
            unfinished.unlink(missing_ok=True)
            raise DataError(
                f"A rollout holds half of a character (a lone surrogate), which no file can hold: {error}."
            ) from None
        unfinished.replace(path)


def read(path: Path) -> list[Rollout]:
    """Read a file that `write` wrote. Raises a `DataError` if there is no such file, its suffix is unknown, it has a
    newer schema version, or is damaged."""
    load = {".jsonl": _read_jsonl, ".parquet": _read_parquet}[_suffix(path)]
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    rollouts = []
    for index, row in enumerate(load(path)):
        try:
            rollouts.append(_ROLLOUT.validate_python(_expanded(row)))
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged: rollout {index} cannot be read: {error}") from error
    return rollouts


def _suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path} ends with {path.suffix or 'no suffix'!r}; rollouts are kept as {' or '.join(SUFFIXES)}."
        )
    return path.suffix


def _header(rollouts: int) -> dict[str, Any]:
    return {"format": FORMAT, "schema_version": SCHEMA_VERSION, "rollouts": rollouts}


def _check_header(path: Path, header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{path} is no file of rollouts: it does not say that its format is {FORMAT!r}.")
    version = header.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise DataError(
            f"{path} was written with schema version {version} of {FORMAT}; this program reads versions up to "
            f"{SCHEMA_VERSION}. Update the program, or write the file with this one."
        )


# Rollouts as plain data ----------------------------------------------------------------------------------------------


def _stored(rollout: Rollout) -> dict[str, Any]:
    """A rollout as a row, with each step shortened to what is new in it."""
    _refuse_what_is_not_json(rollout)
    row = _ROLLOUT.dump_python(rollout)
    for index in range(len(rollout.steps) - 1, 0, -1):  # from the last step back: the one before must still be whole
        _shorten(row["steps"][index], row["steps"][index - 1])
    for step in row["steps"][:1]:
        _shorten(step, {"messages": (), "prompt_ids": (), "ids": ()})
    return row


def _shorten(step: dict[str, Any], before: dict[str, Any]) -> None:
    """Remove from a step what it shares with the step before it, which must not be shortened yet."""
    for name, earlier in (("messages", before["messages"]), ("prompt_ids", (*before["prompt_ids"], *before["ids"]))):
        kept = _common_prefix(earlier, step[name])
        step[f"{name}_kept"], step[name] = kept, step[name][kept:]


def _common_prefix(before: Sequence[Any], after: Sequence[Any]) -> int:
    """The length of the common prefix."""
    length = min(len(before), len(after))
    if before[:length] == after[:length]:
        return length
    return next(index for index in range(length) if before[index] != after[index])


def _expanded(row: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_stored`."""
    messages: tuple[Any, ...] = ()
    ids: tuple[int, ...] = ()
    steps = []
    for stored_step in row["steps"]:
        step = dict(stored_step)
        kept_messages, kept_ids = step.pop("messages_kept"), step.pop("prompt_ids_kept")
        if kept_messages > len(messages) or kept_ids > len(ids):
            raise ValueError(f"step {step['index']} keeps more of the step before it than that has")
        step["messages"] = messages = (*messages[:kept_messages], *step["messages"])
        step["prompt_ids"] = (*ids[:kept_ids], *step["prompt_ids"])
        ids = (*step["prompt_ids"], *step["ids"])
        steps.append(step)
    return {**row, "steps": steps}


def _refuse_what_is_not_json(rollout: Rollout) -> None:
    for name, value in (("meta", rollout.meta), ("notes", rollout.notes), *_tool_calls(rollout)):
        try:
            unchanged = json.loads(json.dumps(value, allow_nan=False).encode()) == value
            json.dumps(value, ensure_ascii=False).encode()  # raises for lone surrogates
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{name} of rollout {rollout.id} cannot be saved: {error}.") from None
        if not unchanged:
            raise DataError(
                f"{name} of rollout {rollout.id} cannot be saved: it would come back changed, for JSON has no tuples "
                f"and only text as keys: {str(value)[:200]}"
            )
    for name, number in _floats(rollout):
        if number is not None and number - number != 0:  # infinite or NaN
            raise DataError(f"{name} of rollout {rollout.id} is {number}, which no file of rollouts can hold.")


def _tool_calls(rollout: Rollout) -> Iterator[tuple[str, Any]]:
    for step in rollout.steps:
        yield f"tool_calls of step {step.index}", [asdict(call) for call in step.tool_calls]


def _floats(rollout: Rollout) -> Iterator[tuple[str, float | None]]:
    yield "reward", rollout.reward
    yield "temperature", rollout.settings.temperature
    yield "top_p", rollout.settings.top_p
    yield from (("a step reward", reward) for reward in rollout.step_rewards)
    for step in rollout.steps:
        yield f"started of step {step.index}", step.started
        yield f"finished of step {step.index}", step.finished
        yield from ((f"a log-prob of step {step.index}", logprob) for logprob in step.logprobs)


# JSONL ---------------------------------------------------------------------------------------------------------------


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in (_header(len(rows)), *rows):
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    number, expected = 0, None  # numbers of rollouts: read so far, and in the header
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file):
                row = json.loads(line)
                if number == 0:
                    _check_header(path, row)
                    expected = row.get("rollouts")
                elif isinstance(row, dict):
                    yield row
                else:
                    raise DataError(f"{path} is damaged: line {number + 1} is no JSON object.")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: line {number + 1} is not JSON: {error}.") from error
    if expected is None:
        raise DataError(f"{path} is empty, so it is no file of rollouts.")
    if number != expected:
        raise DataError(f"{path} is damaged: it holds {number} of {expected} rollouts.")


# Parquet -------------------------------------------------------------------------------------------------------------


def columns() -> "pa.Schema":
    """The columns of a Parquet file: the fields of `Rollout`."""
    import pyarrow as pa

    text, int64, number = pa.string(), pa.int64(), pa.float64()
    policy = pa.struct({"run_id": text, "version": int64})
    step = {
        **{"index": int64, "prompt": text, "messages": text, "messages_kept": int64, "text": text, "content": text},
        **{"thought": text, "thought_state": text, "prompt_ids": pa.list_(int64), "prompt_ids_kept": int64},
        **{"ids": pa.list_(int64), "mask": pa.list_(int64), "logprobs": pa.list_(number), "tokens": int64},
        **{"finish_reason": text, "policy": policy, "seed": int64, "started": number, "finished": number},
        "tool_calls": text,
    }
    settings = {
        **{"engine": text, "history": text, "max_steps": int64, "temperature": number, "top_p": number},
        **{"top_k": int64, "max_tokens": int64},
    }
    return pa.schema(
        {
            **{"id": text, "prompt_index": int64, "copy": int64, "seed": int64, "opening": text, "first_prompt": text},
            **{"settings": pa.struct(settings), "meta": text, "notes": text, "steps": pa.list_(pa.struct(step))},
            **{"end": pa.struct({"state": text, "reason": text, "detail": text}), "unanswered": text},
            **{"step_rewards": pa.list_(number), "reward": number},
        }
    )


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in rows:
        for fields, names in ((row, _JSON_COLUMNS), *((step, _JSON_COLUMNS_OF_STEPS) for step in row["steps"])):
            fields.update({name: json.dumps(fields[name], ensure_ascii=False, allow_nan=False) for name in names})
    schema = columns().with_metadata({FORMAT: json.dumps(_header(len(rows)))})
    with path.open("wb") as file:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), file, row_group_size=_ROWS_PER_GROUP)
        file.flush()
        os.fsync(file.fileno())


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            header = (file.schema_arrow.metadata or {}).get(FORMAT.encode())
            _check_header(path, None if header is None else json.loads(header))
            for batch in file.iter_batches(_ROWS_PER_GROUP):
                for row in batch.to_pylist():
                    yield _parsed(row)
    except (pa.ArrowException, OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged or no Parquet file: {error}") from error


def _parsed(row: dict[str, Any]) -> dict[str, Any]:
    row |= {name: json.loads(row[name]) for name in _JSON_COLUMNS}
    for step in row["steps"]:
        step |= {name: json.loads(step[name]) for name in _JSON_COLUMNS_OF_STEPS}
    return row
