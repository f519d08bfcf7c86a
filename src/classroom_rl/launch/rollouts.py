"""The command line of rollouts: `classroom-rollouts --help`."""

import argparse
import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from classroom_rl.errors import ClassroomError, ConfigError, RolloutsStopped
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.rollout_set import RolloutSet
from classroom_rl.rollout.rollouts import Rollouts
from classroom_rl.rollout.step import HISTORIES, WITHOUT_THINKING
from classroom_rl.rollout.store.set_files import SUFFIXES
from classroom_rl.system.keys import print_error

FUNCTIONS = ("next_prompt", "stop", "reward")
_ENGINES = ("hf", "vllm", "api")
_EXAMPLES = """\
examples:
  # one answer to each of ten problems, eight times, with a small model on this machine
  classroom-rollouts --model Qwen/Qwen3-0.6B --data problems.jsonl --limit 10 --copies 8 --out answers.parquet

  # conversations of up to 20 steps; my_task.py defines next_prompt, stop and reward
  classroom-rollouts --engine vllm --model Qwen/Qwen3-4B --data problems.jsonl --functions my_task.py --steps 20 \\
      --out played.parquet --plots plots/

  # the same with a model behind an API
  classroom-rollouts --engine api --base-url http://127.0.0.1:8000/v1 --api-key-env '' --model my-model \\
      --data problems.jsonl --functions my_task.py --steps 20 --out played.jsonl

The functions, plain or async:
  def next_prompt(rollout, step): …   # the user's message of step 1, 2, …; None if there is none
  def stop(rollout, last): …          # True, or the reason as text, if the rollout has come to its end
  def reward(rollout): …              # a number, None, or a list with one of these for each step
"""


@dataclass(frozen=True)
class Source:
    """A dataset of the command line; fields as in `datasets.DatasetSource`."""

    name_or_path: str
    split: str
    problem_column: str
    answer_column: str | None
    problem_template: str | None
    ratio: float = 1.0
    columns: dict[str, str] = field(default_factory=dict)
    sibling_problems_column: str | None = None
    steps_column: str | None = None


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(
        prog="classroom-rollouts",
        description="Play rollouts of a model on a dataset: prompts in, every step recorded, rewards out.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser.add_argument_group("model"))
    _add_data(parser.add_argument_group("data"))
    _add_rollouts(parser.add_argument_group("rollouts"))
    output = parser.add_argument_group("what comes out")
    output.add_argument("--out", type=Path, metavar="FILE", help=f"where to save the rollouts: {' or '.join(SUFFIXES)}")
    output.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="where to draw rewards, steps and ends as PNG files"
    )
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _add_model(group: Any) -> None:
    group.add_argument("--engine", choices=_ENGINES, default="hf", help="transformers (default), vLLM, or an API")
    group.add_argument("--model", required=True, help="folder or Hub name; with --engine api its name at the provider")
    group.add_argument("--device", help="of --engine hf: cuda, mps or cpu (default: the first that is there)")
    group.add_argument("--dtype", help="of hf and vllm: float32, bfloat16 or float16 (default: the checkpoint's)")
    group.add_argument("--batch-size", type=int, default=32, help="of --engine hf: messages at a time (default: 32)")
    group.add_argument("--max-length", type=int, help="of --engine vllm: the context in tokens")
    group.add_argument("--base-url", help="of --engine api: the address (default: OpenAI's)")
    group.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="of --engine api: the environment variable with the key (default: OPENAI_API_KEY; '' for none)",
    )


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data",
        required=True,
        action="append",
        metavar="NAME",
        help="a JSONL, JSON, CSV or Parquet file, or a dataset on the Hub; may be given several times",
    )
    group.add_argument("--split", default="train", help="of a dataset on the Hub (default: train)")
    group.add_argument("--problem-column", default="problem", help="the column with the prompt (default: problem)")
    group.add_argument("--answer-column", help="the column that becomes rollout.meta['answer'] (default: none)")
    group.add_argument("--prompt-template", metavar="FILE", help="a Jinja file that makes a prompt of a row's columns")
    group.add_argument("--limit", type=int, default=-1, help="the most prompts (default: all)")
    group.add_argument("--shuffle", action="store_true", help="shuffle the prompts, with --seed")


