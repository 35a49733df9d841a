"""Heads that continue another run's."""

import hashlib
import json

import pytest
import torch

from selfspec import config
from selfspec.config import ConfigError, HeadConfig
from selfspec.heads import build, checkpoint, start
from selfspec.heads.protocol import HeadError
from tests.unit import tiny, tiny_heads

EVEN = torch.arange(0, 288, 2)
THIRDS = torch.arange(0, 288, 3)


@pytest.fixture
def model():
    return tiny.llama().requires_grad_(False)


def _config(folder, **changes):
    defaults = {"type": "shared", "depths": 3, "draft_vocab_size": 0, "depth_decay": 1.0}
    return HeadConfig.model_validate({**defaults, "init": "checkpoint", "checkpoint": str(folder), **changes})


def _saved(model, folder, ids=EVEN, depths=3, **options):
    head = tiny_heads.random_head(model, depths, ids=ids, **options)
    checkpoint.save(folder, head, tiny_heads.vocabulary(model, ids), "tiny")
    return head


def _continued(model, cfg, ids=EVEN, folder=None):
    return build.build(cfg, model, tiny_heads.vocabulary(model, ids), start.read(cfg, folder))


@pytest.mark.parametrize("variant", [name for name in tiny_heads.VARIANTS if "parallel" not in name])
def test_a_head_starts_with_a_checkpoint_s_weights_and_says_which(model, tmp_path, variant):
    options = tiny_heads.VARIANTS[variant]
    head = _saved(model, tmp_path, **options)
    cfg = _config(tmp_path, **{"type" if name == "kind" else name: value for name, value in options.items()})
    continued = _continued(model, cfg)
    assert all(parameter.requires_grad for parameter in continued.parameters())
    for name, tensor in head.state_dict().items():
        assert torch.equal(continued.state_dict()[name], tensor), name
    facts = start.read(cfg, tmp_path).facts
    assert facts["init"] == "checkpoint"
    for name in ("head.json", "head.safetensors"):
        assert facts["sha256"][name] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    checkpoint.save(tmp_path / "next", continued, tiny_heads.vocabulary(model, EVEN), "tiny", facts)
    assert checkpoint.load(tmp_path / "next", model).facts["start"] == facts


def test_a_head_that_starts_from_no_file_says_nothing_of_one(model, tmp_path):
    fresh = _config(tmp_path, init="random", checkpoint=None)
    assert start.read(fresh, tmp_path / "nowhere") is None
    _saved(model, tmp_path)
    assert "start" not in checkpoint.load(tmp_path, model).facts
    cfg = _config(tmp_path)
    vocab = tiny_heads.vocabulary(model, EVEN)
    with pytest.raises(ValueError, match="is checkpoint: start has to be"):
        build.build(cfg, model, vocab)
    with pytest.raises(ValueError, match="is random: start has to be"):
        build.build(fresh, model, vocab, start.read(cfg, tmp_path))


def test_a_shared_head_may_be_trained_for_other_depths(model, tmp_path):
    head = _saved(model, tmp_path, depths=2)
    continued = _continued(model, _config(tmp_path, depths=4))
    assert continued.depths == 4
    assert torch.equal(continued.eh_proj.weight, head.eh_proj.weight)


def test_own_output_rows_follow_their_tokens_into_another_vocabulary(model, tmp_path):
    head = _saved(model, tmp_path, kind="cascade", output="own")
    continued = _continued(model, _config(tmp_path, type="cascade", output="own"), ids=THIRDS)
    backbone = model.get_output_embeddings().weight
    for depth in range(3):
        rows, trained = continued.output_rows(depth), head.output_rows(depth)
        assert rows.shape == (len(THIRDS), 32)
        for index, token in enumerate(THIRDS.tolist()):
            wanted = trained[token // 2] if token % 2 == 0 else backbone[token]
            assert torch.equal(rows[index], wanted), token
    assert not torch.equal(head.output_rows(0)[3], backbone[6])  # trained ones are not the backbone's


@pytest.mark.parametrize(
    ("saved", "asked", "message"),
    [
        (
            {"kind": "cascade"},
            {},
            r"^head\.type: got 'shared'; allowed: 'cascade', which the head in head\.checkpoint ",
        ),
        ({"norms": "joint"}, {}, r"^head\.norms: got 'inputs'; allowed: 'joint', .*; change it, or name another"),
        ({"layers": 2}, {}, r"^head\.layers: got 1; allowed: 2, "),
        ({"kind": "cascade"}, {"type": "cascade", "depths": 2}, r"^head\.depths: got 2; allowed: 3, "),
        ({"kind": "cascade"}, {"type": "cascade", "output": "own"}, r"^head\.output: got 'own'; allowed: 'shared', "),
    ],
)
def test_a_head_of_another_form_is_refused_before_the_backbone_is_loaded(model, tmp_path, saved, asked, message):
    _saved(model, tmp_path, **saved)
    with pytest.raises(HeadError, match=message):
        start.read(_config(tmp_path, **asked), tmp_path)


def test_a_head_from_before_options_has_the_defaults(model, tmp_path):
    _saved(model, tmp_path)
    facts = json.loads((tmp_path / "head.json").read_text())
    del facts["options"]
    (tmp_path / "head.json").write_text(json.dumps(facts))
    assert start.read(_config(tmp_path), tmp_path) is not None
    with pytest.raises(HeadError, match=r"^head\.norms: got 'joint'; allowed: 'inputs'"):
        start.read(_config(tmp_path, norms="joint"), tmp_path)


@pytest.mark.parametrize("changes", [{"hidden_size": 64}, {"vocab_size": 300}])
def test_a_head_of_another_backbone_is_refused(model, tmp_path, changes):
    _saved(model, tmp_path)
    with pytest.raises(HeadError, match=r"head of tiny .* does not fit this backbone"):
        _continued(tiny.llama(**changes), _config(tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("head.json", b"{", r"a damaged head \(Expecting"),
        ("head.json", b"{}", r"a damaged head \(head.json lacks type, depths, backbone, hidden_size, vocab_size\)"),
        ("head.safetensors", b"1", r"a damaged head \("),
        ("head.safetensors", None, r"a damaged head \(No such file"),
        ("head.json", None, "no trained head here"),
    ],
)
def test_a_damaged_head_is_one_line(model, tmp_path, file, content, message):
    _saved(model, tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(HeadError, match=message) as caught:
        start.read(_config(tmp_path), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_is_not_there_is_found_missing_first(model, tmp_path):
    config.require_checkpoint(_config(None, init="random", checkpoint=None))
    _saved(model, tmp_path / "there")
    config.require_checkpoint(_config("there"), root=tmp_path)
    (tmp_path / "there/head.safetensors").unlink()
    for name, lacking in (("there", "head.safetensors"), ("gone", "head.json")):
        with pytest.raises(ConfigError, match=rf"^head\.checkpoint: got '{name}', which holds no {lacking}; allowed: "):
            config.require_checkpoint(_config(name), root=tmp_path)
