"""The MTP head that a model ships, under its family's names, as a shared head and back.

Both formats below hold one decoder layer of the family's own class between the parts of the canonical
head (docs/design.md, "Alignment contract"), so that reading and writing only rename tensors and, where a
format concatenates ``[hidden, embedding]``, exchange the two halves of the projection's columns. Nothing
is rounded: what is read and written back untrained is the same to the byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.heads.protocol import Head, HeadError
from selfspec.heads.shared import SharedHead
from selfspec.heads.vocab import DraftVocab
from selfspec.resources import atomic_path

FILE = "mtp.safetensors"
_BLOCK = "mtp_block."
_PROJECTION = "eh_proj.weight"
_LISTED = 4  # tensors that an error names before it counts the rest


@dataclass(frozen=True)
class Format:
    """How a family of models stores its head.

    Attributes:
        name: what ``head.json`` and errors call it.
        prefix: what the names of the head's tensors start with, and no other tensor's.
        layers: what the names inside its numbered layers start with, up to the number.
        outer: by our name, the format's, of what is not in the decoder layer; ``0`` is the layer's number.
        hidden_first: whether the projection reads ``[hidden, embedding]``.
        zeros: inside the decoder layer, biases that the format always has: zeros where a layer's class has none.
    """

    name: str
    prefix: str
    layers: str
    outer: Mapping[str, str]
    hidden_first: bool
    zeros: tuple[str, ...] = ()

    def native_name(self, name: str) -> str:
        """The format's name of the shared head's tensor ``name``; HeadError where it has no place for it."""
        if name.startswith(_BLOCK):
            return f"{self.layers}0.{name.removeprefix(_BLOCK)}"
        if name not in self.outer:
            raise HeadError(
                f"head: has the tensor {name}, which the {self.name} format of native heads has no place for; "
                "allowed: a head of type shared with norms: inputs and layers: 1"
            )
        return self.outer[name]


# vLLM's qwen3_5_mtp.py and qwen3_next_mtp.py: norms are stored as the offset to 1 that the class adds, and q_proj
# with the rows of its gate, both as in the backbone's own layers. Those two leave the embedding at position 0 as
# it is, where a shared head here sees zeros (`heads/shared.py`).
QWEN3_5 = Format(
    name="qwen3_5",
    prefix="mtp.",
    layers="mtp.layers.",
    outer={
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        _PROJECTION: "mtp.fc.weight",
        "post_norm.weight": "mtp.norm.weight",
    },
    hidden_first=False,
)
# XiaomiMiMo's modeling_mimo.py and vLLM's mimo_mtp.py. For a target that is labelled MiMo, vLLM hands the head
# states from before the final norm; here, as for any other target, they are those after it (`heads/alignment.py`).
MIMO = Format(
    name="mimo",
    prefix="model.mtp_layers.",
    layers="model.mtp_layers.",
    outer={
        "enorm.weight": "model.mtp_layers.0.token_layernorm.weight",
        "hnorm.weight": "model.mtp_layers.0.hidden_layernorm.weight",
        _PROJECTION: "model.mtp_layers.0.input_proj.weight",
        "post_norm.weight": "model.mtp_layers.0.final_layernorm.weight",
    },
    hidden_first=True,
    # Left out, they stay uninitialised in vLLM: its layer is Qwen2's, which has them.
    zeros=("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
)
FORMATS = (QWEN3_5, MIMO)


def exchanged(weight: Tensor) -> Tensor:
    """``[out, 2 * hidden]`` with the two halves of its columns exchanged; its own inverse."""
    first, second = weight.chunk(2, dim=1)
    return torch.cat([second, first], dim=1)


def to_native(form: Format, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A shared head's ``state_dict`` under the names and in the column order of ``form``.

    Raises:
        HeadError: a tensor that the format has no place for.
    """
    tensors = {
        form.native_name(name): exchanged(tensor) if form.hidden_first and name == _PROJECTION else tensor
        for name, tensor in state.items()
    }
    for bias in form.zeros:
        native = f"{form.layers}0.{bias}"
        if native not in tensors:
            weight = tensors[native.removesuffix("bias") + "weight"]
            tensors[native] = weight.new_zeros(len(weight))
    return tensors


