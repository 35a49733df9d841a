"""Each loss by hand, by finite differences, at its limits, and on a cut vocabulary."""

import math

import pytest
import torch

from selfspec import losses

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def _named(name, **options):
    return losses.Objective(name, **options).reference


def test_by_hand():
    logits = Q.log()
    kl = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    alpha = 0.2 + 0.3 + 0.2
    assert losses.ce(logits[None], torch.tensor([2])).item() == pytest.approx(-math.log(0.5), abs=1e-6)
    assert losses.kl(logits, P).item() == pytest.approx(kl, abs=1e-6)
    assert losses.acceptance(logits, P).item() == pytest.approx(alpha, abs=1e-6)
    assert losses.tv(logits, P).item() == pytest.approx(1 - alpha, abs=1e-6)
    assert losses.lk_nll(logits, P).item() == pytest.approx(-math.log(alpha), abs=1e-6)
    backwards = 0.2 * math.log(0.2 / 0.5) + 0.5 * math.log(0.5 / 0.2)
    assert losses.reverse_kl(logits, P).item() == pytest.approx(backwards, abs=1e-6)
    to_the_middle = 0.5 * math.log(0.5 / 0.35) + 0.2 * math.log(0.2 / 0.35)  # m = 0.35, 0.3, 0.35: both sides alike
    assert losses.js(logits, P).item() == pytest.approx(to_the_middle, abs=1e-6)
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


DIVERGENCES = {
    "kl": losses.kl,
    "reverse_kl": losses.reverse_kl,
    "js": losses.js,
    "tv": losses.tv,
    "lk_hybrid": lambda z, p: losses.lk_hybrid(z, p, 3.0),
    "lk_nll": losses.lk_nll,
    "chain": lambda z, p: losses.chain(losses.acceptance(z, p).expand(3, 1))[2, 0],
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_where_the_head_equals_the_backbone_and_above_it_elsewhere(name):
    assert DIVERGENCES[name](P.log(), P).item() == pytest.approx(0, abs=1e-6)
    assert DIVERGENCES[name](Q.log(), P).item() > 0.04


# What each costs where p and q share nothing, and what a point mass costs a head that gives it 0.25.
@pytest.mark.parametrize(
    ("name", "disjoint", "point"),
    [
        ("reverse_kl", (300.0, 800.0), 0.75 * (-math.log(torch.finfo(torch.float64).tiny)) - 1.5),
        ("js", math.log(2), (math.log(1 / 0.625) + 0.25 * math.log(0.25 / 0.625) + 0.75 * math.log(2)) / 2),
        ("tv", 1.0, 0.75),
        ("lk_nll", -math.log(losses.ALPHA_FLOOR), math.log(4)),
        ("chain", 1.0, 1 - 0.25**3),
    ],
)
def test_limits(name, disjoint, point):
    far = torch.tensor([800.0, 0.0, 0.0], dtype=torch.float64)
    found = DIVERGENCES[name](far, torch.tensor([0.0, 0.4, 0.6], dtype=torch.float64)).item()
    if isinstance(disjoint, tuple):
        assert disjoint[0] < found < disjoint[1]  # large, not infinite
    else:
        assert found == pytest.approx(disjoint, abs=1e-6)
    sure = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    entropy = 0.75 * math.log(0.25) + 0.25 * math.log(0.25) + 1.5  # of the uniform head
    expected = point + entropy if name == "reverse_kl" else point
    assert DIVERGENCES[name](torch.zeros(4, dtype=torch.float64), sure).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "chain"])
def test_gradients_stay_finite_at_the_limits(name):
    far, flat = torch.tensor([800.0, 0.0, 0.0]), torch.zeros(3)
    for logits, p in ((far, torch.tensor([0.0, 0.4, 0.6])), (flat, torch.tensor([1.0, 0.0, 0.0]))):
        (grad,) = torch.autograd.grad(DIVERGENCES[name](logits.requires_grad_(), p), logits)
        assert grad.isfinite().all()


