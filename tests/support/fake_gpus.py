"""A stand-in for nvidia-smi, which lists GPUs that this machine does not have."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.programs import write_script

NVIDIA_SMI = """arguments="$*"
case "$arguments" in
  *--id=*) ids=${{arguments#*--id=}}; ids=$(echo "${{ids%% *}}" | tr , " ") ;;
  *) ids="{ids}" ;;
esac
for id in $ids; do
  line=$(sed -n "$((id + 1))p" "{lines}") && [ -n "$line" ] || exit 6
  IFS=, read -r index name total used driver capability <<END
$line
END
  case "$arguments" in
    -L) echo "GPU $index:$name (UUID: GPU-$index)" ;;
    *=index,name*) echo "$line" ;;
    *=memory.total*) echo $total ;;
    *=memory.used*) echo $used ;;
    *) exit 2 ;;
  esac
done
"""


def fake_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that gives this machine a number of GPUs: `have(count, mebibytes, first)`, where `first` is the memory
    of the first one. torch counts those that CUDA_VISIBLE_DEVICES leaves visible."""

    def have(count: int, mebibytes: int = 81559, first: int | None = None) -> None:
        programs = folder / "programs"
        programs.mkdir(exist_ok=True)
        sizes = [mebibytes if index or first is None else first for index in range(count)]
        lines = [f"{index}, NVIDIA H100, {size}, 3, 590.1, 9.0\n" for index, size in enumerate(sizes)]
        (programs / "gpus.txt").write_text("".join(lines), encoding="utf-8")
        ids = range(count)
        script = NVIDIA_SMI.format(ids=" ".join(map(str, ids)), lines=programs / "gpus.txt")
        write_script(programs / "nvidia-smi", script)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible_gpus(count))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "to be removed, and put back in the end")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return have


def visible_gpus(count: int) -> int:
    everything = ",".join(map(str, range(count)))
    return len([index for index in os.environ.get("CUDA_VISIBLE_DEVICES", everything).split(",") if index])
