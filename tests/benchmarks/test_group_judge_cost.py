"""The cost of a conversation that is judged in a group."""

import asyncio

from benchmarks.group_judge_cost import answers, lessons, tokens_and_dollars
from classroom_rl.config.models import JudgeModelConfig
from tests.support.judge_endpoint import judge_endpoint


def test_a_conversation_in_a_group_costs_a_third_at_most_anchors_included(tmp_path):
    with judge_endpoint(answers) as endpoint:
        for name, (problem, messages) in lessons().items():
            (tmp_path / name).mkdir()
            eight = [[*messages, {"role": "teacher", "content": str(i)}] for i in range(8)]
            coroutines = (
                tokens_and_dollars(endpoint.url, tmp_path / name, problem, eight, in_group)
                for in_group in (False, True)
            )
            alone, together = (asyncio.run(figures)[2] for figures in coroutines)
            assert 0.1 < together / alone + JudgeModelConfig().anchor_share < 1 / 3
