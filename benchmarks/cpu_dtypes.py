"""Whether a CPU multiplies matrices faster in float32 or in bfloat16, which decides what `make small-tutor` takes.

    python -m benchmarks.cpu_dtypes [--tokens 2640] [--rounds 7]

The matrices are those of a layer of SmolLM2-135M-Instruct and a micro-batch of its training. Of each, the forward
product, the gradient of its input and that of its weights are computed with both dtypes in turns. Prints the medians of
the seconds of all products together, and what this project takes this CPU for.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from classroom_rl.system.startup import has_fast_bfloat16

SHAPES = {"attention": (576, 576), "up": (576, 1536), "down": (1536, 576)}
"""Inputs and outputs of the linear maps."""
DTYPES = (torch.float32, torch.bfloat16)


def products(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Each product of a layer's linear maps, by name."""
    by_name = {}
    for name, (inputs, outputs) in SHAPES.items():
        x, weights, gradient = (
            torch.randn(size, dtype=dtype) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        by_name[f"{name}, forward"] = lambda x=x, weights=weights: x @ weights.t()
        by_name[f"{name}, gradient of the input"] = lambda gradient=gradient, weights=weights: gradient @ weights
        by_name[f"{name}, gradient of the weights"] = lambda gradient=gradient, x=x: gradient.t() @ x
    return by_name


def measure(tokens: int, rounds: int) -> dict[str, list[float]]:
    """The median seconds of each product with each dtype; the first round warms up."""
    products_by_dtype = [products(tokens, dtype) for dtype in DTYPES]
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in DTYPES] for name in products_by_dtype[0]}
    for number in range(rounds + 1):
        for name in products_by_dtype[0]:
            for index, functions in enumerate(products_by_dtype):
                started = time.perf_counter()
                functions[name]()
                if number:
                    seconds[name][index].append(time.perf_counter() - started)
    return {name: [median(times) for times in timings] for name, timings in seconds.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2640, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    medians = measure(arguments.tokens, arguments.rounds)
    print("| milliseconds | float32 | bfloat16 |\n|---|---|---|")
    for name, by_dtype in medians.items():
        print(f"| {name} | " + " | ".join(f"{1000 * value:.1f}" for value in by_dtype) + " |")
    totals = [sum(by_dtype[index] for by_dtype in medians.values()) for index in range(len(DTYPES))]
    print(f"\nbfloat16 takes {totals[1] / totals[0]:.2f} x as long, with {torch.get_num_threads()} threads")
    print(f"taken for fast in bfloat16: {'yes' if has_fast_bfloat16() else 'no'}")


if __name__ == "__main__":
    main()
