"""Forwards the import names of version 0.1, `src.…` and `tutor_rollouts.…`, to `classroom_rl`: for one version, with a
warning. `python -m src.…` is forwarded, too."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

_FORMER_PACKAGES = ("src", "tutor_rollouts")
_PACKAGE = __name__.rpartition(".")[0]
_NEW_NAMES = {
    "classroom": "environments.classroom",
    "classroom.foul_play": "judges.prompt_injection",
    "classroom.group_verdicts": "judges.verdicts",
    "classroom.json_answer": "judges.json_answer",
    "classroom.seats": "environments.classroom.roles",
    "classroom.verdicts": "judges.verdicts",
    "grpo": "trainer",
    "grpo.run": "trainer.run",
    "inference_providers": "engines.api",
    "inference_providers.model_supervisor": "supervision.model_supervisor",
    "inference_providers.open_router_inference": "judges.model_judge",
    "marooned": "environments.marooned",
    "message_rules": "judges",
    "message_rules.rules_judge": "judges.rule_judge",
    "post_test": "judges.post_test",
    "post_test.ledger": "judges.post_test.exams",
    "ppo": "trainer",
    "ppo.run": "trainer.run",
    "readers": "judges.moves",
    "readers.features": "judges.moves.classifier",
    "rejudge": "evaluation.rejudge",
    "results.agreement": "judges.agreement",
    "rollout": "",  # its public names are the package's own now
    "rollout.__main__": "launch.rollouts",
    "rollout.api_engine": "engines.api_engine",
    "rollout.builtin_tools": "rollout.tools.calculator",
    "rollout.calculator_tool": "rollout.tools.calculator",
    "rollout.calculator_worker": "rollout.tools.calculator_worker",
    "rollout.command": "launch.rollouts",
    "rollout.compact": "rollout.text",
    "rollout.disguises": "judges.prompt_injection",
    "rollout.engines": "rollout.engine",
    "rollout.hf_engine": "engines.hf_engine",
    "rollout.hf_sampling": "engines.hf_engine",
    "rollout.journal": "rollout.store.journal",
    "rollout.journal_index": "rollout.store.journal_segments",
    "rollout.journal_segments": "rollout.store.journal_segments",
    "rollout.mcp_tools": "rollout.tools.mcp",
    "rollout.seats": "rollout.environment",
    "rollout.set_files": "rollout.store.set_files",
    "rollout.tool_formats": "rollout.tools.formats",
    "rollout.tool_frame": "rollout.tools.formats",
    "rollout.tool_turn": "rollout.tools.turn",
    "rollout.tools": "rollout.tools.tool",
    "rollout.turnstile": "rollout.scheduler",
    "server.garbage": "server.app",
    "server.judge_check": "environments.classroom.judge_check",
    "sft": "trainer.sft",
    "supervision.arithmetic": "judges.reference_answers",
    "supervision.reference_answers": "judges.reference_answers",
    "supervision.rubric_supervisor": "supervision.embedded",
    "system.made_folder": "system.storage",
    "toy_language": "environments.toy_language",
    "toy_language.rubric_judge": "judges.toy_judge",
    "toy_language.turn_pairs": "results.statistics",
    "training": "trainer",
    "training.turn_credit": "trainer.advantages",
    "viewer.chat": "environments.classroom.routes",
    "viewer.game_table": "environments.marooned.routes",
    "vllm": "engines.vllm",
    "vllm.client": "server.client",
}
"""Maps names below `src` to names below `classroom_rl`; names that are not listed are those of their parent, moved."""


def new_name(name: str) -> str:
    """The present name of a module that was called `src.…` or `tutor_rollouts.…`."""
    parts = name.split(".")[1:]
    for length in range(len(parts), 0, -1):
        former_name = ".".join(parts[:length])
        if former_name in _NEW_NAMES and not (former_name == "rollout" and parts[1:]):
            return ".".join(filter(None, [_PACKAGE, _NEW_NAMES[former_name], *parts[length:]]))
    return ".".join([_PACKAGE, *parts])


class _Forward(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _FORMER_PACKAGES or "." not in fullname:
            return None
        spec = find_spec(new_name(fullname))
        if spec is None:
            return None
        return ModuleSpec(fullname, self, origin=spec.origin, is_package=spec.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        _warn(name)
        sys.modules[name] = import_module(new_name(name))  # the same module under both names, never a second copy

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        _warn(fullname)
        spec = find_spec(new_name(fullname))
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]


def _warn(name: str) -> None:
    warnings.warn(f"{name} is called {new_name(name)} now; the old name goes with version 0.3", FutureWarning, 2)


def forward() -> None:
    """Let the former names be imported."""
    if not any(isinstance(finder, _Forward) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Forward())
