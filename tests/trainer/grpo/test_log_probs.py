"""The log-probs of a micro-batch that was cut to what is trained on are those of the whole one."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from classroom_rl.trainer.grpo.log_probs import Cut, mask_of, scoring_only
from classroom_rl.trainer.model_loading import _use_small_tiles
from tests.support.offline_trainer import offline_trainer, save_tiny_model


@pytest.fixture(scope="module")
def folder(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), world / "blank")


@pytest.fixture(scope="module")
def trainer(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return offline_trainer(tmp_path_factory.mktemp("run"), folder)


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


@settings(max_examples=40, deadline=None)
@given(batch=micro_batches(), size=st.integers(1, 4))
def test_wanted_tokens_have_their_log_prob_and_gradient_and_all_others_nothing(trainer, batch, size: int) -> None:
    ids, attention, wanted, length = batch
    model = trainer.model
    model.zero_grad()
    with trainer._scoring(wanted):
        found, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, attention, length, batch_size=size, compute_entropy=True
        )
    plain = plain_log_probs(model, ids, attention, length)
    assert found.shape == entropies.shape == wanted.shape
    assert torch.allclose(found[wanted], plain[wanted], atol=1e-5)
    assert not found[~wanted].any() and not entropies[~wanted].any()
    assert (entropies[wanted] > 0).all()
    own = torch.autograd.grad(found.sum(), model.model.embed_tokens.weight)[0]
    other = torch.autograd.grad((plain * wanted).sum(), model.model.embed_tokens.weight)[0]
    assert torch.allclose(own, other, atol=1e-4)


@settings(max_examples=60)
@given(batch=micro_batches())
def test_a_cut_leaves_nothing_but_padding_and_rows_without_wanted_tokens(batch) -> None:
    ids, attention, wanted, _ = batch
    cut = Cut.of(attention, wanted)
    left = cut.apply(attention)
    assert left[:, 0].any() and (left[:, -1].any() or left.size(1) == attention.size(1) - wanted.size(1) - cut.left + 1)
    assert set(cut.rows.tolist()) >= set(wanted.any(dim=1).nonzero().flatten().tolist())
    assert torch.equal(cut.undo_right(cut.apply_right(wanted).long()).bool(), wanted)


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

    def scored() -> tuple[torch.Tensor, torch.Tensor]:
        labels = ids.clone()
        labels[:, :10] = -100
        logps = scoring_only(model, wanted)(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        return logps.detach(), torch.autograd.grad(logps.sum(), model.lm_head.weight)[0]

    large = scored()
    _use_small_tiles()
    assert trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE < 10_000
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 7)
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 100)
    for one, other in zip(large, scored(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert (large[0] != 0).sum() == wanted.sum()


def test_a_mask_ends_where_its_row_ends() -> None:
    assert mask_of([[1, 0, 1], [1]], torch.device("cpu")).tolist() == [[True, False, True], [True, False, False]]
