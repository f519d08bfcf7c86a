"""Whether an exported tutor answers as in its run: greedy answers to 50 prompts, read by other programs.

    python -m benchmarks.exported RUN CONVERSATIONS [--older PYTHON] [--prompts 50]
        [--pre-tokenizer NAME]

RUN is a finished run, CONVERSATIONS a file of records of its environment (`conversations.jsonl` of an evaluation). A
prompt is the text before the tutor's last message, which each program splits into tokens itself. RUN is exported as
`merged` and as `gguf`, in float32, and read by transformers, by vLLM, by transformers from the GGUF file, and with
--older by another Python that has torch and transformers 4.57. For each it prints how many answers of up to 32 tokens
are those of RUN/model, token for token; for the first that is not, by how much the model preferred its own token.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from classroom_rl.results.run_folder import read_lines

READER = """\
import json, pathlib, sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
kind, folder, out, prompts = sys.argv[1], sys.argv[2], sys.argv[3], json.load(open(sys.argv[4]))
own = {"gguf_file": next(pathlib.Path(folder).glob("*.gguf")).name} if kind == "gguf" else {}
tokenizer = AutoTokenizer.from_pretrained(folder, **own)
encoded, answers, gaps = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in prompts], [], []
if kind == "vllm":
    import vllm
    engine = vllm.LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=1024)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=32)
    found = engine.generate([{"prompt_token_ids": each} for each in encoded], greedy)
    answers = [list(each.outputs[0].token_ids) for each in found]
else:
    if kind == "gguf":  # of Qwen3, transformers does not read the size of the heads from such a file
        own["config"] = AutoConfig.from_pretrained(pathlib.Path(folder).with_name("merged"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own).eval()
    for ids in encoded:
        found = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                               do_sample=False, max_new_tokens=32, return_dict_in_generate=True, output_logits=True)
        answers.append(found.sequences[0, len(ids):].tolist())
        best = [each[0].log_softmax(-1).topk(2).values for each in found.logits]
        gaps.append([float(first - second) for first, second in best])
answers = [each[: each.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in each else each for each in answers]
version = vllm.__version__ if kind == "vllm" else transformers.__version__
json.dump({"version": version, "prompts": encoded, "answers": answers, "gaps": gaps}, open(out, "w"))
"""
"""The program of each reader: text, because an older Python does not have this project."""


def prompts_of(conversations: Path, model: Path, most: int) -> list[str]:
    """The texts before the tutor's last message, of the first conversations in which they differ."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    texts: dict[str, None] = {}
    for record in read_lines(conversations):
        before = [0, *record["mask"]]
        # A message of the tutor starts where the mask of sampled tokens changes from 0 to 1.
        starts = [position for position, is_sampled in enumerate(record["mask"]) if is_sampled and not before[position]]
        if starts and len(texts) < most:
            texts[tokenizer.decode([*record["prompt_ids"], *record["completion_ids"][: starts[-1]]])] = None
    return list(texts)


def answers(kind: str, folder: Path, prompts: Path, python: str = sys.executable) -> dict[str, Any]:
    """What the model in a folder answers, with the program's version, the prompts' tokens, and the gaps between the
    log-probs of the two most likely tokens (not from vLLM)."""
    out = prompts.with_name("answers.json")
    # vLLM's processes would import the main program, which a text is not: it runs in one.
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, "-c", READER, kind, str(folder), str(out), str(prompts)]
    completed = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if completed.returncode:
        sys.exit(f"{kind} cannot read {folder}:\n{completed.stderr[-3000:]}")
    return json.loads(out.read_text(encoding="utf-8"))


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """How many prompts and answers are equal, and where the first answer parts that is not."""
    prompts = sum(map(list.__eq__, ours["prompts"], theirs["prompts"]))
    unequal = [number for number, answer in enumerate(ours["answers"]) if answer != theirs["answers"][number]]
    count = len(ours["answers"])
    text = f"{count - len(unequal)} of {count} answers equal, {prompts} prompts of equal tokens"
    if unequal:
        our_answer, their_answer = ours["answers"][unequal[0]], theirs["answers"][unequal[0]]
        position = next(
            (index for index, pair in enumerate(zip(our_answer, their_answer, strict=False)) if len({*pair}) > 1), None
        )
        position = min(len(our_answer), len(their_answer)) if position is None else position  # one of them ends there
        gap = ours["gaps"][unequal[0]][position]
        text += f"; answer {unequal[0]} parts at token {position}, preferred by {gap:.4f}"
    return text


def main() -> None:
    """Export, read, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--older", metavar="PYTHON")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--pre-tokenizer", metavar="NAME", help="of the GGUF file, as in classroom_rl.export")
    arguments = parser.parse_args()
    pre_tokenizer = ["--pre-tokenizer", arguments.pre_tokenizer] if arguments.pre_tokenizer else []
    with TemporaryDirectory() as folder:
        merged, gguf, prompts = Path(folder, "merged"), Path(folder, "gguf"), Path(folder, "prompts.json")
        for to, out, options in (("merged", merged, []), ("gguf", gguf, ["--dtype", "float32", *pre_tokenizer])):
            export = ["-m", "classroom_rl.export", arguments.run, "--to", to, "--out", out, *options]
            subprocess.run([sys.executable, *map(str, export)], check=True)
        prompts.write_text(json.dumps(prompts_of(arguments.conversations, arguments.run / "model", arguments.prompts)))
        ours = answers("transformers", arguments.run / "model", prompts)
        older = [("transformers", merged, arguments.older)] if arguments.older else []
        for kind, exported, python in [
            ("transformers", merged, sys.executable),
            *older,
            ("vllm", merged, sys.executable),
            ("gguf", gguf, sys.executable),
        ]:
            theirs = answers(kind, exported, prompts, python)
            print(f"{exported.name} in {kind} {theirs['version']}: {compared(ours, theirs)}", flush=True)


if __name__ == "__main__":
    main()
