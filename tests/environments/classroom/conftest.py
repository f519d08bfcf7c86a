"""What a judge over HTTP reads, and the rules of the conversations that it judges."""

from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from tests.support.judged_room import judged_by, write_rule


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, str]:
    return write_rule(tmp_path)


@pytest.fixture
def judged(generation: GenerationConfig, rules: dict[str, str]) -> GenerationConfig:
    return judged_by(rules, generation)
