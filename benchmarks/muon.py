"""Measures how long a Muon step takes on this machine's CPU, with orthogonalisation in float32 and in bfloat16 (torch).

The two alternate on the quickstart's untrained model, with the same random gradients. The benchmark prints the median
seconds of each, and their ratio.

    python -m benchmarks.muon [--rounds 9] [--model runs/quickstart/world/blank]

It needs the models of `make quickstart-models`.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from classroom_rl.trainer.sft import muon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each, after one that is not counted")
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/world/blank"))
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    optimizer = muon.MuonWithAdamW(model, learning_rate=0.01)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    ways = {"float32": muon.orthogonalised, "bfloat16": muon._IN_BFLOAT16}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds + 1):
        for name, way in ways.items():
            with patch.object(muon, "orthogonalised", way):
                started = time.perf_counter()
                optimizer.step()
                seconds[name].append(time.perf_counter() - started)
    medians = {name: median(times[1:]) for name, times in seconds.items()}
    for name, value in medians.items():
        print(f"{name:<9} {value:.4f} s a step")
    print(f"bfloat16 takes {medians['bfloat16'] / medians['float32']:.1f} times as long")


if __name__ == "__main__":
    main()
