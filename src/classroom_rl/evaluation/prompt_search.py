"""Searches for a better prompt of the teacher by reflection on judged conversations: the control that says whether a
training beats a better prompt (Agrawal et al., "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement
Learning", 2025, arXiv:2507.19457; the authors' package `gepa`).

    python eval.py --config-name optimise_prompt

`gepa` chooses lessons and prompts by a seed and by scores alone. Conversations are in the run's journal under ids that
follow from prompt and lesson, replies of the reflection model in a ledger. So a search that is started again in its
folder makes the same choices, plays nothing twice, and goes on where it was interrupted.
"""

import asyncio
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.evaluation import BASE, EvalConfig, reward_weights
from classroom_rl.config.load import record_run
from classroom_rl.config.values import SAMPLED
from classroom_rl.engines.api.call_ledger import USABLE, CallLedger, CallUsage
from classroom_rl.engines.api.chat_api import ChatApi, ChatRequest
from classroom_rl.environments.classroom.environment import Classroom
from classroom_rl.environments.classroom.prompt_check import check_lengths, check_prompts
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.environments.classroom.teacher import opening_turns, system_message
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.evaluation.compare import summarise_comparison
from classroom_rl.evaluation.held_out import load_measured_problems
from classroom_rl.evaluation.playing import EvaluationResult, make_requests
from classroom_rl.evaluation.progress import gather_or_stop
from classroom_rl.evaluation.report.comparison import comparison_text, write_comparison_report
from classroom_rl.evaluation.report.tables import paid_line
from classroom_rl.judges.model_judge import ApiChatEngine
from classroom_rl.judges.reference_answers import read_reference
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME, write_compared
from classroom_rl.results.trackers import log_to_wandb
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.engine import Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.prompts import check_template, render, variables_of
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.text import without_surrogates
from classroom_rl.rollout.thoughts import visible_messages, visible_text
from classroom_rl.system.storage import write_whole

if TYPE_CHECKING:
    from classroom_rl.server.sampling_service import SamplingService

logger = logging.getLogger(__name__)

BEST, BEST_PROMPT = "best", "best_prompt.txt"
_PROMPT = "teacher_prompt"
"""The name of what gepa improves."""
_VARIABLES = {"prompt": "…", "examples": [], "variables": [], "refused": []}


def search_prompt(config: EvalConfig) -> dict[str, Any]:
    """Search for a better prompt than `generation.teacher_prompt_path`, and compare the two on the held-out lessons.
    `logging.save_dir` gets the best one as `best_prompt.txt`, and the files of a comparison of tutors. Returns the
    content of metrics.json.

    Raises:
        ConfigError: if `gepa` is not installed, or there are too few training lessons.
        DataError: if held-out lessons are among the training lessons, or a template is wrong.
        The errors of `classroom_rl.evaluation.playing.play_all`.
    """
    try:
        import gepa  # noqa: F401
    except ImportError as error:
        raise ConfigError("prompt_search needs the package gepa: pip install gepa==0.1.4") from error
    search = config.prompt_search
    check_template("prompt_search.reflection_prompt_path", search.reflection_prompt_path, _VARIABLES)
    held_out, trained_on = load_measured_problems(config)
    train = load_problems(search.train_datasets or config.generation.implied_datasets("train"), seed=config.seed)
    if common := len({problem.text for problem in held_out} & {problem.text for problem in train}):
        raise DataError(
            f"{common} of the held-out lessons are among those of prompt_search.train_datasets: a prompt would be "
            "measured on what it was made for. Name other lessons in one of the two."
        )
    if len(train) < search.selection_lessons + search.minibatch_lessons:
        raise ConfigError(
            f"prompt_search.train_datasets has {len(train)} lessons, fewer than selection_lessons + minibatch_lessons: "
            "name more lessons, or lower these."
        )
    folder = record_run(config, "eval")
    about, results = asyncio.run(_search_and_measure(config, train, held_out, folder))
    metrics = {**summarise_comparison(config, results), "prompt_search": about, "problems_trained_on": trained_on}
    records = {name: result.records for name, result in results.items()}
    write_compared(folder / CONVERSATIONS_NAME, records)
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    print(comparison_text(metrics))
    kept, unusable = len(about["candidates"]) - 1, len(about["refused"])
    print(
        f"\nSearch: {about['conversations']} of {about['budget']} conversations ({about['without_verdict']} without a "
        f"verdict), {about['teacher_tokens']:,} tokens of the teacher and {about['student_tokens']:,} of the student; "
        f"{about['rounds']} rounds, {unusable} proposals that could not be used, {kept} prompts kept"
        f"{'' if about['best'] else ', none better than the first'}. {paid_line(about['paid'])}"
    )
    print(f"{write_comparison_report(folder, metrics, records)}\n{folder / 'metrics.json'}\n{folder / BEST_PROMPT}")
    log_to_wandb(config, metrics, folder)
    return metrics