def from_native(form: Format, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a shared head, whose names are ``names``, out of those that a model ships.

    Raises:
        KeyError: one is lacking.
    """
    given = {name: tensors[form.native_name(name)] for name in names}
    if form.hidden_first:
        given[_PROJECTION] = exchanged(given[_PROJECTION])
    return given


@dataclass(frozen=True)
class Native:
    """A head as a model ships it.

    Attributes:
        directory: the model's.
        form: its format.
        tensors: by native name, in the dtypes they are stored in.
    """

    directory: Path
    form: Format
    tensors: dict[str, Tensor]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """For ``head.json``: the format, a sha256 over names, shapes and bytes, and each tensor's dtype."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in sorted(self.tensors.items())}
        return {"init": "native", "format": self.form.name, "sha256": digest.hexdigest(), "dtypes": dtypes}

    def load_into(self, head: Head, vocab: DraftVocab) -> None:
        """As ``Start.load_into``: every weight of a shared head with one layer and a norm on each input.

        Raises:
            HeadError: tensors that lack, that are too many, or that have other shapes than the head's.
        """
        state = head.state_dict()
        wanted = {self.form.native_name(name): list(tensor.shape) for name, tensor in state.items()}
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        zeros = {f"{self.form.layers}0.{bias}" for bias in self.form.zeros}
        spare = {name for name in zeros & shapes.keys() - wanted.keys() if not self.tensors[name].any()}
        faults = [
            ("lacks", sorted(wanted.keys() - shapes.keys())),
            ("has beside what the head takes", sorted(shapes.keys() - wanted.keys() - spare)),
            (
                "has in another shape",
                [
                    f"{name} ({shapes[name]}, not {shape})"
                    for name, shape in sorted(wanted.items())
                    if shapes.get(name, shape) != shape
                ],
            ),
        ]
        if told := [f"{what} {_listed(names)}" for what, names in faults if names]:
            raise HeadError(
                f"head.init: got 'native', but the {self.form.name} head in {self.directory} is not of one decoder "
                f"layer of this backbone: it {'; it '.join(told)}; mend the files, or choose init: random or last_layer"
            )
        head.load_state_dict(from_native(self.form, self.tensors, state))


def read(directory: Path) -> Native:
    """The head that the model in ``directory`` ships; of the model's files only the head's tensors are read.

    They are looked for where ``model.safetensors.index.json`` says, else in ``model.safetensors``, and in
    ``mtp.safetensors`` beside either.

    Raises:
        HeadError: none there, several layers, or files that are damaged or contradict each other.
    """
    places = _places(directory)
    shipped = [form for form in FORMATS if any(name.startswith(form.prefix) for name in places)]
    if not shipped:
        looked = " or ".join(f"{form.prefix}*" for form in FORMATS)
        raise HeadError(
            f"head.init: got 'native', but the model in {directory} ships no head: none of its {len(places)} tensors "
            f"in safetensors files is named {looked}; choose init: random or last_layer, or another backbone"
        )
    if len(shipped) > 1:
        names = " and ".join(form.name for form in shipped)
        raise HeadError(f"head.init: got 'native', but {directory} has heads of two formats, {names}; remove one")
    (form,) = shipped
    own = {name: file for name, file in places.items() if name.startswith(form.prefix)}
    numbers = {name.removeprefix(form.layers).split(".")[0] for name in own if name.startswith(form.layers)}
    if len(numbers) > 1:
        raise HeadError(
            f"head.init: got 'native', but the head in {directory} has {len(numbers)} layers ({form.layers}"
            f"{{{','.join(sorted(numbers))}}}.*); allowed: 1, which type shared applies again at every depth; "
            "choose init: random or last_layer"
        )
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(own.values())):
        with _opened(file) as opened:
            for name in sorted(name for name, place in own.items() if place == file):
                try:
                    tensors[name] = opened.get_tensor(name)
                except SafetensorError:
                    raise HeadError(f"{file}: has no tensor {name}, which {_index(directory)} says is there") from None
    return Native(directory, form, tensors)


def write(directory: Path, head: Head, form: Format, dtypes: torch.dtype | Mapping[str, torch.dtype]) -> Path:
    """Write ``head`` in the names of ``form`` as ``mtp.safetensors``; the directory is created. Returns the file.

    Args:
        dtypes: of all tensors, or by native name. What was read in a narrower dtype than it was trained in is
            rounded to that again; ``stored`` has a native head's.

    Raises:
        HeadError: a head that the format has no place for.
    """
    if not isinstance(head, SharedHead):
        raise HeadError(f"head.type: got {head.kind!r}, which native heads are not of; allowed: shared")
    tensors = to_native(form, head.state_dict())
    if isinstance(dtypes, torch.dtype):
        dtypes = dict.fromkeys(tensors, dtypes)
    path = directory / FILE
    with atomic_path(path) as partial:
        save_file(
            {name: tensor.detach().to("cpu", dtypes[name]).contiguous() for name, tensor in tensors.items()},
            partial,
            {"format": "pt"},
        )
    return path


def stored(facts: Mapping[str, Any]) -> tuple[Format, dict[str, torch.dtype]] | None:
    """The format and dtypes of the native head that a trained one goes back to; None where it goes back to none.

    Args:
        facts: of ``head.json``. A head that started from a checkpoint goes back to where that one started.
    """
    start = facts.get("start")
    while start is not None and start["init"] != "native":
        start = start.get("start")
    if start is None:
        return None
    (form,) = (form for form in FORMATS if form.name == start["format"])
    return form, {name: getattr(torch, dtype) for name, dtype in start["dtypes"].items()}


def _index(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise HeadError(f"{file}: cannot be read ({error}); fetch it again") from None


def _places(directory: Path) -> dict[str, Path]:
    """By name, the file of every tensor in ``directory``; where there is an index, it has the last word."""
    places: dict[str, Path] = {}
    index, files = _index(directory), [directory / "model.safetensors", directory / FILE]
    if index.is_file():
        try:
            places = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise HeadError(f"{index}: is no index of safetensors files; fetch it again") from None
        files = [directory / FILE]
    for file in filter(Path.is_file, files):
        with _opened(file) as opened:
            found = dict.fromkeys(opened.keys(), file)
        if twice := sorted(found.keys() & places.keys()) if not index.is_file() else []:
            raise HeadError(
                f"{directory}: {_listed(twice)} in both {places[twice[0]].name} and {file.name}, and no {index.name} "
                "says which counts; remove one of the two, or add the index"
            )
        places = {**found, **places}
    return places


def _listed(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
