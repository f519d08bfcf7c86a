"""How the siblings of a problem travel: from the dataset through a request to the conversation."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import PostTestMaterial, Problem, SiblingProblem, Step, material_of
from classroom_rl.rollout.requests import SampleRequest
from tests.trainer.test_batch_player import player

KIN = PostTestMaterial((), (SiblingProblem("s", "2"),))
BODY = {"problems": ["p", "p", "q"], "answers": ["1", "1", "1"], "request_id": "r", "seed": 1, "step": 0}
WITH, WITHOUT = Problem.of("p", "1", KIN), Problem.of("q", "1")


def test_each_conversation_gets_the_material_of_its_problem() -> None:
    request = SampleRequest(**BODY, post_test_material=[KIN, KIN, PostTestMaterial()])
    received = SampleRequest.model_validate_json(request.model_dump_json())
    first, second, third = received.all_problems()
    assert first is second and first.material == KIN and third.material == PostTestMaterial()
    assert [problem.material for problem in SampleRequest(**BODY).all_problems()] == [PostTestMaterial()] * 3
    assert first.id == WITH.id == Problem.of("p", "1").id


def test_the_digest_tells_requests_with_material_apart_and_leaves_the_others_as_they_were() -> None:
    plain, tested = SampleRequest(**BODY), SampleRequest(**BODY, post_test_material=[KIN] * 3)
    other = [PostTestMaterial((), (SiblingProblem("s", "3"),))] * 3
    assert len({plain.digest, tested.digest, SampleRequest(**BODY, post_test_material=other).digest}) == 3
    assert "post_test_material" not in repr(WITHOUT) and repr(WITH) == repr(Problem.of("p", "1"))


@pytest.mark.parametrize(
    ("material", "words"),
    [
        ([{}], "one entry per conversation"),
        ([{"siblings": [{"problem": "s", "answer": ""}]}] * 3, "no answer"),
        ([{"kin": []}] * 3, "kin"),
    ],
)
def test_a_request_with_material_that_does_not_fit_is_refused(material: list, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SampleRequest(**BODY, post_test_material=material)


@pytest.mark.parametrize(("problems", "sent"), [([WITH, WITHOUT], [KIN, PostTestMaterial()]), ([WITHOUT], None)])
def test_a_training_sends_it_with_its_batches(problems: list[Problem], sent: list | None, tmp_path: Path) -> None:
    trainer = player(tmp_path, SimpleNamespace(play=None), 2, problems=problems)
    process = SimpleNamespace(process_index=0, num_processes=1)
    request = trainer._request([problem.id for problem in problems], PolicyVersion("run", 0), 0, 0, process)
    assert request.post_test_material == sent == material_of(problems)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": [Step("a", "1"), Step("a", "2")]}, "the same name"),
        ({"steps": [Step("", "1")]}, "no name"),
        ({"siblings": [SiblingProblem("", "1")]}, "no text"),
        ({"siblings": [SiblingProblem("p", " ")]}, "no answer"),
        ({"steps": [Step("a", "1")], "siblings": [SiblingProblem("p", "1")]}, "has the steps"),
    ],
)
def test_material_that_does_not_fit_together_is_refused(given, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PostTestMaterial(**{name: tuple(value) for name, value in given.items()})
