"""Frozen linear layers equal ``F.linear``; arithmetic where the CPU lacks a dtype."""

import pytest
import torch
import torch.nn.functional as F

from selfspec.backbones import linear, load
from selfspec.backbones.linear import Linear
from selfspec.config import BackboneConfig
from selfspec.distill import states
from tests.unit import tiny


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (2, 3, 24), (130, 24)])
class TestLinear:
    def test_in_float32_it_is_the_product(self, shape, bias):
        x, weight, offset = torch.randn(shape), torch.randn(40, 24), torch.randn(40) if bias else None
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        assert torch.allclose(Linear(weight, offset)(x).double(), expected, atol=2e-5, rtol=0)

    def test_in_bfloat16_it_is_the_product_rounded_once(self, shape, bias):
        x, weight = torch.randn(shape).bfloat16(), torch.randn(40, 24).bfloat16()
        offset = torch.randn(40).bfloat16() if bias else None
        exact = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
        found = Linear(weight, offset)(x)
        assert found.dtype == torch.bfloat16
        # One unit in the last of 8 bits, of the sum's own size or of the largest summand's where they cancel.
        assert torch.allclose(found.float(), exact, rtol=2**-7, atol=0.03)


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("values", ["bfloat16", "float16", "float32", "tiny", "huge"])
@pytest.mark.parametrize("out", [40, 10_000])  # a wide output changes kernels at many rows
def test_float32_products_are_exact_whatever_the_weights_were_stored_in(values, rows, out):
    weight = torch.randn(out, 24)
    if values in ("bfloat16", "float16"):
        weight = weight.to(getattr(torch, values)).float()
    weight *= {"tiny": 2.0**-30, "huge": 2.0**30}.get(values, 1.0)
    x = torch.randn(2 * rows, 24)[::2]  # not contiguous
    expected = x.double() @ weight.double().T
    found = Linear(weight)(x)
    assert found.dtype == torch.float32
    assert ((found.double() - expected).abs().max() / weight.abs().max()) < 2e-5


class TestSixteenBits:
    """Weights are kept in 16 bits only where that rounds nothing that a float32 sum would show."""

    @pytest.fixture(autouse=True)
    def _fbgemm(self):
        if linear._fbgemm(torch.ones(8, 8), None) is None:
            pytest.skip("this build of torch has no FBGEMM")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_those_of_a_16_bit_checkpoint_are(self, dtype):
        assert linear._fbgemm((torch.randn(64, 64) * 0.05).to(dtype).float(), None) is not None

    @pytest.mark.parametrize("scale", [1.0, 2.0**30, 2.0**-30])
    def test_others_are_not(self, scale):
        assert linear._fbgemm(torch.randn(64, 64) * scale, None) is None
        if scale != 1:  # of 16 bits, but out of float16's range
            assert linear._fbgemm(torch.randn(64, 64).bfloat16().float() * scale, None) is None


def test_every_form_agrees_with_the_plain_one(monkeypatch):
    x, weight, bias = torch.randn(7, 24), torch.randn(40, 24).bfloat16().float(), torch.randn(40)
    found = [Linear(weight, bias)(x)]
    monkeypatch.setattr(linear, "_fbgemm", lambda *_: None)
    found.append(Linear(weight, bias)(x))
    monkeypatch.setattr(linear, "_onednn", lambda *_: None)
    plain = Linear(weight, bias)(x)
    assert torch.equal(plain, F.linear(x, weight, bias))
    for packed in found:
        assert torch.allclose(packed, plain, atol=1e-5)


def test_it_is_outside_autograd_and_counts_its_bytes():
    layer = Linear(torch.randn(40, 24, requires_grad=True), torch.randn(40, requires_grad=True))
    assert not layer(torch.randn(3, 24)).requires_grad
    assert layer.nbytes == (40 * 24 + 40) * 4


class TestArithmetic:
    @pytest.fixture(params=[True, False])
    def native(self, request, monkeypatch):
        monkeypatch.setitem(load._NATIVE, torch.bfloat16, lambda: request.param)
        return request.param

    def test_a_dtype_without_instructions_is_computed_in_float32(self, native):
        assert load.arithmetic(torch.bfloat16) == (torch.bfloat16 if native else torch.float32)
        assert load.arithmetic(torch.float32) == torch.float32

    def test_the_weights_keep_their_rounded_values(self, native, tmp_path):
        spec = BackboneConfig(
            name="tiny", uri=f"file:{tiny.save(tmp_path)}", license="MIT", dtype="bfloat16", member=None, sha256=None
        )
        model = load.load_model(spec)
        expected = dict(tiny.llama().named_parameters())
        for name, weight in model.named_parameters():
            assert weight.dtype == load.arithmetic(torch.bfloat16)
            assert torch.equal(weight.float(), expected[name].bfloat16().float()), name
        assert load.arithmetic_name(spec) == ("bfloat16" if native else "float32 (bfloat16 weights)")

    def test_states_are_stored_in_the_dtype_of_the_weights(self, tmp_path):
        hidden = torch.randn(6, 8)
        states.write(tmp_path, "train", [states.States(hidden, torch.zeros(6))], 6, 8, torch.bfloat16)
        stored = states.StoredStates.open(tmp_path, "train", torch.bfloat16).rows(0, 6).hidden
        assert torch.equal(stored, hidden.bfloat16())


@pytest.mark.parametrize("row", [[float("nan")] * 24, [float("inf")] * 24, [1e-9 + 1e-12 * n for n in range(24)]])
def test_a_row_that_16_bits_would_change_keeps_float32(row):
    weight = torch.randn(40, 24).bfloat16().float()
    weight[7] = torch.tensor(row)  # beside rows of ordinary size, which must not hide it
    assert linear._fbgemm(weight, None) is None
    found, expected = Linear(weight)(torch.eye(24)), weight.T
    if weight[7].isfinite().all():
        assert torch.allclose(found[:, 7], expected[:, 7], rtol=1e-5, atol=0)
    else:
        assert not found[:, 7].isfinite().any()
