"""The training of a configuration by TRL alone: its GRPOTrainer, with transformers' `generate` in a `rollout_func`.

    python -m benchmarks.trl_alone OUT --config-name quickstart [overrides]

It is what one writes without this project: all conversations of a batch go on together, teacher and student answer by
turns in one `generate` each, and the judge is called in the reward function. Prompts, lessons, the draw of the
student's persona, the limits, the judge, and TRL's arguments are those of the configuration. OUT gets a line for each
step: its number, the time at its end, its reward and the messages that were played. `benchmarks.whole_step` compares
it with this project.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.models import ModelConfig
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.values import END_OF_CONVERSATION
from classroom_rl.environments.classroom.config import setup_options
from classroom_rl.environments.classroom.setup import Setup, draw_setup
from classroom_rl.environments.classroom.teacher import first_messages, opening_turns, opens_dialogue
from classroom_rl.judges.verdicts import parse_verdict
from classroom_rl.models.pretrained import load_tokenizer
from classroom_rl.rollout.chat_template import ReplyFrame, encode_chat
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.engine import ConversationFacts
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.thoughts import visible_messages
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.open_models import embedded_judge, open_readers
from classroom_rl.system.distributed import communication_backend, keep_deepspeed_from_compiling
from classroom_rl.trainer.model_loading import weights_dtype


@dataclass
class Dialogue:
    """One conversation: what was said, the teacher's context, and which of its tokens the teacher sampled."""

    problem: Problem
    setup: Setup
    turns: list[Turn]
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)

    @property
    def next_persona(self) -> str:
        return self.setup.personas[sum(turn.persona is not None for turn in self.turns)]


class Rollout:
    """TRL's `rollout_func`: plays a conversation for each prompt, all of them in step."""

    def __init__(self, config: TrainRLConfig, problems: Sequence[Problem]):
        self._config, self._problems = config, {problem.id: problem for problem in problems}
        self._tokenizer = load_tokenizer("teacher_model", config.teacher_model.model_name_or_path)
        self._frame = ReplyFrame(self._tokenizer)
        dtype = getattr(torch, config.student_model.vllm.dtype)
        self._student = AutoModelForCausalLM.from_pretrained(
            config.student_model.model_name_or_path, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
        self.messages = 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        config = self._config
        teacher = trainer.accelerator.unwrap_model(trainer.model)
        self._student.to(teacher.device)
        dialogues = [self._open(self._problems[problem_id], trainer.state.global_step) for problem_id in prompts]
        if opens_dialogue(config.generation.teacher_prompt_path):
            self._reply(dialogues)
        for dialogue in dialogues:
            dialogue.prompt_ids = self._first_prompt(dialogue)
        active = dialogues
        while active:
            self._teach(active, teacher)
            active = [
                dialogue
                for dialogue in active
                if len(dialogue.turns) < config.generation.max_turns
                and END_OF_CONVERSATION not in dialogue.turns[-1].text
                and self._room(dialogue) > 1
            ]
            if active:
                self._reply(active)
        self.messages = sum(len(dialogue.turns) for dialogue in dialogues)
        return {
            "prompt_ids": [dialogue.prompt_ids for dialogue in dialogues],
            "completion_ids": [dialogue.completion_ids for dialogue in dialogues],
            "logprobs": None,
            "env_mask": [dialogue.mask for dialogue in dialogues],
            "dialogue": dialogues,
        }

    def _open(self, problem: Problem, step: int) -> Dialogue:
        generation = self._config.generation
        setup = draw_setup(problem, self._config.seed, step, setup_options(generation))
        return Dialogue(problem, setup, opening_turns(generation, problem.text, setup.student_name))

    def _first_prompt(self, dialogue: Dialogue) -> list[int]:
        """The teacher's first prompt; it holds what the template opens the dialogue with, and the student's answer."""
        generation, setup = self._config.generation, dialogue.setup
        text = dialogue.problem.text
        first = first_messages(generation, text, setup.student_name, setup.type, dialogue.turns)
        return encode_chat(self._tokenizer, first)

    def _room(self, dialogue: Dialogue) -> int:
        used = len(dialogue.prompt_ids) + len(dialogue.completion_ids)
        return self._config.generation.max_tokens_in_conversation - used

    def _teach(self, dialogues: Sequence[Dialogue], model: PreTrainedModel) -> None:
        prompts = [dialogue.prompt_ids + dialogue.completion_ids for dialogue in dialogues]
        for dialogue, ids in zip(dialogues, self._sample(model, prompts, self._config.teacher_model), strict=True):
            ended = ids[-1] == self._frame.turn_end_id
            # A message that was cut off is closed by a token that was not sampled, so its mask is 0.
            forced = [] if ended else [self._frame.turn_end_id]
            dialogue.completion_ids += ids + forced
            dialogue.mask += [1] * len(ids) + [0] * len(forced)
            dialogue.turns.append(Turn("teacher", self._text(ids)))

    def _reply(self, dialogues: Sequence[Dialogue]) -> None:
        prompts = [encode_chat(self._tokenizer, self._student_view(dialogue)) for dialogue in dialogues]
        for dialogue, ids in zip(
            dialogues, self._sample(self._student, prompts, self._config.student_model), strict=True
        ):
            dialogue.turns.append(Turn("student", self._text(ids), dialogue.next_persona))
            if dialogue.prompt_ids:
                framed = self._frame.reply(dialogue.turns[-1].text)
                dialogue.completion_ids += framed
                dialogue.mask += [0] * len(framed)

    def _student_view(self, dialogue: Dialogue) -> list[dict[str, str]]:
        generation: GenerationConfig = self._config.generation
        path = generation.student_personas_prompts_paths[dialogue.next_persona]
        named = {"student_name": dialogue.setup.student_name, "problem": dialogue.problem.text}
        messages = [{"role": "system", "content": render(path, **named, include_thinking=generation.use_thinking)}]
        roles = {"teacher": "user", "student": "assistant"}
        return messages + [{"role": roles[turn.role], "content": turn.text} for turn in dialogue.turns]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token != self._frame.turn_end_id]).strip()

    def _sample(self, model: PreTrainedModel, prompts: list[list[int]], role: ModelConfig) -> list[list[int]]:
        """One message after each prompt, by one `generate`."""
        width, end = max(map(len, prompts)), self._frame.turn_end_id
        room = self._config.generation.max_tokens_in_conversation - width - 1
        ids = torch.full((len(prompts), width), end)
        attended = torch.zeros_like(ids)
        # Padded on the left: `generate` goes on from the last column of every row.
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], attended[row, width - len(prompt) :] = torch.tensor(prompt), 1
        was_training = model.training
        model.eval()
        with torch.inference_mode():
            sequences = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=attended.to(model.device),
                do_sample=True,
                temperature=role.vllm.temperature,
                top_k=max(role.vllm.top_k, 0),
                top_p=role.vllm.top_p,
                max_new_tokens=min(self._config.generation.max_tokens_per_turn, room),
                eos_token_id=end,
                pad_token_id=end,
                use_cache=True,
            )
        model.train(was_training)
        completions = []
        for row in sequences[:, width:].tolist():
            completions.append(row[: row.index(end) + 1] if end in row else row)
        return completions


