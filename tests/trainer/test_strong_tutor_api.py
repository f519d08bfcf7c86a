"""A strong tutor behind a server: the batch, the loss and its gradient are those of one that is loaded, and a server
that is down, refuses, or is none of the kind is waited for or named. The stand-in of a server has a model; a real one
answers in the last test."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from classroom_rl.config.train_rl import DistillationConfig
from classroom_rl.errors import ConfigError, ProviderFailure
from classroom_rl.trainer import strong_tutor_api
from classroom_rl.trainer.strong_tutor_api import StrongTutorApi, TokenRequest
from tests.conftest import free_port
from tests.support.configs import training
from tests.support.waiting import wait_until
from tests.trainer.test_distillation import LORA, altered, start, strong, trainer_of  # noqa: F401

WEIGHT = 0.5
HALVED = ["train.mu=2", "train.max_tokens_per_micro_batch=80"]


class StandIn(ThreadingHTTPServer):
    """Answers as vLLM's `/v1/completions` does with `prompt_logprobs`, from a model.

    Attributes:
        bodies: the requests.
        script: for each request in turn a status to refuse it with, or None; after its end none is refused.
        change: applied to what is answered.
    """

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.bodies: list[dict] = []
        self.script: list[int | None] = []
        self.change: Callable[[list], Any] = lambda found: found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def prompt_logprobs(self, ids: list[int], count: int) -> list[dict[str, dict] | None]:
        with torch.no_grad():
            logps = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        logprobs: list[dict[str, dict] | None] = [None]
        for token_logps, token in zip(logps, ids[1:], strict=False):
            chosen = {*token_logps.topk(count).indices.tolist(), token} if count else {token}
            logprobs.append({str(candidate): {"logprob": token_logps[candidate].item()} for candidate in chosen})
        return logprobs


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body | {"key": self.headers["Authorization"]})
        status = self.server.script.pop(0) if self.server.script else None
        answer: dict = {"error": {"message": "max_logprobs is 20"}}
        if status is None:
            logprobs = self.server.change(self.server.prompt_logprobs(body["prompt"], body["prompt_logprobs"]))
            answer = {"choices": [{"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": logprobs}]}
        data = json.dumps(answer | {"id": "1", "object": "text_completion", "created": 1, "model": "m"}).encode()
        self.send_response(status or 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def server(strong: Path) -> Iterator[StandIn]:  # noqa: F811
    stand_in = StandIn(strong)
    thread = threading.Thread(target=stand_in.serve_forever)
    thread.start()
    yield stand_in
    stand_in.shutdown()
    thread.join()
    stand_in.server_close()


@pytest.mark.parametrize(
    "options",
    [
        HALVED,
        ["train.algorithm=ppo", "judge_model.mode=absolute"],
        ["train.distillation.kl=forward", "train.distillation.top_k=5", *LORA],
        [
            "train.distillation.kl=jsd",
            "train.distillation.top_k=3",
            "train.mu=2",
            "train.max_tokens_per_micro_batch=80",
        ],
        ["train.distillation.top_k=1"],
    ],
    ids=["reverse", "PPO", "forward with an adapter", "jsd", "reverse of 1"],
)
def test_a_batch_learns_as_from_a_strong_tutor_that_is_loaded(
    trainer_of: Any,  # noqa: F811
    strong: Path,  # noqa: F811
    server: StandIn,
    options: list[str],
) -> None:
    options = [*options, f"train.distillation.model={strong}", f"train.distillation.weight={WEIGHT}"]
    loaded, served = trainer_of(*options), trainer_of(*options, f"train.distillation.base_url={server.url}")
    assert served.strong_tutor.model is None
    (loss, gradients), (served_loss, served_gradients) = (
        trainer.loss_and_gradients(trainer.batch()) for trainer in (loaded, served)
    )
    assert served_loss == pytest.approx(loss, abs=1e-6)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-5
    for name, gradient in gradients.items():
        assert (served_gradients[name] - gradient).abs().max() < 1e-6, name
    assert served._figures["distillation/kl"] == pytest.approx(loaded._figures["distillation/kl"], abs=1e-6)
    assert {body["model"] for body in server.bodies} == {str(strong)}


def api(server: StandIn, strong: Path, **options: Any) -> StrongTutorApi:  # noqa: F811
    return StrongTutorApi(DistillationConfig(model=str(strong), base_url=server.url, **options), 50)


REQUEST = TokenRequest([3, 4, 5, 6], [2, 3])


def test_it_waits_for_a_server_that_is_full_or_not_there_and_sends_the_key(
    server: StandIn,
    strong: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strong_tutor_api, "PAUSE_S", 0.01)
    monkeypatch.setenv("TUTOR_KEY", "secret")
    server.script = [503, 429, 500]
    logps = api(server, strong, api_key_env="TUTOR_KEY").log_probs([REQUEST])
    assert len(server.bodies) == 4 and {body["key"] for body in server.bodies} == {"Bearer secret"}
    expected = server.prompt_logprobs(REQUEST.ids, 0)
    assert logps.tolist() == pytest.approx([expected[index][str(REQUEST.ids[index])]["logprob"] for index in (2, 3)])
    monkeypatch.setattr(strong_tutor_api, "DEADLINE_S", 0.05)
    gone = StrongTutorApi(DistillationConfig(model="m", base_url=f"http://127.0.0.1:{free_port()}/v1"), 50)
    with pytest.raises(ProviderFailure, match=r"the strong tutor m at http.* has answered nothing for 0\.05 s: Conn"):
        gone.log_probs([REQUEST])


def test_what_is_refused_or_no_such_server_is_named(
    server: StandIn,
    strong: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.script = [400]
    with pytest.raises(ConfigError, match=r"refuses a request: .*Start the server with a larger --max-logprobs"):
        api(server, strong).most_likely([REQUEST], 3)
    server.change = lambda found: None
    with pytest.raises(ConfigError, match=r"gives no log-probs of a prompt's tokens \(prompt_logprobs\)"):
        api(server, strong).log_probs([REQUEST])
    server.change = lambda found: [None, *found[2:], found[1]]
    with pytest.raises(ConfigError, match=r"was sent the token 5 and gave log-probs of \[6\] alone"):
        api(server, strong).log_probs([REQUEST])
    server.change = lambda found: [
        None,
        *({str(60 + n): {"logprob": -0.1} for n in range(3)} | entry for entry in found[1:]),
    ]
    with pytest.raises(ConfigError, match=r"was asked for 5 tokens with ids below 50, and gave .*60, 61, 62"):
        api(server, strong).most_likely([REQUEST], 5)
    server.change = lambda found: [None, *({token: {"p": 0} for token in entry} for entry in found[1:])]
    with pytest.raises(ConfigError, match="gave log-probs that cannot be read"):
        api(server, strong).log_probs([REQUEST])
    monkeypatch.delenv("TUTOR_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs a key: set the environment variable TUTOR_KEY"):
        api(server, strong, api_key_env="TUTOR_KEY")


def test_without_a_request_there_is_nothing(server: StandIn, strong: Path) -> None:  # noqa: F811
    assert api(server, strong).log_probs([]).shape == (0,)
    assert [tensor.shape for tensor in api(server, strong).most_likely([], 3)] == [(0, 3), (0, 4)]
    assert not server.bodies


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["teacher_model.vllm.temperature=0.7"], r"temperature is 0\.7, but the server .* at temperature 1"),
        (["train.distillation.kl=jsd"], r"kl is jsd, which compares all tokens, and the server .* set .*top_k"),
        (["train.distillation.base_url=http://a:b@c/v1"], "has an @"),
        (["train.distillation.api_key_env=sk-1234"], "is not the name of an environment variable"),
        (["train.distillation.model=null"], r"base_url is http://x/v1, but there is no strong tutor"),
    ],
)
def test_what_a_server_cannot_give_is_refused(options: list[str], said: str) -> None:
    served = ["train.distillation.model=m", "train.distillation.base_url=http://x/v1"]
    with pytest.raises(ConfigError, match=said):
        training("teacher_model.vllm.temperature=1", *served, *options)


@pytest.mark.engines
def test_vllm_s_own_server_gives_what_the_model_says(tiny_model: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(tiny_model),
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    command += ["--max-num-seqs", "4", "--max-logprobs", "5"]
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    try:

        def answers() -> bool:
            assert child.poll() is None, log.read_text()[-3000:]
            try:
                return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
            except requests.RequestException:
                return False

        wait_until(answers, 300)
        options = DistillationConfig(model=str(tiny_model), base_url=f"http://127.0.0.1:{port}/v1")
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        client = StrongTutorApi(options, model.config.vocab_size)
        token_requests = [TokenRequest([5, 6, 7, 8 + n, 9], [3, 4]) for n in range(6)]
        ids, logps = client.most_likely(token_requests, 4)
        with torch.no_grad():
            expected = [model(torch.tensor([request.ids])).logits[0].log_softmax(-1)[2:4] for request in token_requests]
        of_all = torch.cat(expected)
        sampled = of_all.gather(
            -1, torch.tensor([[request.ids[i]] for request in token_requests for i in request.wanted])
        ).squeeze(-1)
        assert (client.log_probs(token_requests) - sampled).abs().max() < 1e-4
        best = of_all.topk(4)
        assert (logps[:, :4] - best.values).abs().max() < 1e-4
        assert (of_all.gather(-1, ids) - best.values).abs().max() < 1e-4
        remainder = (1 - best.values.exp().sum(-1)).log()
        assert (logps[:, 4] - remainder).abs().max() < 1e-3
        with pytest.raises(ConfigError, match="Start the server with a larger --max-logprobs"):
            client.most_likely(token_requests, 6)
        with pytest.raises(ConfigError, match="raise its --max-model-len"):
            client.log_probs([TokenRequest([5] * 200, [3])])
    finally:
        child.terminate()
        child.wait(60)
