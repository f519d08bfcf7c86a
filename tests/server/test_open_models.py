"""Opening the models of a configuration."""

import asyncio

from classroom_rl.config.base import ApiModelConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.server.open_models import open_roles

TWO = ["http://127.0.0.1:8005", "http://127.0.0.1:8006"]


def test_servers_share_the_cap(tmp_path, generation) -> None:
    config = EvalConfig(generation=generation)
    config.student_model = ApiModelConfig(base_url="http://127.0.0.1:9/v1", max_cost_usd=3.0)
    config.teacher_model = ApiModelConfig(base_url="http://127.0.0.1:9/v1")
    generation.judges_rules_prompts_paths = {}
    for urls, cap in ((None, 3.0), (TWO, 1.5)):
        generation.server_urls = urls
        roles = asyncio.run(open_roles(config, {}, tmp_path))
        assert (roles.apis["student"].ledger.cap_usd, roles.apis["teacher"].ledger.cap_usd) == (cap, None)
        roles.shutdown()
