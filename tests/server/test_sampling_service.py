"""The server with real engines, over HTTP."""

import asyncio
import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import PydanticSerializationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.rewards import REWARDS
from classroom_rl.errors import DataError, EngineFailure, PolicyMismatch, UnknownConversation
from classroom_rl.models.policy_folder import oldest_policy, open_shared_memory, policy_name, policy_path, write_policy
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.store.journal import read_journal
from classroom_rl.server.engine_sleep import this_process
from classroom_rl.trainer.sharded_save import gathered_weights, write_shards
from classroom_rl.trainer.weight_files import KeptFiles
from tests.conftest import ROOT, RunningServer, on_this_machine
from tests.server.conftest import BODY
from tests.support.scripted_room import Room


def request_for(lessons: list[str], request_id: str, groups: int = 2, size: int = 3, **more) -> SampleRequest:
    problems = [lesson for lesson in lessons[:groups] for _ in range(size)]
    return SampleRequest(problems=problems, answers=[""] * len(problems), request_id=request_id, seed=1, step=0, **more)


def publish_random_weights(server: RunningServer, world: Path, policy: PolicyVersion, seed: int, shards: bool) -> Path:
    folder = policy_path(server.run_folder, policy.version)

    def save(target: Path) -> None:
        shutil.copytree(world / "blank", target, dirs_exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        if shards:
            write_shards(gathered_weights(model, keep=True), target, shard_bytes=1_000_000)
        else:
            model.save_pretrained(target)

    write_policy(folder, policy, save)
    return folder


def logprob_differences(model_folder: Path, response: SampleResponse) -> torch.Tensor:
    """Engine's log-probs of the sampled tokens minus those of transformers in fp32, over a batch."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    differences = []
    for record in response.conversations:
        ids = torch.tensor([record.prompt_ids + record.completion_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        model_logprobs = logprobs.gather(1, ids[0, 1:, None])[len(record.prompt_ids) - 1 :, 0]
        mask = torch.tensor(record.mask).bool()
        differences.append(model_logprobs[mask] - torch.tensor(record.logprobs)[mask])
    return torch.cat(differences)


@pytest.mark.gpu
def test_conversations_come_back_whole(server: RunningServer, lessons: list[str]) -> None:
    response = server.client.sample(request_for(lessons, "whole"))
    assert [record.problem for record in response.conversations] == [lessons[0]] * 3 + [lessons[1]] * 3
    for record in response.conversations:
        assert record.state == "END"
        roles = [turn.role for turn in record.turns]
        assert roles == ["teacher", "student", "teacher", "student", "teacher"][: len(roles)]
        assert len(roles) == 5 or END_OF_CONVERSATION in record.turns[-1].text and roles[-1] == "teacher"
        assert len(record.completion_ids) == len(record.mask) == len(record.logprobs)
        spans = [turn.span for turn in record.turns if turn.role == "teacher"]
        assert sum(last - first for first, last in spans) == sum(record.mask)
        assert all(turn.policy == response.policy for turn in record.turns if turn.role == "teacher")
        assert record.verdicts[0].scores is not None and record.reward is not None
    longest = max(response.conversations[:3], key=lambda record: len(record.turns))
    for record in response.conversations[:3]:
        assert [turn.persona for turn in record.turns] == [turn.persona for turn in longest.turns][: len(record.turns)]
    assert len({tuple(record.completion_ids) for record in response.conversations[:3]}) > 1


def test_same_request_is_not_run_twice(server: RunningServer, lessons: list[str]) -> None:
    request = request_for(lessons, "twice")
    answers: list[SampleResponse] = []
    threads = [threading.Thread(target=lambda: answers.append(server.client.sample(request))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waited = requests.get(f"{server.client.url}/wait_batch", params={"request_id": "twice"}, timeout=60).json()
    answers.append(SampleResponse[ConversationRecord].model_validate(waited))
    assert all(answer == answers[0] for answer in answers)
    batches = [event for event in read_journal(server.run_folder / "journal.jsonl") if event["event"] == "batch"]
    assert sum(event["request"] == "twice" for event in batches) == 1


def test_request_taken_up_after_a_broken_connection(server: RunningServer, lessons: list[str]) -> None:
    request = request_for(lessons, "broken", groups=4, size=8)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = request.model_dump_json()
    connection.request("POST", "/sample_conversations", body, {"Content-Type": "application/json"})
    connection.close()
    assert len(server.client.sample(request).conversations) == 32
    batches = [event for event in read_journal(server.run_folder / "journal.jsonl") if event["event"] == "batch"]
    assert sum(event["request"] == "broken" for event in batches) == 1


def test_request_id_used_with_another_body_is_refused(server: RunningServer, lessons: list[str]) -> None:
    server.client.sample(request_for(lessons, "other"))
    with pytest.raises(PolicyMismatch, match="another body"):
        server.client.sample(request_for(lessons, "other", size=2))


def test_fixed_seeds_repeat_a_batch(server: RunningServer, lessons: list[str]) -> None:
    """Large enough for the prompts to exceed what vLLM prefills in one step."""
    openings = [
        [
            record.turns[0].text
            for record in server.client.sample(
                request_for(lessons, f"seeded-{i}", groups=40, size=4, fixed_seeds=fixed)
            ).conversations
        ]
        for i, fixed in enumerate((True, True, False))
    ]
    same = [sum(a == b for a, b in zip(openings[0], other, strict=True)) for other in openings[1:]]
    assert same[0] > 150 and same[1] < 10


def test_journal_holds_every_turn_verdict_and_reward(server: RunningServer, lessons: list[str]) -> None:
    response = server.client.sample(request_for(lessons, "journal", groups=1, size=2))
    events = list(read_journal(server.run_folder / "journal.jsonl"))
    for record in response.conversations:
        own_events = [event for event in events if event.get("conversation") == record.id]
        assert [event["turn"]["text"] for event in own_events if event["event"] == "turn"] == [
            turn.text for turn in record.turns
        ]
        assert [event["event"] for event in own_events if event["event"] != "turn"] == [
            "verdict",
            "rewards",
            "conversation",
        ]
        answer = requests.get(f"{server.client.url}/conversations/{record.id}", timeout=60).json()
        assert answer == record.model_dump(mode="json")


def test_reward_routes(server: RunningServer, lessons: list[str]) -> None:
    response = server.client.sample(request_for(lessons, "rewards"))
    ids = [record.id for record in response.conversations]
    assert server.client.rewards("pedagogical", ids) == [record.reward for record in response.conversations]
    assert server.client.rewards("length", ids) == [
        -0.5 if max(turn.tokens for turn in record.turns if turn.role == "teacher") >= 11 else 0.0
        for record in response.conversations
    ]
    for name in set(REWARDS) - {"end_rm", "post_test"}:
        assert len(server.client.rewards(name, ids)) == len(ids)
    with pytest.raises(DataError, match="needs graded solutions"):
        server.client.rewards("end_rm", ids)
    with pytest.raises(DataError, match="the post_test reward needs a post-test, and there is none"):
        server.client.rewards("post_test", ids)
    with pytest.raises(UnknownConversation, match="no-such-id"):
        server.client.rewards("pedagogical", ["no-such-id"])
    with pytest.raises(UnknownConversation, match="There is no reward beauty"):
        server.client.rewards("beauty", ids)


def test_metrics_for_prometheus(server: RunningServer, lessons: list[str]) -> None:
    server.client.sample(request_for(lessons, "counted"))
    text = requests.get(f"{server.client.url}/metrics", timeout=60).text
    assert "classroom_finished_conversations" in text and "classroom_policy_version" in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    generated = {sample.labels["role"]: sample.value for sample in families["vllm:generation_tokens"].samples}
    assert generated.keys() == {"teacher", "student"} and min(generated.values()) > 0
    assert len(families) == text.count("# TYPE"), "no metric stands there twice"


@pytest.mark.gpu
@pytest.mark.parametrize(("shards", "seed"), [(False, 11), (True, 12)])
def test_published_weights_are_loaded_in_place(
    server: RunningServer, world: Path, lessons: list[str], shards: bool, seed: int
) -> None:
    before = server.client.health()
    policy = PolicyVersion(f"weights-test-{seed}", 3)
    folder = publish_random_weights(server, world, policy, seed, shards)
    assert (len(list(folder.glob("*.safetensors"))) > 2) is shards
    assert server.client.load_weights(policy, folder).policy == policy
    response = server.client.sample(
        request_for(lessons, f"new-weights-{seed}", run_id=policy.run_id, policy_version=policy.version)
    )
    assert response.policy == policy
    differences = logprob_differences(folder, response)
    assert differences.abs().max() < on_this_machine(1e-3)
    assert logprob_differences(world / "blank", response).abs().mean() > 0.05
    after = server.client.health()
    assert {role: state.pids for role, state in after.roles.items()} == {
        role: state.pids for role, state in before.roles.items()
    }
    assert all(role.pids for role in after.roles.values())
    for other in (PolicyVersion(policy.run_id, 4), PolicyVersion("another-run", 3)):
        stale = request_for(lessons, f"stale-{seed}-{other.version}", run_id=other.run_id, policy_version=other.version)
        with pytest.raises(PolicyMismatch, match="is loaded"):
            server.client.sample(stale)


def test_weights_in_shared_memory_are_loaded_and_not_looked_at_again(
    server: RunningServer, world: Path, lessons: list[str]
) -> None:
    """The file that an engine read is written over by a later version, which may not reach the engine by itself."""
    shared, kept_files = open_shared_memory(server.run_folder), KeptFiles()
    model = AutoModelForCausalLM.from_pretrained(world / "blank", dtype=torch.float32)
    torch.manual_seed(13)

    def publish(version: int) -> Path:
        for parameter in model.parameters():
            parameter.data.add_(0.03 * torch.randn_like(parameter))
        folder = shared / policy_name(version)
        save = lambda target: write_shards(gathered_weights(model, keep=True), target, kept=kept_files)  # noqa: E731
        write_policy(folder, PolicyVersion("memory-test", version), save, over=oldest_policy(shared, 1))
        return folder

    def differences(version: int, request: str) -> torch.Tensor:
        sample_request = request_for(lessons, request, groups=1, run_id="memory-test", policy_version=version)
        return logprob_differences(reference, server.client.sample(sample_request)).abs()

    reference = server.run_folder / "reference"
    try:
        for version in range(4):
            files = {path.stat().st_ino for path in shared.glob("*/*.safetensors")}
            folder = publish(version)
            assert ((folder / "model.safetensors").stat().st_ino in files) is (version >= 2)
            server.client.load_weights(PolicyVersion("memory-test", version), folder)
        shutil.copytree(world / "blank", reference)
        model.save_pretrained(reference)
        assert differences(3, "memory").max() < 1e-3
        inode = (folder / "model.safetensors").stat().st_ino
        publish(4), publish(5)
        assert (shared / policy_name(5) / "model.safetensors").stat().st_ino == inode
        assert differences(3, "memory-written-over").max() < 1e-3
    finally:
        shutil.rmtree(shared)


ENGINE_ALONE = """
import asyncio, json, sys, time
from pathlib import Path
from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.models import ModelConfig, VllmConfig
from classroom_rl.errors import EngineFailure
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.tokens import PolicyVersion
from classroom_rl.engines.vllm.engine import VllmEngine

async def main():
    options = VllmConfig(
        max_length=256, max_num_seqs=2, gpu_memory_utilization=0.1, dtype="float32", enforce_eager=True,
        cpu_cores=sys.argv[3] if len(sys.argv) > 3 else None,
    )
    engine = await VllmEngine.start(ModelConfig(sys.argv[1], options), 1, GenerationConfig())
    pids, said = engine.health().pids, []
    load = lambda: engine.load_policy(Path(sys.argv[2]), PolicyVersion("run", 1), 60)
    for use in (load, lambda: engine.generate([5, 6, 7], Sampling(1.0, max_tokens=2)), engine.wake_up, engine.health):
        try:
            answer = use()
            said.append(str(answer if use == engine.health else await answer))
        except EngineFailure as failure:
            said.append(f"failed: {failure}")
    print(json.dumps([pids, engine.policy.version, said]), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("cores", [None, pytest.param("0", marks=pytest.mark.full)])  # one process less to be ended
def test_half_loaded_weights_are_never_sampled_and_engines_end_when_their_server_is_killed(
    world: Path, tmp_path: Path, cores: str | None
) -> None:
    """vLLM only warns of weights that it does not find. A killed server cannot end its engines, and its successor needs
    their memory. An engine with cores of its own has one process on a CPU, others have a scheduler and a worker."""

    def save_half(folder: Path) -> None:
        shutil.copytree(world / "blank", folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        half = {name: tensor + 0.1 for name, tensor in weights.items() if "layers.2." not in name}
        save_file(half, folder / "model.safetensors", metadata={"format": "pt"})

    write_policy(tmp_path / "half", PolicyVersion("run", 1), save_half)
    (tmp_path / "alone.py").write_text(ENGINE_ALONE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [
            sys.executable,
            str(tmp_path / "alone.py"),
            str(world / "blank"),
            str(tmp_path / "half"),
            *([cores] if cores else []),
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids, version, answers = json.loads(next(line for line in server.stdout if line.startswith("[[")))
    assert version == PolicyVersion().version
    loaded, generated, woken, health = answers
    for answer in (loaded, generated, health):
        assert answer.startswith("failed: ") and "may hold parts of the old weights" in answer
    assert "model.layers.2.mlp" in loaded and woken == "None"
    assert pids and all(psutil.pid_exists(pid) for pid in pids)
    if not torch.cuda.is_available():
        engine, *worker = [process for pid in pids if "VLLM" in " ".join((process := psutil.Process(pid)).cmdline())]
        assert bool(worker) is (cores is None)
        assert cores is None or engine.cpu_affinity() == [0]
    server.kill()
    server.communicate()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    assert not alive


@pytest.mark.gpu
def test_turns_wait_while_the_engines_sleep_and_new_weights_wake_the_teacher(
    server: RunningServer, world: Path, lessons: list[str]
) -> None:
    """On a CPU the engines keep their memory; all else is as on a GPU."""
    threads = ThreadPoolExecutor()
    assert all(server.client.sleep([this_process()]).asleep.values())
    try:
        batch = threads.submit(server.client.sample, request_for(lessons, "while-asleep", groups=1, size=2))
        time.sleep(1.5)
        assert not batch.done()
        policy = PolicyVersion("sleep-test", 1)
        server.client.load_weights(policy, publish_random_weights(server, world, policy, seed=12, shards=1))
        roles = server.client.health().roles
        assert (roles["teacher"].asleep, roles["student"].asleep) == (False, True)
    finally:
        assert not any(server.client.wake_up().asleep.values())
    assert len(batch.result(120).conversations) == 2


async def test_a_request_that_cannot_be_named_is_refused_before_it_runs(room: Room, generation) -> None:
    """The cause is told, and no work goes on that nobody waits for."""
    request = SampleRequest.model_construct(**BODY | {"meta": [{"a": "half: \ud800"}], "judge_again": False})
    with pytest.raises(PydanticSerializationError, match="surrogates not allowed"):
        await room.open(generation).sample(request)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_cause_of_a_failed_batch_is_told_though_its_id_is_gone(room: Room, generation) -> None:
    service = room.open(generation)

    async def fail(*_: object) -> None:
        service._batches.clear()
        raise EngineFailure("the cause")

    service.runner.sample = fail
    with pytest.raises(EngineFailure, match="the cause"):
        await service.sample(SampleRequest(**BODY))
