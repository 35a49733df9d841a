"""Each loss by hand, by finite differences, at its limits, and on a cut vocabulary."""

import math

import pytest
import torch

from selfspec import losses

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def _named(name, **options):
    return losses.objective(name, **options).per_position


def test_by_hand():
    logits = Q.log()
    kl = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    alpha = 0.2 + 0.3 + 0.2
    assert losses.ce(logits[None], torch.tensor([2])).item() == pytest.approx(-math.log(0.5), abs=1e-6)
    assert losses.kl(logits, P).item() == pytest.approx(kl, abs=1e-6)
    assert losses.acceptance(logits, P).item() == pytest.approx(alpha, abs=1e-6)
    weight = math.exp(-2.0 * alpha)
    assert losses.lk_hybrid(logits, P, 2.0).item() == pytest.approx(weight * kl + (1 - weight) * (1 - alpha), abs=1e-6)


def test_temperature_softens_both_and_scales():
    softened = torch.softmax(P.log() / 2, -1)
    q = torch.softmax(Q.log() / 2, -1)
    expected = 4 * float((softened * (softened / q).log()).sum())
    assert losses.kl(Q.log(), softened, temperature=2.0).item() == pytest.approx(expected, abs=1e-5)


def test_eta_zero_is_pure_kl_and_large_eta_is_total_variation():
    assert losses.lk_hybrid(Q.log(), P, 0.0) == losses.kl(Q.log(), P)
    assert losses.lk_hybrid(Q.log(), P, 1e6).item() == pytest.approx(0.3, abs=1e-6)  # 1 - alpha


@pytest.mark.parametrize("loss", [lambda z: losses.kl(z, P), lambda z: losses.lk_hybrid(z, P, 3.0)])
def test_zero_where_the_head_equals_the_backbone(loss):
    assert loss(P.log()).item() == pytest.approx(0, abs=1e-6)


def test_disjoint_and_point_mass():
    far = torch.tensor([100.0, 0.0, 0.0])
    assert losses.acceptance(far, torch.tensor([0.0, 0.4, 0.6])).item() == pytest.approx(0, abs=1e-6)
    assert losses.lk_hybrid(far, torch.tensor([0.0, 0.4, 0.6]), 3.0).item() > 50  # lambda = 1: KL leads
    sure = torch.tensor([1.0, 0.0, 0.0])
    assert losses.acceptance(far, sure).item() == pytest.approx(1, abs=1e-6)
    assert losses.kl(far, sure).item() == pytest.approx(0, abs=1e-6)  # 0 log 0 = 0


def test_a_cut_vocabulary_leaves_p_as_it_is():
    p = torch.tensor([0.4, 0.2])  # 0.4 of the backbone's mass lies outside the draft vocabulary
    logits = torch.tensor([0.5, 0.5]).log()
    assert losses.acceptance(logits, p).item() == pytest.approx(0.6)  # re-normalised it would be 0.5 + 1/3
    grad = _gradient(lambda z: losses.kl(z, p), logits)
    assert torch.allclose(grad, 0.6 * torch.tensor([0.5, 0.5]) - p, atol=1e-6)


def test_targets_outside_the_draft_vocabulary_cost_nothing():
    logits = torch.randn(2, 4, requires_grad=True)
    loss = losses.ce(logits, torch.tensor([-1, 2]))
    loss.sum().backward()
    assert loss[0] == 0
    assert torch.count_nonzero(logits.grad[0]) == 0
    assert torch.count_nonzero(logits.grad[1]) == 4


def _gradient(loss, logits):
    logits = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(logits).sum(), logits)
    return grad


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, p: losses.kl(z, p),
        lambda z, p: losses.kl(z, p, temperature=2.0),
        # lambda of the hybrid is a constant to the gradient: freeze it for the difference too.
        lambda z, p: 0.4 * losses.kl(z, p) + 0.6 * (1 - losses.acceptance(z, p)),
        lambda z, p: losses.ce(z[None], torch.tensor([1]))[0],
    ],
    ids=["kl", "kl_softened", "lk_fixed_lambda", "ce"],
)
def test_gradient_by_finite_differences(loss):
    logits, p = torch.randn(6), torch.softmax(torch.randn(6), -1) * 0.9
    grad = _gradient(lambda z: loss(z, p), logits)
    step = 1e-2
    for index in range(6):
        shift = torch.zeros(6)
        shift[index] = step
        slope = (loss(logits + shift, p) - loss(logits - shift, p)) / (2 * step)
        assert grad[index].item() == pytest.approx(slope.item(), abs=2e-3)


def test_the_hybrid_does_not_differentiate_its_weight():
    logits, p, eta = torch.randn(6), torch.softmax(torch.randn(6), -1), 3.0
    weight = math.exp(-eta * losses.acceptance(logits, p).item())
    fixed = _gradient(lambda z: weight * losses.kl(z, p) + (1 - weight) * (1 - losses.acceptance(z, p)), logits)
    assert torch.allclose(_gradient(lambda z: losses.lk_hybrid(z, p, eta), logits), fixed, atol=1e-6)


def test_objective_adds_ce_and_names_what_it_knows():
    logits, target = Q.log()[None], torch.tensor([1])
    plain = _named("lk_hybrid", eta=2.0)(logits, P[None], target)
    mixed = _named("lk_hybrid", eta=2.0, ce_weight=0.5)(logits, P[None], target)
    assert (mixed - plain).item() == pytest.approx(-0.5 * math.log(0.3), abs=1e-6)
    with pytest.raises(ValueError, match="allowed: ce, kl, lk_hybrid"):
        _named("mse")(logits, P[None], target)


def test_depth_weights_fall_by_the_decay_and_sum_to_one():
    weights = losses.depth_weights(3, 0.5)
    assert torch.allclose(weights, torch.tensor([4.0, 2.0, 1.0]) / 7)
