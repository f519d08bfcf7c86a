"""An environment of one's own in one file, and how to train a model in it: the policy is to count.

    make quickstart-models                  # the untrained model, unless make quickstart has run here
    python examples/minimal_environment.py  # writes the problems and the configuration into runs/counting
    PYTHONPATH=examples ./start_rl_training.sh --config-dir runs/counting --config-name counting

The program says a digit, the policy the next one. Each `reward` is in `rewards/…/mean` of runs/counting/metrics.jsonl.
docs/environments.md tells what else an environment may have: tools, turn rewards, several models.
"""

import json
from pathlib import Path

from classroom_rl.config.base import EnvironmentConfig
from classroom_rl.rollout.dialogue import DialogueEnvironment, DialogueEpisode
from classroom_rl.rollout.problem import Problem

REWARD_NAMES = ("digit", "next")
CONFIG = """
environment: minimal_environment
train:
  {number_of_problems_per_batch: 8, num_samples_per_problem: 16, per_device_train_batch_size: 64, mu: 1, beta: 0.0,
   max_steps: 40, learning_rate: 1e-3, optimizer: adamw_torch, dtype: float32, gradient_checkpointing: false}
teacher_model:
  model_name_or_path: runs/quickstart/world/blank
  vllm: {temperature: 1.0, max_length: 256, max_num_seqs: 128, gpu_memory_utilization: 0.15, dtype: float32,
         enforce_eager: true, cpu_kvcache_gib: 1, cpu_cores: "0"}
generation: {max_turns: 3, max_tokens_in_conversation: 256, max_tokens_per_turn: 1}
dataset: {train_datasets: [{name_or_path: runs/counting/digits.jsonl}]}
logging: {save_dir: runs/counting, save_steps: 40}
"""


class Generation(EnvironmentConfig):
    """The `generation` block of a configuration. Own keys need `@config_group` (docs/environments.md)."""


def default_weights(generation: Generation) -> dict[str, float]:
    """The weights of the rewards where `train.reward_weights` is null."""
    return {"digit": 0.5, "next": 0.5}


class Environment(DialogueEnvironment):
    """A problem's text is the first digit; the policy counts on from it, twice."""

    @classmethod
    def first_messages(cls, problem: Problem, generation: Generation) -> list[dict[str, str]]:
        return [{"role": "user", "content": problem.text}]

    def reply(self, episode: DialogueEpisode) -> str | None:
        return str((int(episode.problem.text) + 5) % 10)  # what is to be counted on from in the next message

    def reward(self, name: str, episode: DialogueEpisode) -> float:
        """`digit`: the share of messages that are one. `next`: of those that are the right one."""
        first = int(episode.problem.text)
        expected = [str((first + offset) % 10) for offset in (1, 6)]
        texts = [message.strip() for message in episode.messages]
        if name == "digit":
            return sum(text.isdecimal() and len(text) == 1 for text in texts) / len(texts)
        return sum(text == right for text, right in zip(texts, expected, strict=False)) / len(texts)


if __name__ == "__main__":
    folder = Path("runs/counting")
    folder.mkdir(parents=True, exist_ok=True)
    problems = [json.dumps({"problem": str(digit), "answer": ""}) + "\n" for digit in range(10)]
    (folder / "digits.jsonl").write_text("".join(problems), encoding="utf-8")
    (folder / "counting.yaml").write_text(CONFIG, encoding="utf-8")
