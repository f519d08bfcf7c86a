"""What a judge over HTTP reads, and the rules of the conversations that it judges."""

from dataclasses import replace
from pathlib import Path

import pytest

from config.base import GenerationConfig


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, str]:
    template = "{{ problem }}\n{% for turn in conversation %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    (tmp_path / "judge.txt").write_text(template)
    return {"pedagogical_eval": str(tmp_path / "judge.txt")}


@pytest.fixture
def judged(generation: GenerationConfig, rules: dict[str, str]) -> GenerationConfig:
    """Guided conversations of three messages, one scoring rule, two attempts, soft mode with λ = 0.25."""
    return replace(
        generation,
        judges_rules_prompts_paths=rules,
        max_turns=3,
        number_judge_attempts=2,
        extra_penalty_for_rejected_judges=0.25,
    )
