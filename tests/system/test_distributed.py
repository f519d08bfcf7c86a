"""Communication between the processes of a training: over what, and from whom to whom."""

import json
import os
import subprocess
import sys

import pytest
import torch

from classroom_rl.system.distributed import communication_backend
from tests.conftest import ROOT, free_port

DEADLINE_S = 300
LEAVE = """
import torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""
"""Without it a thread of gloo may still run as the interpreter ends, which aborts the process."""


def in_processes(program: str, count: int, *arguments: str) -> list:
    """What a program prints as its last line, as JSON, in each of so many processes."""
    launched = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program + LEAVE, *arguments],
            cwd=ROOT,
            env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize(
    ("launched", "has_gpus", "backend"),
    [(True, True, "cuda:nccl,cpu:gloo"), (True, False, "gloo"), (False, True, None), (False, False, None)],
)
def test_objects_go_over_gloo_on_gpus_too(monkeypatch, launched: bool, has_gpus: bool, backend: str | None) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    assert communication_backend() == backend


def test_processes_launched_on_cpus_beside_a_gpu_begin() -> None:
    """accelerate refuses a backend for GPUs then; the program sees GPUs as a machine that has some does."""
    program = """
import json, torch
from accelerate import PartialState
from classroom_rl.system.distributed import communication_backend
torch.cuda.is_available = lambda: True
print(json.dumps(PartialState(cpu=True, backend=communication_backend()).backend))
"""
    assert in_processes(program, 2) == ["gloo", "gloo"]


def test_with_a_backend_for_each_device_deepspeed_sends_objects_from_the_cpu() -> None:
    """As on GPUs, with gloo in NCCL's place; groups that are made later have the same."""
    program = """
import json, sys
from classroom_rl.system.distributed import keep_deepspeed_from_compiling
keep_deepspeed_from_compiling()
import deepspeed.comm, torch.distributed as torch_comm
from torch.distributed.distributed_c10d import _get_object_coll_device
deepspeed.comm.init_distributed(dist_backend=sys.argv[1], auto_mpi_discovery=False)
print(json.dumps([_get_object_coll_device(group) for group in (None, torch_comm.new_group([0]))]))
"""
    assert in_processes(program, 1, "cuda:gloo,cpu:gloo") == [["cpu", "cpu"]]


def test_what_only_the_main_process_needs_goes_to_it_alone() -> None:
    program = """
import json
from accelerate import PartialState
from classroom_rl.trainer.collective import to_main_process
state = PartialState(cpu=True, backend="gloo")
print(json.dumps(to_main_process(state, {"rank": state.process_index, "records": ["a"] * state.process_index})))
"""
    everyone = [{"rank": 0, "records": []}, {"rank": 1, "records": ["a"]}, {"rank": 2, "records": ["a", "a"]}]
    assert in_processes(program, 3) == [everyone, None, None]
    assert in_processes(program, 1) == [everyone[:1]]