class Reward:
    """TRL's reward function: the embedded judge of the configuration."""

    __name__ = "judge"

    def __init__(self, config: TrainRLConfig):
        self._judge = embedded_judge(config.judge_model.model_name_or_path, open_readers(config.generation))
        (self._rule,) = config.generation.judge_rules
        self._max_turns = config.generation.max_turns

    def __call__(self, prompts: list, completions: list, dialogue: list[Dialogue], **_: Any) -> list[float]:
        return [self._score(conversation) for conversation in dialogue]

    def _score(self, dialogue: Dialogue) -> float:
        facts = ConversationFacts(tuple(turn.persona for turn in dialogue.turns), self._max_turns)
        messages = visible_messages(dialogue.turns)
        judging = self._judge.judge(self._rule, messages, dialogue.problem.text, 0, facts)
        return parse_verdict(self._rule, 0, asyncio.run(judging)).scores.final_reward


class Lines(TrainerCallback):
    """Writes a line for each step."""

    def __init__(self, path: Path, rollout: Rollout):
        self._path, self._rollout = path, rollout

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            line = {"step": state.global_step, "time": time.time(), "reward": logs["reward"]}
            with self._path.open("a") as file:
                file.write(json.dumps({**line, "messages": self._rollout.messages}) + "\n")


def grpo_config(config: TrainRLConfig, folder: str) -> GRPOConfig:
    """TRL's arguments for this training, in one process; what is not set has TRL's default, which is this project's."""
    train, rows = config.train, config.train.per_device_train_batch_size
    passes = train.number_of_problems_per_batch * train.num_samples_per_problem // rows
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_generations=train.num_samples_per_problem,
        num_iterations=train.mu,
        max_steps=train.max_steps,
        num_train_epochs=train.epochs,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        optim=train.optimizer,
        max_grad_norm=train.max_grad_norm,
        beta=train.beta,
        epsilon=train.epsilon,
        epsilon_high=train.upper_clip,
        loss_type=train.loss_type,
        scale_rewards=train.scale_rewards,
        temperature=config.teacher_model.vllm.temperature,
        max_completion_length=config.generation.max_tokens_in_conversation,
        gradient_checkpointing=train.gradient_checkpointing,
        bf16=train.dtype == "bfloat16",
        fp16=train.dtype == "float16",
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=communication_backend(),
        model_init_kwargs={
            "dtype": weights_dtype(train.dtype, config.teacher_model.adapter is not None),
            "trust_remote_code": False,
            "use_safetensors": True,
        },
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        seed=config.seed,
        disable_tqdm=True,
    )


def main() -> None:
    """Train as the command line says."""
    out, overrides = Path(sys.argv[1]), sys.argv[2:]
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    config = load(TrainRLConfig, "train_rl", overrides, check_train_rl)
    problems = load_problems(config.dataset.train_datasets)
    with tempfile.TemporaryDirectory() as folder:
        keep_deepspeed_from_compiling()
        rollout = Rollout(config, problems)
        trainer = GRPOTrainer(
            model=config.teacher_model.model_name_or_path,
            args=grpo_config(config, folder),
            reward_funcs=Reward(config),
            rollout_func=rollout,
            train_dataset=Dataset.from_dict({"prompt": [problem.id for problem in problems]}),
            processing_class=load_tokenizer("teacher_model", config.teacher_model.model_name_or_path),
            callbacks=[Lines(out, rollout)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
