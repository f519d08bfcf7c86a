"""The losses of PPO and its figures, on numbers worked out by hand."""

import math
from collections.abc import Callable

import pytest
import torch

from classroom_rl.trainer.ppo.advantages import moments
from classroom_rl.trainer.ppo.losses import (
    approximate_kl,
    explained_variance,
    is_clipped,
    is_value_clipped,
    kl_to_reference,
    policy_loss,
    value_loss,
)


def tokens(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


RATIOS = tokens(1.5, 1.5, 0.5, 0.5, 1.1)
ADVANTAGES = tokens(2, -2, 2, -2, 1)


def test_the_policy_s_loss_is_clipped_where_the_advantage_pushes_further():
    """min(1.5·2, 1.2·2), min(−3, −2.4), min(1, 1.6), min(−1, −1.6), 1.1; with the other sign."""
    loss = policy_loss(RATIOS.log(), tokens(0, 0, 0, 0, 0), ADVANTAGES, 0.2, 0.2)
    assert loss[0].tolist() == pytest.approx([-2.4, 3, -1, 1.6, -1.1])
    clipped = is_clipped(RATIOS.log(), tokens(0, 0, 0, 0, 0), ADVANTAGES, 0.2, 0.2)
    assert clipped[0].tolist() == [True, False, False, True, False]


def test_the_two_sides_of_the_clip_are_their_own():
    loss = policy_loss(tokens(1.5, 0.5).log(), tokens(0, 0), tokens(1, -1), 0.1, 0.3)
    assert loss[0].tolist() == pytest.approx([-1.3, 0.9])


def test_a_clipped_token_has_no_gradient():
    logps = RATIOS.log().requires_grad_()
    policy_loss(logps, torch.zeros(1, 5), ADVANTAGES, 0.2, 0.2).sum().backward()
    assert logps.grad[0].tolist() == pytest.approx([0, 3, -1, 0, -1.1]), "−ratio · A, or nothing"


def test_the_critic_s_loss_is_the_larger_one_of_two():
    """Old 0, clip 0.2. Value 0.5, return 1: (0.5)² and (0.2 − 1)² = 0.64. Value 0.5, return 0.4: 0.01 and 0.04.
    Value 0.1, return 1: 0.81 twice. Half of it."""
    values, returns = tokens(0.5, 0.5, 0.1), tokens(1, 0.4, 1)
    assert value_loss(values, torch.zeros(1, 3), returns, 0.2)[0].tolist() == pytest.approx([0.32, 0.02, 0.405])
    assert value_loss(values, torch.zeros(1, 3), returns, None)[0].tolist() == pytest.approx([0.125, 0.005, 0.405])
    assert is_value_clipped(values, torch.zeros(1, 3), 0.2)[0].tolist() == [True, True, False]
    assert not is_value_clipped(values, torch.zeros(1, 3), None).any()


def test_the_kl_is_k3():
    """Ratio 1.5: 0.5 − ln 1.5; ratio 0.5: −0.5 − ln 0.5. The mean over samples of π_old is the KL: with π_old = (½, ½)
    and π = (¾, ¼), ½ ln(½ / ¾) + ½ ln(½ / ¼)."""
    found = approximate_kl(tokens(0.75, 0.25).log(), tokens(0.5, 0.5).log())
    assert found[0].tolist() == pytest.approx([0.5 - math.log(1.5), -0.5 - math.log(0.5)])
    assert found.mean().item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


def test_explained_variance():
    """Returns 0, 1, 2, 3 with variance 1.25; errors 0.5, −0.5, 0.5, −0.5 with variance 0.25: 0.8."""
    returns, mask = tokens(0, 1, 2, 3), torch.ones(1, 4)

    def explained(values: torch.Tensor) -> float | None:
        return explained_variance(moments(returns - values, mask), moments(returns, mask))

    assert explained(tokens(-0.5, 1.5, 1.5, 3.5)) == pytest.approx(0.8)
    assert explained(returns) == pytest.approx(1)
    assert explained(tokens(7, 7, 7, 7)) == pytest.approx(0), "a constant explains nothing"
    assert explained(-returns) == pytest.approx(-3)
    assert explained_variance(moments(returns, mask), moments(torch.ones(1, 4), mask)) is None


@pytest.mark.parametrize("moved", [False, True], ids=["first pass", "later pass"])
def test_the_gradient_of_the_kl_to_the_reference_is_that_of_kl_policy_reference(moved: bool):
    """In expectation over three tokens that π_old samples, whether the policy is still π_old or has moved. On the
    logits it is π · (ln π/π_reference − KL), here with KL = 0.274887. As a loss, k3 alone has in the first pass the
    gradient of KL(reference ‖ π), which is π − π_reference."""
    old, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    start = torch.tensor([0.7, 0.2, 0.1]).double() if moved else old

    def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        logits = start.log().clone().requires_grad_()
        of(logits.log_softmax(-1)).backward()
        return logits.grad.tolist()

    found = gradient(lambda logps: (old * kl_to_reference(logps, old.log(), reference.log())).sum())
    exact = gradient(lambda logps: (logps.exp() * (logps - reference.log())).sum())
    assert found == pytest.approx(exact, abs=1e-12)
    assert moved or found == pytest.approx([0.320702, -0.082466, -0.238236], abs=1e-5)
    k3 = gradient(lambda logps: (old * approximate_kl(reference.log(), logps)).sum())
    assert k3 != pytest.approx(exact, abs=0.01) and (moved or k3 == pytest.approx([0.3, 0.0, -0.3]))


def test_the_kl_to_the_reference_by_hand():
    """π_reference / π = 2 and 0.5, π / π_old = 1.5 and 0.7: (2 − ln 2 − 1) · 1.5 and (0.5 + ln 2 − 1) · 0.7."""
    now = tokens(-1, -2)
    found = kl_to_reference(now, now - tokens(1.5, 0.7).log(), now + tokens(2, 0.5).log())
    assert found[0].tolist() == pytest.approx([0.460279, 0.135203], abs=1e-6)
