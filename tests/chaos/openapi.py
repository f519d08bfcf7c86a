"""Requests made from the server's OpenAPI document, valid and invalid ones, by schemathesis; the application answers in
this process, with scripted engines.

No answer may have a status of 500, or one that the document does not name for the route; its content type and its body
have to be as documented. NUL, huge numbers and odd Unicode come from the generator; what is no valid JSON is added by
hand. jsonschema compares the bodies: schemathesis misreads the pairs (`prefixItems`) in lists.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from classroom_rl.rollout.requests import SampleRequest
from tests.chaos.cases import Case, Result, Settings, table
from tests.support.scripted_room import Room, application, guided, write_templates

URL = "http://127.0.0.1:8005"
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
]
ODD_BODIES = (
    *(b'{"problems": %s}' % value for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000)),
    b"[" * 5000,
    b'{"step": ' + b"9" * 400 + b"}",
    b'{"request_id": "\\u0000"}',
    b'{"request_id": "\\ud800"}',
    b"\xff\xfe",
    b"",
    b"null",
)
"""Bodies that no schema describes."""


def play(app: FastAPI, examples: int, seed: int) -> Result:
    """Send each route this many requests of each kind; what was not as documented is named, the smallest request of
    each fault."""
    document, statuses, wrong = app.openapi(), Counter(), []
    schema = schemathesis.openapi.from_dict(document)
    with TestClient(app, base_url=URL, raise_server_exceptions=False) as client:
        sample_request = SampleRequest(problems=["fractions"], answers=["1/2"], request_id="r", seed=1, step=0)
        client.post("/sample_conversations", json=sample_request.model_dump()).raise_for_status()
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in MODES:
                wrong += _send(document, operation, mode, client, examples, seed, statuses)
            if operation.method.upper() == "POST":
                wrong += _send_odd(operation, client, statuses)
    return Result({"routes": len(list(schema.get_all_operations())), "statuses": dict(statuses)}, wrong)


def _send(
    document: dict, operation, mode: GenerationMode, client: TestClient, examples: int, seed: int, statuses: Counter
) -> list[str]:
    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case) -> None:
        arguments = case.as_transport_kwargs(base_url=URL)
        arguments = {name: value for name, value in arguments.items() if name in _TAKEN and value is not None}
        response = client.request(**arguments)
        statuses[str(response.status_code)] += 1
        case.validate_response(response, checks=CHECKS)
        _check_body(document, operation, response)

    try:
        check()
    except (FailureGroup, AssertionError) as failure:
        return [f"{operation.label}, {mode.value}: {_said(failure)}"]
    except hypothesis.errors.Unsatisfiable:  # a route without parameters has no invalid request
        return []
    return []


def _check_body(document: dict, operation, answer) -> None:
    """Raise an `AssertionError` if a JSON body is not as its schema says."""
    documented = document["paths"][operation.path][operation.method.lower()]["responses"][str(answer.status_code)]
    schema = documented.get("content", {}).get("application/json", {}).get("schema")
    if schema is not None:
        errors = Draft202012Validator({**schema, "components": document["components"]}).iter_errors(answer.json())
        for error in errors:
            raise AssertionError(f"{answer.status_code}, {error.json_path}: {error.message}")


_TAKEN = ("method", "url", "params", "headers", "cookies", "json", "data", "content")


def _send_odd(operation, client: TestClient, statuses: Counter) -> list[str]:
    path = operation.path.replace("{name}", "pedagogical")
    wrong = []
    for body in ODD_BODIES:
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        statuses[str(response.status_code)] += 1
        if response.status_code >= 500:
            wrong.append(f"{operation.label}, {body[:40]!r}: {response.status_code} {response.text[:300]}")
    return wrong


def _said(failure: BaseException) -> str:
    errors = getattr(failure, "exceptions", None) or [failure]
    return " | ".join(f"{type(error).__name__}: {error}" for error in errors)[:1500]


@contextmanager
def scripted_app(world: Path, folder: Path) -> Iterator[FastAPI]:
    """The real application with scripted engines, in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CLASSROOM_TOKEN", raising=False)
        room = Room(AutoTokenizer.from_pretrained(world / "blank"), folder / "run")
        yield application(room, guided(write_templates(folder)), patch)()


def _case(folder: Path, own: Settings, seed: int) -> Result:
    with tempfile.TemporaryDirectory(dir=folder) as inner, scripted_app(own.world, Path(inner)) as app:
        return play(app, own.requests, seed)


def cases(_: Settings) -> list[Case]:
    """The same requests in number, with three seeds."""
    return [Case("openapi", f"seed{seed}", partial(_case, seed=seed)) for seed in range(3)]


def summary(results: Sequence[Result]) -> str:
    """How many requests were answered with which status."""
    statuses = sum((Counter(result.figures["statuses"]) for result in results), Counter())
    rows = [(f"answers with {status}", count) for status, count in sorted(statuses.items())]
    return table(("", ""), [*rows, ("not as documented", sum(len(result.wrong) for result in results))])