class PromptAdapter:
    """What gepa calls, in a thread beside the event loop: plays prompts on lessons, and proposes new ones.

    Attributes:
        first: the prompt that the search begins with.
        counts: conversations, those without a verdict, rounds, and tokens that teacher and student sampled.
        refused: why proposals could not be used.
        failure: the error that ended the search. gepa would go on after an error in a proposal.
    """

    def __init__(
        self,
        config: EvalConfig,
        service: "SamplingService",
        folder: Path,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
        ledger: CallLedger,
    ):
        self._config, self._search, self._folder = config, config.prompt_search, folder
        self._service, self._roles = service, service.environment.roles
        self._train, self._held_out = train, held_out
        self._loop = asyncio.get_running_loop()
        self.first = Path(config.generation.teacher_prompt_path).read_text(encoding="utf-8")
        self._variables = variables_of(config.generation.teacher_prompt_path)
        self._ledger, model = ledger, self._search.reflection_model
        if model is not None:
            self._roles.apis["reflection"] = ChatApi(model, ledger, "prompt_search.reflection")
        self._played: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
        self.counts = Counter(conversations=0, without_verdict=0, rounds=0, teacher_tokens=0, student_tokens=0)
        self.refused: list[str] = []
        self.failure: Exception | None = None

    def evaluate(self, batch: list[Problem], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """The rewards of a prompt on lessons; 0 for a conversation without a verdict. A prompt plays a lesson once."""
        from gepa import EvaluationBatch

        prompt = candidate[_PROMPT]
        unplayed = [problem for problem in batch if (prompt, problem.id) not in self._played]
        for record in self._wait_for(self.play(prompt, unplayed, SAMPLED, 1)):
            self._played[prompt, record.problem_id] = record.reward or 0.0, example_of(record)
            self.counts.update(conversations=1, without_verdict=int(record.reward is None))
            self.counts.update({f"{turn.role}_tokens": turn.tokens for turn in record.turns})
        scores, examples = zip(*(self._played[prompt, problem.id] for problem in batch), strict=True)
        total, mean = self.counts["conversations"], sum(scores) / len(scores)
        logger.info("prompt %s: reward %.3f on %d lessons; %d conversations", _name(prompt), mean, len(batch), total)
        return EvaluationBatch(list(scores), list(scores), list(examples) if capture_traces else None)

    def make_reflective_dataset(self, candidate: dict[str, str], eval_batch: Any, components: list[str]) -> Any:
        """The judged conversations that a proposal is made from."""
        return {_PROMPT: eval_batch.trajectories}

    def propose_new_texts(
        self, candidate: dict[str, str], reflective_dataset: Mapping[str, Any], components: list[str]
    ) -> dict[str, str]:
        """A new prompt; {}, which ends the round, if no reply holds one that can be used."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature

        if self.failure is not None:  # gepa asks once more after an error
            raise self.failure
        self.counts["rounds"] += 1
        refused: list[dict[str, str]] = []
        while len(refused) < self._search.replies_per_proposal:
            fields = {"prompt": candidate[_PROMPT], "examples": reflective_dataset[_PROMPT], "refused": refused}
            request = render(self._search.reflection_prompt_path, **fields, variables=sorted(self._variables))
            reply = visible_text(self._wait_for(self._reflect(request)))
            prompt = without_surrogates(InstructionProposalSignature.output_extractor(reply)["new_instruction"])
            reason = self.why_unusable(prompt)
            if reason is None:
                return {_PROMPT: prompt}
            logger.info("a proposed prompt cannot be used: %s", reason)
            refused.append({"text": prompt, "reason": reason})
            self.refused.append(reason)
        return {}

    def stops(self, _: Any) -> bool:
        """Whether the search is over: after a failure, or if the next round might cost more than is left."""
        remaining = self._search.conversations - self.counts["conversations"]
        too_expensive = remaining < 2 * self._search.minibatch_lessons + self._search.selection_lessons
        return too_expensive or self.failure is not None or self.counts["rounds"] >= self._search.max_rounds

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except Exception as error:
            self.failure = error
            raise

    async def play(
        self, prompt: str, problems: Sequence[Problem], sampling: str, samples: int
    ) -> list[ConversationRecord]:
        """`samples` conversations of a prompt on each distinct problem. Seeds depend on the problem alone: all prompts
        meet the same students."""
        service, weights = self._service, reward_weights(self._config)
        generation, rules, judge = self._with_prompt(prompt), service.environment.rules, self._config.judge_model
        classroom = Classroom(generation, self._roles, service.journal, weights, rules, judge_options=judge)
        runner = Runner(classroom, service.journal, weights, service.runner.schedule)
        config, policy = replace(self._config, num_samples_per_problem=samples), self._roles.policy.policy
        requests = [
            request
            for problem in {problem.id: problem for problem in problems}.values()  # gepa fills batches up
            for request in make_requests([problem], config, sampling, policy, f"{_name(prompt)}-{problem.id}")
        ]
        return [
            record for answer in await gather_or_stop(map(runner.sample, requests)) for record in answer.conversations
        ]

    async def _reflect(self, request: str) -> str:
        """The reply of the reflection model; after a restart the same one, from the ledger."""
        messages = [{"role": "user", "content": request}]
        model = self._search.reflection_model or self._config.teacher_model
        seed = self._config.seed + self.counts["rounds"]  # equal requests of two rounds get replies of their own
        sampling = replace(Sampling.of(model.vllm, self._search.max_tokens), seed=seed)
        if model.is_remote:
            api = self._roles.apis["teacher" if self._search.reflection_model is None else "reflection"]
            return (await ApiChatEngine(model, api).chat(messages, sampling)).text
        key = ChatRequest(messages, sampling).key(model.model_name_or_path)
        if (stored_reply := self._ledger.find_reply(key)) is not None:
            return stored_reply[0]
        answer = await self._roles.teacher.chat(messages, sampling)
        call = self._ledger.enter(key, model.model_name_or_path, 0.0)
        self._ledger.settle(call, USABLE, answer.text, CallUsage(0, answer.tokens, 0.0))
        return answer.text

    def why_unusable(self, prompt: str) -> str | None:
        """Why a proposal is no prompt for all lessons; None if it is one. It says nothing about held-out lessons."""
        generation = self._with_prompt(prompt)
        path = generation.teacher_prompt_path
        try:
            if missing := sorted(self._variables - variables_of(path)):
                return f"it does not use {', '.join(missing)}"
            check_prompts(generation, judge_reads_templates=False)
            self._fill_in(generation, self._train)
        except DataError as error:
            return str(error).replace(path, "the template")
        try:
            self._fill_in(generation, self._held_out)
        except DataError:
            return "it cannot be filled in, or is too long, for a lesson that is not among these"
        return None

    def _with_prompt(self, prompt: str) -> GenerationConfig:
        """The configuration with this prompt, in a file named by its text: templates in memory and batches in the
        journal are known by that name."""
        path = self._folder / "prompts" / f"{_name(prompt)}.txt"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, prompt)
        return replace(self._config.generation, teacher_prompt_path=str(path))

    def _fill_in(self, generation: GenerationConfig, problems: Sequence[Problem]) -> None:
        for problem in problems:
            for name in dict.fromkeys(generation.student_names or [None]):
                system_message(generation, problem.text, name)
                opening_turns(generation, problem.text, name)
        if self._roles.teacher_has_tokens:
            limit = self._service.environment.rules.max_tokens_in_conversation
            check_lengths(problems, generation, self._roles.teacher.tokenizer, limit)


def _name(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def example_of(record: ConversationRecord) -> dict[str, Any]:
    """What the reflection model is shown of a conversation: the lesson as the teacher gets it, the visible messages,
    the reward, and the judge's scores, decisions and reasons, without the reference answer."""
    hidden = [re.escape(text) for text in (record.answer.strip(), read_reference(record.answer).text) if text]
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(hidden)})(?!\w)" if hidden else r"(?!)", re.IGNORECASE)
    verdicts = [
        {
            "rule": verdict.rule,
            "accepted": verdict.accepted,
            "scores": {} if verdict.scores is None else verdict.scores.values,
            "reasons": [pattern.sub("[the answer]", reason) for reason in (verdict.reasons or {}).values() if reason],
        }
        for verdict in record.verdicts
        if verdict.valid
    ]
    messages = visible_messages(record.turns)
    return {"lesson": record.problem, "messages": messages, "reward": record.reward, "verdicts": verdicts}