def _add_rollouts(group: Any) -> None:
    group.add_argument(
        "--functions", type=Path, metavar="FILE.py", help="your Python file with next_prompt, stop, reward; it is run"
    )
    group.add_argument("--copies", type=int, default=1, help="rollouts on each prompt (default: 1)")
    group.add_argument("--steps", type=int, default=50, help="the most messages of the model (default: 50)")
    group.add_argument("--history", choices=HISTORIES, default=WITHOUT_THINKING, help="(default: without_thinking)")
    group.add_argument("--system", help="a system message")
    group.add_argument("--seed", type=int, default=0, help="equal seeds give equal rollouts (default: 0)")
    group.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    group.add_argument("--top-p", type=float, default=1.0, help="(default: 1)")
    group.add_argument("--top-k", type=int, default=-1, help="(default: -1, all tokens)")
    group.add_argument("--max-tokens", type=int, default=1024, help="of one message (default: 1024)")
    group.add_argument("--concurrency", type=int, default=256, help="rollouts at a time (default: 256)")


def load_functions(path: Path | None) -> dict[str, Any]:
    """The functions that a user's file defines, by name. The file is executed. Raises a `ConfigError` if the file does
    not exist, cannot be executed, or defines none of the functions."""
    if path is None:
        return {}
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"--functions is {path}, which is no Python file.")
    spec = importlib.util.spec_from_file_location("rollout_functions", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    functions = {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}
    if not functions:
        raise ConfigError(f"{path} defines none of {', '.join(FUNCTIONS)}.")
    return functions


async def open_engine(arguments: argparse.Namespace) -> Any:
    """Open the engine that the command line names. Raises a `ConfigError` if it cannot be opened, and an
    `EngineFailure` if vLLM cannot load the model."""
    if arguments.engine == "hf":
        from classroom_rl.engines.hf_engine import HfEngine

        return HfEngine(
            arguments.model, device=arguments.device, dtype=arguments.dtype, batch_size=arguments.batch_size
        )
    if arguments.engine == "api":
        from classroom_rl.engines.api_engine import ApiEngine

        return ApiEngine(arguments.model, arguments.base_url, arguments.api_key_env or None)
    options = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    return await _vllm_module().open_vllm(arguments.model, max_length=arguments.max_length, **options)


def _vllm_module() -> ModuleType:
    """The module that opens vLLM."""
    name = "classroom_rl.engines.vllm.engine"
    try:
        if importlib.util.find_spec("vllm") is None:
            raise ModuleNotFoundError("vllm is not installed", name="vllm")
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--engine vllm cannot be used here ({error}). It needs the package vllm; "
            "elsewhere, start `vllm serve` and use --engine api, or use --engine hf."
        ) from error


async def play(arguments: argparse.Namespace) -> RolloutSet:
    """Play the rollouts that the command line describes, and save them, even if they were stopped halfway."""
    functions = load_functions(arguments.functions)
    if arguments.out is not None and arguments.out.suffix not in SUFFIXES:
        raise ConfigError(f"--out is {arguments.out}; it must end with {' or '.join(SUFFIXES)}.")
    source_options = (arguments.split, arguments.problem_column, arguments.answer_column, arguments.prompt_template)
    sources = [Source(name, *source_options) for name in arguments.data]
    problems = load_problems(sources, arguments.limit, arguments.seed if arguments.shuffle else None)
    engine = await open_engine(arguments)
    try:
        runner = Rollouts(
            engine,
            max_steps=arguments.steps,
            history=arguments.history,
            seed=arguments.seed,
            system=arguments.system,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            max_tokens=arguments.max_tokens,
            concurrency=arguments.concurrency,
        )
        return await runner.run(problems, copies=arguments.copies, progress=not arguments.quiet, **functions)
    except RolloutsStopped as error:
        _save(arguments, error.done)
        raise
    finally:
        engine.shutdown()


def _save(arguments: argparse.Namespace, rollouts: RolloutSet) -> None:
    if arguments.out is not None:
        print(f"{len(rollouts)} rollouts are in {rollouts.save(arguments.out)}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, 1 if every rollout failed, or 2 after an error."""
    arguments = parser().parse_args(argv)
    try:
        rollouts = asyncio.run(play(arguments))
        print(rollouts.summary())
        _save(arguments, rollouts)
        if arguments.plots is not None:
            rollouts.plot(arguments.plots)
    except ClassroomError as error:
        print_error(error)
        return 2
    return int(all(rollout.failed for rollout in rollouts))


if __name__ == "__main__":
    sys.exit(main())
