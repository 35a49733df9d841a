"""Load a backbone from the hub, a directory or a GGUF file as plain ``transformers`` objects."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from selfspec import resources
from selfspec.backbones import mimo
from selfspec.config import BackboneConfig
from selfspec.errors import SelfspecError

# Bump when the conversion below changes what it writes: older conversions are then left alone.
_GGUF_CONVERSION = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Whether the CPU multiplies matrices of a dtype natively; private to torch, which is pinned exactly.
_NATIVE: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False),
    torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False),
}

mimo.register()


class BackboneError(SelfspecError):
    """The backbone cannot be loaded or is of an unsupported kind."""


def device() -> torch.device:
    """The device to work on: ``SELFSPEC_DEVICE`` (default ``cpu``).

    An environment variable and not a parameter, so that moving to a GPU leaves the lock valid.
    """
    return torch.device(os.environ.get("SELFSPEC_DEVICE", "cpu"))


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in for weights of ``dtype``: float32 where the CPU has no instructions for it.

    There every product would convert its operands (AVX2 only: 17 GFLOP/s in bfloat16 against 115 in
    float32). The weights keep their rounded values, so it is the same model.
    """
    if device().type == "cpu" and dtype in _NATIVE and not _NATIVE[dtype]():
        return torch.float32
    return dtype


def arithmetic_name(spec: BackboneConfig) -> str:
    """How reports name the arithmetic: ``bfloat16``, or ``float32 (bfloat16 weights)``."""
    weights = DTYPES[spec.dtype]
    name = str(arithmetic(weights)).removeprefix("torch.")
    return name if name == spec.dtype else f"{name} ({spec.dtype} weights)"


def model_dir(spec: BackboneConfig, root: Path = Path(".")) -> Path:
    """The directory in Hugging Face layout that holds the backbone; GGUF files are converted once."""
    if spec.member is not None and spec.member.endswith(".gguf"):
        return _converted(resources.member(spec, root=root))
    path = resources.fetch(spec, root=root)
    if path.suffix == ".gguf":
        return _converted(path)
    if not (path / "config.json").is_file():
        raise BackboneError(
            f"backbone.uri: {spec.uri} has no config.json; name a directory in Hugging Face layout or a .gguf file"
        )
    return path


def load_tokenizer(spec: BackboneConfig, root: Path = Path(".")) -> Any:
    """The backbone's own tokenizer."""
    return AutoTokenizer.from_pretrained(model_dir(spec, root))


def load_model(spec: BackboneConfig, dtype: torch.dtype | None = None, root: Path = Path(".")) -> PreTrainedModel:
    """The backbone with weights of ``dtype`` (default: ``backbone.dtype``), in eval mode, without gradients.

    The tensors' own dtype is the one to compute in (``arithmetic``).
    """
    weights = dtype or DTYPES[spec.dtype]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir(spec, root), dtype=weights, low_cpu_mem_usage=True
    )
    model.requires_grad_(False)
    if arithmetic(weights) != weights:
        _say_once(f"note: this CPU has no instructions for {spec.dtype}: its weights are used in float32 arithmetic")
    return model.to(device=device(), dtype=arithmetic(weights)).eval()  # type: ignore[call-arg]


@cache
def _say_once(line: str) -> None:
    print(line, flush=True)


def end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end a completion, as stock ``generate`` reads them."""
    ids = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def input_embeddings(model: PreTrainedModel) -> Tensor:
    """``[vocabulary, hidden]``."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def output_projection(model: PreTrainedModel) -> Tensor:
    """``[vocabulary, hidden]``, the lm_head; the input embeddings where a model ties them."""
    weight = model.get_output_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _converted(gguf: Path) -> Path:
    """Dequantise a GGUF file into a bfloat16 directory beside it in the cache, once.

    ``save_pretrained`` refuses a model that was loaded from GGUF, so a fresh model of the same
    class takes the weights over.
    """
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    target = resources.cache_dir() / "converted" / f"{gguf.stem}-{digest}-v{_GGUF_CONVERSION}"
    if target.is_dir():
        return target
    print(f"converting {gguf.name} (once; kept in {target})", flush=True)
    with resources.atomic_path(target) as partial:
        _convert(gguf, partial)
    return target


def _convert(gguf: Path, target: Path) -> None:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        location = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        loaded = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
        config_dict = loaded.config.to_dict()
        config_dict.pop("quantization_config", None)
        with torch.device("meta"):
            fresh = type(loaded)(type(loaded.config)(**config_dict))
        fresh.load_state_dict(loaded.state_dict(), assign=True)
        fresh.tie_weights()
        fresh.to(torch.bfloat16).save_pretrained(target)  # type: ignore[arg-type]
        AutoTokenizer.from_pretrained(**location).save_pretrained(target)
    finally:
        transformers_logging.set_verbosity(verbosity)
    written = json.loads((target / "config.json").read_text())
    if "quantization_config" in written:
        raise BackboneError(f"{gguf.name}: the converted config still names a quantisation")
