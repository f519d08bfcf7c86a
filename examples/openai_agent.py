"""An agent of one's own, written with openai-python, that trains the model it talks to: it learns to guess numbers.

    make quickstart-models            # the untrained model, unless make quickstart has run here
    python examples/openai_agent.py   # writes the problems and the configuration into runs/agent
    PYTHONPATH=examples ./start_rl_training.sh --config-dir runs/agent --config-name agent

The server calls `play` for every episode, each with a URL of its own, and the trainer learns from the tokens that were
sampled there. The mean of the rewards is in `rewards/posted/mean` of runs/agent/metrics.jsonl. With
`generation.agent=null`, agents that run elsewhere ask for episodes: POST /agent/next of the server.
"""

import json
import re
from pathlib import Path

from openai import OpenAI

CONFIG = """
environment: agent
train:
  {number_of_problems_per_batch: 8, num_samples_per_problem: 16, per_device_train_batch_size: 32, mu: 1, beta: 0.0,
   max_steps: 40, learning_rate: 1e-3, optimizer: adamw_torch, dtype: float32, gradient_checkpointing: false}
teacher_model:
  model_name_or_path: runs/quickstart/world/blank
  vllm: {temperature: 1.0, max_length: 256, max_num_seqs: 128, gpu_memory_utilization: 0.15, dtype: float32,
         enforce_eager: true, cpu_kvcache_gib: 1, cpu_cores: "0"}
generation: {agent: "openai_agent:play", max_turns: 7, max_tokens_in_conversation: 256, max_tokens_per_turn: 1}
dataset: {train_datasets: [{name_or_path: runs/agent/numbers.jsonl}]}
logging: {save_dir: runs/agent, save_steps: 40}
"""
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # one pool of connections for all episodes


def play(base_url, api_key, problem):
    """Play one game, and return its reward: 1 for the number, and 0.5 for messages that are numbers."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": f"Guess a number from 0 to 7: {problem.text}"}]
    number, guesses = int(problem.answer), []
    while number not in guesses and len(guesses) < 4:
        answer = client.chat.completions.create(model="teacher", messages=messages)
        text = answer.choices[0].message.content
        guess = int(text) if re.fullmatch(r"\s*[0-7]\s*", text) else None
        guesses.append(guess)
        hint = "One digit." if guess is None else "Higher." if guess < number else "Lower."
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return float(number in guesses) + 0.5 * sum(guess is not None for guess in guesses) / len(guesses)


if __name__ == "__main__":
    folder = Path("runs/agent")
    folder.mkdir(parents=True, exist_ok=True)
    problems = [json.dumps({"problem": f"game {number}", "answer": str(number)}) + "\n" for number in range(8)]
    (folder / "numbers.jsonl").write_text("".join(problems), encoding="utf-8")
    (folder / "agent.yaml").write_text(CONFIG, encoding="utf-8")
