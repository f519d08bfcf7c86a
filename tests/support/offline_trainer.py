"""The real trainers (GRPO, PPO, online DPO) on scripted episodes: no server, no engine, a model of few weights.

`loop.batch()` plays, scores and cuts a batch as a training step does, and `loss_and_gradients` computes its loss with
all micro-batches.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.rollout.tokens import Turn
from classroom_rl.trainer.arguments import training_arguments
from classroom_rl.trainer.batch import Batch
from classroom_rl.trainer.loop import TrainingLoop
from classroom_rl.trainer.model_loading import load_policy
from classroom_rl.trainer.run import algorithm_of
from classroom_rl.trainer.servers import AssignedServer

PROBLEMS = [Problem.of(f"lesson {i}", "") for i in range(4)]
OVERRIDES = [
    "train.number_of_problems_per_batch=2",
    "train.num_samples_per_problem=4",
    "train.per_device_train_batch_size=4",
    "train.optimizer=adamw_torch",
    "train.dtype=float32",
    "train.gradient_checkpointing=false",
    "teacher_model.vllm.temperature=1.0",
]


def save_tiny_model(folder: Path, tokenizer_of: Path) -> Path:
    """A model with seeded random weights and the quickstart's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=len(tokenizer), **shape, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversation(index: int, problem: Problem, seed: int, **changes: Any) -> ConversationRecord:
    """A conversation of three teacher messages with random tokens, log-probs and scores."""
    rng = random.Random(seed * 1000 + index)
    turns, ids, mask, logprobs = [], [], [], []
    for number in range(5):
        by_teacher = number % 2 == 0
        tokens = [rng.randrange(20, 500) for _ in range(rng.randrange(3, 8))]
        span = (len(ids), len(ids) + len(tokens)) if by_teacher else None
        policy = PolicyVersion("run", 0)
        role = ("teacher", policy) if by_teacher else ("student", None)
        turns.append(Turn(role[0], f"message {number}", tokens=len(tokens), span=span, policy=role[1]))
        ids += [*tokens, 5]
        mask += [int(by_teacher)] * len(tokens) + [0]
        logprobs += [-rng.random() - 5.5 if by_teacher else 0.0 for _ in tokens] + [0.0]
    score = rng.random()
    fields = {
        "id": f"r{seed}-{index:04d}",
        "request_id": f"r{seed}",
        "step": 0,
        "index": index,
        "problem_id": problem.id,
        "problem": problem.text,
        "answer": problem.answer,
        "type": "guided",
        "turns": turns,
        "verdicts": [Verdict("pedagogical_eval", 0, scores=Scores(score, score, 10 * score))],
        "rewards": {"pedagogical": round(score, 4)},
        "reward": round(score, 4),
        "prompt_ids": [rng.randrange(20, 500) for _ in range(6)],
        "completion_ids": ids,
        "mask": mask,
        "logprobs": logprobs,
        "meta": {},
    }
    return ConversationRecord.model_validate(fields | changes)


class ScriptedClient:
    """Answers every request with the conversations of `converse`."""

    def __init__(self, converse: Any, weights: dict[str, float]):
        self._converse = converse
        self.weights = weights

    def play(self, request: SampleRequest) -> None:
        """Nothing is missing: `sample` plays at once."""

    def sample(self, request: SampleRequest) -> SampleResponse:
        problems = [Problem.of(*pair) for pair in zip(request.problems, request.answers, strict=True)]
        records = [self._converse(index, problem) for index, problem in enumerate(problems)]
        policy = request.wanted_policy
        return SampleResponse(
            request_id=request.request_id, policy=policy, conversations=records, reward_weights=self.weights
        )


class OfflineLoop(TrainingLoop):
    """The training loop with batches from a `ScriptedClient`."""

    def batch(self) -> list[Batch]:
        """The micro-batches of one batch, in the order in which they are trained on."""
        self.model.train()
        self.create_optimizer()
        self.micro_batches, self._totals = self.next_batch()
        return self.micro_batches

    def loss_and_gradients(self, batch: Sequence[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss of a whole batch, and the gradient of every parameter."""
        self.model.zero_grad()
        self.algorithm.start_pass(True, self.state.global_step)
        total = 0.0
        for micro in batch:
            loss = self.loss_of(self.model, micro, True)
            loss.backward()
            total += loss.item()
        self.keep_figures(self.algorithm.end_pass(True, self.accelerator, self))
        return total, {
            name: parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def offline_trainer(
    folder: Path,
    model: Path,
    overrides: Sequence[str] = (),
    play: Any = None,
    problems: Sequence[Problem] = PROBLEMS,
    checkpoint: Path | None = None,
    held_out: Sequence[Problem] = (),
) -> Any:
    """The trainer of `language_tutor` with these overrides, on the tiny model."""
    paths = [f"teacher_model.model_name_or_path={model}", f"logging.save_dir={folder}"]
    config = load(TrainRLConfig, "train_rl", [*OVERRIDES, *paths, *overrides], check_train_rl)
    play = play or (lambda index, problem: conversation(index, problem, seed=1))
    gpus = SimpleNamespace(wake_engines=lambda: None, sleep_engines=lambda: None)
    session = SimpleNamespace(
        config=config,
        gpus=gpus,
        problems=list(problems),
        client=ScriptedClient(play, reward_weights(config)),
        run_folder=folder,
        run_id="run",
        server=AssignedServer(0, "", is_leader=True),
        checkpoint=None if checkpoint is None else str(checkpoint),
        contents={},
        held_out=list(held_out),
    )
    folder.mkdir(parents=True, exist_ok=True)
    arguments = training_arguments(config, folder)
    algorithm = algorithm_of(config, folder, checkpoint)
    loop = OfflineLoop(session, load_policy(config, arguments), algorithm, arguments)
    loop.publisher.publish = lambda _loop: PolicyVersion("run", 0)
    return loop