async def _search_and_measure(
    config: EvalConfig, train: Sequence[Problem], held_out: Sequence[Problem], folder: Path
) -> tuple[dict[str, Any], dict[str, EvaluationResult]]:
    """The search's entry in metrics.json; and the first prompt (`BASE`) and the best on the held-out lessons."""
    import gepa

    from classroom_rl.server.sampling_service import open_service

    search, model = config.prompt_search, config.prompt_search.reflection_model
    service = await open_service(config, reward_weights(config), folder)
    ledger = CallLedger(folder / "reflection_calls.sqlite", None if model is None else model.max_cost_usd)
    try:
        adapter = PromptAdapter(config, service, folder, train, held_out, ledger)
        result = await asyncio.to_thread(
            gepa.optimize,
            {_PROMPT: adapter.first},
            trainset=list(train[search.selection_lessons :]),
            valset=list(train[: search.selection_lessons]),
            adapter=adapter,
            reflection_minibatch_size=search.minibatch_lessons,
            skip_perfect_score=False,
            stop_callbacks=adapter.stops,
            logger=SimpleNamespace(log=logger.debug),
            track_best_outputs=False,
            seed=config.seed,
        )
        if adapter.failure is not None:
            raise adapter.failure
        best = result.best_candidate[_PROMPT]
        write_whole(folder / BEST_PROMPT, best)
        results = {}
        for arm, prompt in ((BASE, adapter.first), (BEST, best)):
            started, records = time.monotonic(), []
            for sampling in config.samplings:
                conversations = await adapter.play(prompt, held_out, sampling, config.num_samples_per_problem)
                records += [(sampling, record) for record in conversations]
            about = {"tutor": f"prompt {_name(prompt)}", "seed": config.seed, "problems": len(held_out)}
            about |= {"num_samples_per_problem": config.num_samples_per_problem}
            results[arm] = EvaluationResult(about | {"seconds": round(time.monotonic() - started, 3)}, records)
        ledgers = {role: api.ledger for role, api in service.environment.roles.apis.items()} | {"reflection": ledger}
        spending = {role: asdict(role_ledger.spending()) for role, role_ledger in ledgers.items()}
    finally:
        service.environment.roles.shutdown()
        service.journal.close()
        ledger.close()
    rows = zip(result.candidates, result.parents, result.val_aggregate_scores, strict=True)
    candidates = [{"prompt": _name(prompt[_PROMPT]), "parents": ids, "reward": mean} for prompt, ids, mean in rows]
    about = {**adapter.counts, "budget": search.conversations, "refused": adapter.refused, "candidates": candidates}
    return about | {"best": result.best_idx, "paid": spending}, results
