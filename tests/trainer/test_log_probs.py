"""The log-probs of a micro-batch that was trimmed to what is trained on are those of the whole one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from classroom_rl.trainer.batch import KEPT, NO_PADDING, TRIMMED, Batch, Padding
from classroom_rl.trainer.log_probs import TrimmedRows, can_trim_padding, log_probs
from classroom_rl.trainer.model_loading import _use_small_tiles
from tests.support.offline_trainer import offline_trainer, save_tiny_model


@pytest.fixture(scope="module")
def folder(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), world / "blank")


@pytest.fixture(scope="module")
def trainer(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return offline_trainer(tmp_path_factory.mktemp("run"), folder)


@pytest.fixture(scope="module")
def padding_free_trainer(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return offline_trainer(tmp_path_factory.mktemp("run"), folder, ["train.padding_free=true"])


@st.composite
def micro_batches(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Ids, attention mask, wanted tokens, and the length of the completion."""
    rows = draw(st.integers(1, 4))
    prompts = [draw(st.integers(1, 5)) for _ in range(rows)]
    completions = [draw(st.integers(1, 7)) for _ in range(rows)]
    left, right = max(prompts) + draw(st.integers(0, 3)), max(completions) + draw(st.integers(0, 3))
    attention = torch.zeros(rows, left + right, dtype=torch.long)
    wanted = torch.zeros(rows, right, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        attention[row, left - prompt : left + completion] = 1
        wanted[row, :completion] = torch.tensor(draw(st.lists(st.booleans(), min_size=completion, max_size=completion)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids = torch.randint(20, 500, attention.shape, generator=generator) * attention
    return ids, attention, wanted, right


def plain_log_probs(model, ids: torch.Tensor, attention: torch.Tensor, length: int) -> torch.Tensor:
    """Each completion token's log-prob, from the logits of the whole batch."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -length:].unsqueeze(-1)).squeeze(-1)


def micro_batch(ids: torch.Tensor, attention: torch.Tensor, wanted: torch.Tensor) -> Batch:
    """A micro-batch with these tokens; its advantages and the engine's log-probs do not matter."""
    prompt = ids.size(1) - wanted.size(1)
    (prompts, completions), (prompt_mask, completion_mask) = (
        tensor.split([prompt, wanted.size(1)], dim=1) for tensor in (ids, attention)
    )
    zeros = torch.zeros(wanted.shape)
    return Batch(prompts, prompt_mask, completions, completion_mask, wanted, zeros.bool(), zeros, zeros)


@settings(max_examples=40, deadline=None)
@given(batch=micro_batches(), padding=st.sampled_from([KEPT, TRIMMED, NO_PADDING]))
def test_wanted_tokens_have_their_log_prob_and_gradient_and_all_others_nothing(
    trainer, padding_free_trainer, batch, padding: Padding
) -> None:
    ids, attention, wanted, length = batch
    model, scored = trainer.model, (padding_free_trainer if padding == NO_PADDING else trainer).model
    scores = log_probs(scored, micro_batch(ids, attention, wanted), wanted, trainer.accelerator, padding)
    logps, entropies = scores.logps_BT, scores.entropy_BT
    plain = plain_log_probs(model, ids, attention, length)
    assert logps.shape == entropies.shape == wanted.shape and scores.values is None and scores.aux_loss is None
    assert torch.allclose(logps[wanted], plain[wanted], atol=1e-5)
    assert not logps[~wanted].any() and not entropies[~wanted].any()
    assert (entropies[wanted] > 0).all()
    gradient, expected_gradient = (
        torch.autograd.grad(total, scoring_model.model.embed_tokens.weight)[0]
        for total, scoring_model in ((logps.sum(), scored), ((plain * wanted).sum(), model))
    )
    assert torch.allclose(gradient, expected_gradient, atol=1e-4)


@settings(max_examples=60)
@given(batch=micro_batches())
def test_trimming_leaves_out_nothing_but_padding_and_rows_without_wanted_tokens(batch) -> None:
    ids, attention, wanted, _ = batch
    trimmed = TrimmedRows.of(attention, wanted)
    remaining = trimmed.apply(attention)
    assert remaining[:, 0].any() and (
        remaining[:, -1].any() or remaining.size(1) == attention.size(1) - wanted.size(1) - trimmed.left + 1
    )
    assert set(trimmed.rows.tolist()) >= set(wanted.any(dim=1).nonzero().flatten().tolist())
    completion = torch.nn.functional.pad(wanted, (attention.size(1) - wanted.size(1), 0)).long()
    assert torch.equal(trimmed.undo(trimmed.apply(completion)), completion)
    whole_columns = TrimmedRows.of(attention, wanted, columns=False)
    assert torch.equal(whole_columns.apply(attention), attention[trimmed.rows])


@pytest.mark.parametrize(
    ("rope", "may"),
    [
        (None, True),
        ({"rope_type": "yarn"}, True),
        ({"rope_type": "dynamic"}, False),
        ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, False),
    ],
)
def test_columns_stay_where_positions_depend_on_the_longest_one(rope: dict | None, may: bool) -> None:
    config = SimpleNamespace(rope_parameters=rope)
    assert can_trim_padding(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))) is may


def test_small_tiles_give_what_large_ones_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (chunked_logprob, "TOKEN_CHUNK_SIZE"),
        (trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE"),
        (trl_utils, "_use_triton"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_fused_lm_head(model, temperature=0.7)
    ids = torch.randint(20, 500, (3, 30), generator=torch.Generator().manual_seed(1))
    wanted = torch.rand(3, 20, generator=torch.Generator().manual_seed(2)) > 0.5
    micro = micro_batch(ids, torch.ones_like(ids), wanted)

    def scored() -> tuple[torch.Tensor, torch.Tensor]:
        logps = log_probs(model, micro, wanted, Accelerator(cpu=True)).logps_BT
        return logps.detach(), torch.autograd.grad(logps.sum(), model.lm_head.weight)[0]

    large = scored()
    _use_small_tiles()
    assert trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE < 10_000
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 7)
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 100)
    for expected, actual in zip(large, scored(), strict=True):
        assert torch.allclose(expected, actual, atol=1e-5)
    assert (large[0] != 0).sum() == wanted.sum()