def test_chain_is_what_verification_accepts():
    alpha = torch.tensor([[0.5, 0.8], [0.4, 1.0], [0.3, 0.5]])  # by depth and anchor
    expected = torch.tensor([[0.5, 0.2], [0.8, 0.2], [0.94, 0.6]])
    torch.testing.assert_close(losses.chain(alpha), expected)
    # 1 - tokens accepted in a round / K, the tokens being 0.5 + 0.2 + 0.06
    assert losses.chain(alpha).mean(0)[0].item() == pytest.approx(1 - 0.76 / 3)


def test_a_chain_ends_with_the_text_and_begins_behind_the_prompt():
    alpha = torch.tensor([[0.5, 0.5], [0.4, 0.4], [0.3, 0.3]], requires_grad=True)
    taught = torch.tensor([[True, False], [True, True], [False, True]])
    loss = losses.chain(alpha, taught)
    assert loss[:, 0][taught[:, 0]].tolist() == pytest.approx([0.5, 0.8])  # the third depth has no term
    assert loss[:, 1][taught[:, 1]].tolist() == pytest.approx([0.6, 0.88])  # its first draft is a token of the prompt
    loss.where(taught, 0).sum().backward()
    # d/d alpha_1 = -(1 + alpha_2), d/d alpha_2 = -alpha_1; no gradient where nothing is taught
    torch.testing.assert_close(alpha.grad, torch.tensor([[-1.4, 0.0], [-0.5, -1.3], [0.0, -0.4]]))


def test_lambda_of_the_batch_is_the_same_for_all_its_positions():
    logits = torch.stack([Q.log(), P.log()])[None]
    p, target = P.expand(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)
    mean = torch.tensor([[0.85]])  # of 0.7 and 1
    loss = losses.Objective("lk_hybrid", eta=2.0, lambda_scope="batch").reference(logits, p, target, mean_alpha=mean)
    weight = math.exp(-2.0 * 0.85)
    kl = losses.kl(Q.log(), P).item()
    assert loss[0, 0].item() == pytest.approx(weight * kl + (1 - weight) * 0.3, abs=1e-6)
    own = losses.Objective("lk_hybrid", eta=2.0).reference(logits, p, target, mean_alpha=mean)
    assert own[0, 0].item() == pytest.approx(losses.lk_hybrid(Q.log(), P, 2.0).item(), abs=1e-6)


@pytest.mark.parametrize("name", ["tv", "lk_nll", "js", "reverse_kl"])
def test_on_a_cut_vocabulary_the_rest_of_the_backbone_s_mass_counts(name):
    """The whole distributions, the head's zero where it cannot draft, give what the cut one says."""
    whole_p = torch.tensor([0.4, 0.2, 0.3, 0.1], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2], dtype=torch.float64)
    whole_logits = torch.tensor([0.3, -0.2, -5000.0, -5000.0], dtype=torch.float64)
    expected = DIVERGENCES[name](whole_logits, whole_p)
    assert DIVERGENCES[name](logits, whole_p[:2]).item() == pytest.approx(expected.item(), abs=1e-9)
    normalised = DIVERGENCES[name](logits, whole_p[:2] / 0.6)
    assert abs(normalised.item() - expected.item()) > 0.05


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
        losses.reverse_kl,
        losses.js,
        losses.tv,
        losses.lk_nll,
        lambda z, p: losses.chain(losses.acceptance(torch.stack([z, z / 2, z * 2]), p)[:, None]).mean(),
        lambda z, p: losses.lk_hybrid(z, p, 3.0, mean_alpha=torch.tensor(0.4)),
    ],
    ids=[
        "kl",
        "kl_softened",
        "lk_fixed_lambda",
        "ce",
        "reverse_kl",
        "js",
        "tv",
        "lk_nll",
        "chain",
        "lk_lambda_of_the_batch",
    ],
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
    with pytest.raises(
        ValueError, match=r"loss.name: got 'mse', allowed: ce, kl, reverse_kl, js, tv, lk_hybrid, lk_nll, chain$"
    ):
        _named("mse")(logits, P[None], target)


def test_depth_weights_fall_by_the_decay_and_sum_to_one():
    weights = losses.depth_weights(3, 0.5)
    assert torch.allclose(weights, torch.tensor([4.0, 2.0, 1.0]) / 7)
