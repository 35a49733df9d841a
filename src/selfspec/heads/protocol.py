"""What training and drafting need from a head, whatever its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from selfspec.backbones import middle
from selfspec.backbones.rotary import RotaryTable
from selfspec.errors import SelfspecError
from selfspec.heads.alignment import Packed
from selfspec.heads.vocab import DraftVocab


class HeadError(SelfspecError):
    """A head's files are missing, incomplete, or belong to another backbone or another kind of head."""


# (depth from 2, the head's states of the depth before, the true input tokens) -> the input tokens.
Drafts = Callable[[int, Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A trainable head on a frozen backbone, after the contract of ``heads/alignment.py``.

    Attributes:
        kind: its ``head.type``.
        depths: K it is trained for.
        hidden_size: H, of its states and the backbone's.
        middle_layers: of the backbone, whose states it reads beside the final one (``backbones/middle.py``).
        options: what its constructor needs besides model, depths and vocabulary to build it again.
    """

    kind: ClassVar[str]
    depths: int
    hidden_size: int
    middle_layers: tuple[int, ...] = ()
    options: dict[str, Any]

    @property
    def state_width(self) -> int:
        """W, columns of the backbone's states that it reads."""
        return middle.width(self.hidden_size, self.middle_layers)

    def forward(
        self, packed: Packed, hidden: Tensor, embedding: Tensor, rotary: RotaryTable, drafts: Drafts | None = None
    ) -> list[Tensor]:
        """Teacher-forced states of all active anchors.

        Args:
            hidden: ``[N, W]`` final-norm states of the backbone, with those of ``middle_layers``.
            embedding: ``[vocabulary, H]`` the backbone's input embeddings.
            drafts: replaces what depths from 2 on read, by the head's own drafts for instance; the losses stay
                those of the true text.

        Returns:
            K tensors ``[A, H]``, depth 1 first; scored by output rows they are the draft logits.
        """
        raise NotImplementedError

    def output_rows(self, depth: int) -> Tensor | None:
        """The head's own output projection ``[draft_vocab, H]`` of ``depth`` (from 0); None: the backbone's serves."""
        return None

    def check_depths(self, wanted: int) -> None:
        """Raise ValueError where depths have weights of their own and ``wanted`` exceeds them."""
        if wanted > self.depths:
            raise ValueError(f"depths: got {wanted}, allowed: at most {self.depths}, which this {self.kind} head has")


class Start(Protocol):
    """Weights from elsewhere that a fresh head starts with."""

    @property
    def facts(self) -> dict[str, Any]:
        """Where they come from, for ``head.json``: ``init`` and a sha256 of what was read at least."""

    def load_into(self, head: Head, vocab: DraftVocab) -> None:
        """Copy them into ``head``, whose draft vocabulary is ``vocab``.

        Raises:
            HeadError: they do not fit it.
        """
