"""The server answers as its OpenAPI document says, whatever it is sent."""

from collections.abc import Iterator

import pytest
import schemathesis
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from tests.chaos.openapi import play, scripted_app


@pytest.fixture
def app(world, tmp_path) -> Iterator[FastAPI]:
    with scripted_app(world, tmp_path) as application:
        yield application


def test_the_document_is_openapi_3_1_and_each_of_its_schemas_a_json_schema(app: FastAPI) -> None:
    document = app.openapi()
    assert document["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(document).validate()
    for name, schema in document["components"]["schemas"].items():
        try:
            Draft202012Validator.check_schema(schema)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def test_every_route_answers_as_documented(app: FastAPI) -> None:
    result = play(app, examples=8, seed=0)
    assert result.wrong == []
    assert result.figures["routes"] >= 26 and {"200", "404", "422"} <= set(result.figures["statuses"])


def test_a_route_that_answers_otherwise_is_named(app: FastAPI) -> None:
    async def health() -> dict:
        return {"status": 7}

    app.openapi()  # it is kept: what the document promised
    (route,) = (route for route in app.routes if getattr(route, "path", "") == "/health")
    app.routes.remove(route)
    app.get("/health")(health)
    (wrong,) = play(app, examples=1, seed=0).wrong
    assert wrong.startswith("GET /health") and "status" in wrong
