"""What a recipe costs, counted: operations and bytes of writing completions and of training heads on them.

A product of a token with a weight matrix is 2 operations a weight, and its backward pass 4: 2 for the gradient of the
input, 2 for that of the weight. Attention over c positions is 4 c operations a value of the queries. Norms,
activations, softmaxes, embeddings, the attention inside heads, and validation are left out: a few per cent.

Texts count at the longest that the parameters allow, so all of it is an upper bound for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from selfspec.config import Config, SharedTrainConfig, TrainConfig
from selfspec.heads.cascade import CascadeHead
from selfspec.heads.encoder import EncoderLayer
from selfspec.heads.parallel import ParallelHead
from selfspec.heads.protocol import Head
from selfspec.heads.shared import SharedHead
from selfspec.losses import Objective
from selfspec.training.setup import Muon

HALF, SINGLE = 2, 4  # bytes a value


def products(module: nn.Module) -> int:
    """Weights of the linear layers of ``module``: multiplications a token."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


@dataclass(frozen=True)
class Backbone:
    """Sizes of a language model.

    Attributes:
        parameters: all of them; tied ones count once.
        layers: by layer, weights of its linear layers.
        attention: by layer, values of a token's queries; 0 without attention over all that precedes.
        cached: by layer, values that a token leaves in the cache.
        rows: vocabulary times hidden size, the weights of the lm_head.
        tied: whether these are the embeddings.
    """

    parameters: int
    layers: list[int]
    attention: list[int]
    cached: list[int]
    rows: int
    tied: bool
    heads: int
    hidden: int
    vocabulary: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Backbone:
        config, inner = model.config, model.get_decoder()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        attends = [kind != "linear_attention" for kind in kinds]  # whose state does not grow
        layers: Any = inner.layers
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=[products(layer) for layer in layers],
            attention=[attend * config.num_attention_heads * head_dim for attend in attends],
            cached=[attend * 2 * config.num_key_value_heads * head_dim for attend in attends],
            rows=config.vocab_size * config.hidden_size,
            tied=config.tie_word_embeddings,
            heads=config.num_attention_heads,
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
        )

    def forward(self, tokens: int, context: float) -> float:
        """Operations of ``tokens`` through all layers over ``context`` positions each, without the lm_head."""
        return tokens * (2 * sum(self.layers) + 4 * sum(self.attention) * context)

    def backward(self, tokens: int, context: float, last: int) -> float:
        """Operations of the way back through the ``last`` layers."""
        if not last:
            return 0.0
        return tokens * (4 * sum(self.layers[-last:]) + 8 * sum(self.attention[-last:]) * context)


def head_products(head: Head, tokens: int, anchors: int) -> int:
    """Multiplications in the linear layers of one training pass of ``head`` over ``tokens``, of them ``anchors``.

    Raises:
        TypeError: a type of head that is not counted yet.
    """
    if isinstance(head, ParallelHead):
        return anchors * products(head.blocks)
    if isinstance(head, SharedHead):
        *earlier, last = head.blocks
        combine, whole = products(head.eh_proj), sum(map(products, head.blocks))
        middle = 0 if head.middle_proj is None else products(head.middle_proj)
        everywhere = combine + middle + sum(map(products, earlier)) + _keys_and_values(last)
        first = tokens * everywhere + anchors * products(last)
        return first + (head.depths - 1) * anchors * (combine + whole)
    if isinstance(head, CascadeHead):
        *upper, deepest = head.by_depth()
        block = deepest.mtp_block
        last = tokens * (products(deepest.eh_proj) + _keys_and_values(block)) + anchors * products(block)
        return tokens * sum(map(products, upper)) + last
    raise TypeError(f"head of type {head.kind} is not counted; teach head_products its passes")


def _keys_and_values(block: nn.Module) -> int:
    """Of a decoder layer or an encoder layer: all that runs at a token without a loss."""
    if isinstance(block, EncoderLayer):
        return products(block.in_proj) * 2 // 3
    layer: Any = block
    return products(layer.self_attn.k_proj) + products(layer.self_attn.v_proj)


@dataclass(frozen=True)
class Work:
    """Operations, and bytes that come from memory where that is what decoding waits for."""

    operations: float
    bytes_moved: float = 0.0


@dataclass(frozen=True)
class Texts:
    """All texts, each at its longest.

    Attributes:
        train, validation, heldout: how many there are.
        prompt, new: tokens that are given, and tokens that the backbone writes after them.
        corpus: training and validation read documents as they are; only what is held out is written.
    """

    train: int
    validation: int
    heldout: int
    prompt: int
    new: int
    corpus: bool = False

    @classmethod
    def of(cls, config: Config) -> Texts:
        splits = {name: sum(counts.values()) for name, counts in config.distill.prompts.model_dump().items()}
        prompt, new = config.distill.max_prompt_tokens, config.distill.max_new_tokens
        return cls(**splits, prompt=prompt, new=new, corpus=config.distill.text == "corpus")

    @property
    def length(self) -> int:
        return self.prompt + self.new

    @property
    def written(self) -> int:
        """Texts that the backbone completes."""
        return self.heldout + (0 if self.corpus else self.train + self.validation)

    @property
    def anchors(self) -> int:
        """Positions of a text that drafts start from in training, but for a few."""
        return self.length if self.corpus else self.new


def prefill(backbone: Backbone, texts: Texts) -> Work:
    """Reading all prompts."""
    return Work(texts.written * (backbone.forward(texts.prompt, texts.prompt) + 2 * backbone.rows))


def reading(backbone: Backbone, texts: Texts) -> Work:
    """The states of documents that the backbone has not written, to be stored."""
    count = texts.train + texts.validation
    return Work(count * (backbone.forward(texts.length, texts.length) + 2 * texts.length * backbone.rows))


def decode(backbone: Backbone, texts: Texts, batch: int) -> Work:
    """Writing all completions, ``batch`` rows together: each token moves all weights and the rows' cache."""
    count, context = texts.written, texts.prompt + texts.new / 2
    operations = count * (backbone.forward(texts.new, context) + texts.new * 2 * backbone.rows)
    steps = math.ceil(count / batch) * texts.new
    weights = sum(backbone.layers) + backbone.rows
    cache = min(batch, count) * context * sum(backbone.cached)
    return Work(operations, steps * HALF * (weights + cache))


@dataclass(frozen=True)
class Stage:
    """One training stage of a recipe.

    Attributes:
        draft_rows: draft vocabulary times hidden size.
        live: the backbone runs in training, in place of stored states.
        teacher: what an unfrozen backbone is distilled from.
    """

    training: TrainConfig
    shared: SharedTrainConfig
    objective: Objective
    head: Head
    backbone: Backbone
    draft_rows: int
    texts: Texts
    live: bool = False
    teacher: Backbone | None = None

    @property
    def sequences(self) -> int:
        """Texts read in all epochs."""
        return round(self.training.epochs * self.shared.data_fraction * self.texts.train)

    @property
    def alive(self) -> int:
        """Texts whose activations are kept at once."""
        return min(self.shared.micro_batch or self.training.batch_sequences, self.training.batch_sequences)

    @property
    def unfrozen(self) -> int:
        """Last layers of the backbone that are trained too, with the lm_head."""
        return self.shared.unfrozen_layers

    @property
    def own_rows(self) -> bool:
        return self.head.output_rows(0) is not None

    def operations(self) -> float:
        """Of all steps."""
        steps = math.ceil(self.sequences / self.training.batch_sequences)
        return self.sequences * (self._head() + self._rows() + self._backbone()) + steps * self._muon()

    def _head(self) -> float:
        return 6 * head_products(self.head, self.texts.length, self.texts.anchors)

    def _rows(self) -> float:
        """Draft logits of every depth with their way back, and the teacher's, once for all depths."""
        passes = 2 + 2 + 2 * self.own_rows + 2 * self.objective.needs_mean_alpha
        products = passes * self.head.depths * self.draft_rows
        if self.shared.on_policy:  # the drafts that deeper depths read
            products += 2 * (self.head.depths - 1) * self.draft_rows
        for softening in {self.objective.softening(name) for name in self._taught()}:
            products += 2 * (self.draft_rows if softening == 1 else self.backbone.rows)
        return self.texts.anchors * products

    def _taught(self) -> list[str]:
        """Quantities of the loss that need the backbone's distribution."""
        return [name for name in self.objective.quantities if name != "ce"]

    def _backbone(self) -> float:
        if not (self.live or self.unfrozen):
            return 0.0
        length = self.texts.length
        # The main loss with its way back, and the normalisers of what teaches.
        lm_head = (8 if self.unfrozen else 2) * self.texts.anchors * self.backbone.rows
        layers = self.backbone.forward(length, length) + self.backbone.backward(length, length, self.unfrozen)
        if self.teacher:
            layers += self.teacher.forward(length, length) + 2 * self.texts.anchors * self.teacher.rows
        return layers + lm_head

    def _muon(self) -> float:
        """Newton-Schulz iterations of one step: two products with the matrix and one of its small square each."""
        total = 0
        for rows, columns in self._matrices():
            short, long = sorted((rows, columns))
            total += Muon.STEPS * (4 * short * short * long + 2 * short**3)
        return float(total)

    def _matrices(self) -> list[tuple[int, ...]]:
        """Shapes of what Muon trains (``training.setup.build_optimizers``)."""
        if self.training.optimizer != "muon":
            return []
        named = self.head.named_parameters()
        return [tuple(weight.shape) for name, weight in named if weight.ndim == 2 and "lm_heads" not in name]

    def memory(self) -> float:
        """Bytes that are alive at once: weights, what optimisers hold, logits, an estimate of activations."""
        trained = sum(parameter.numel() for parameter in self.head.parameters())
        moments = SINGLE * (2 * trained - sum(math.prod(shape) for shape in self._matrices()))
        head = trained * (HALF + HALF + SINGLE + SINGLE) + moments  # working, its gradient, master, its gradient
        copied = 0 if self.draft_rows == self.backbone.rows else HALF * self.draft_rows
        own = SINGLE * self.head.depths * self.draft_rows if self.own_rows else 0  # summed in float32
        unfrozen = 0
        if self.unfrozen:
            weights = sum(self.backbone.layers[-self.unfrozen :]) + self.backbone.rows
            unfrozen = weights * (HALF + SINGLE + SINGLE + 2 * SINGLE) + self.backbone.tied * HALF * self.backbone.rows
        given = self.backbone.parameters + (self.teacher.parameters if self.teacher else 0)
        logits = max(self._logits(), self._main_logits())
        return HALF * given + head + copied + own + unfrozen + logits + self._activations()

    def _logits(self) -> float:
        """The buffers of ``training.chunked``: 3 for cross-entropy, else 6; softening and own rows need more."""
        rows, vocabulary = self.training.chunk_rows, self.draft_rows // self.backbone.hidden
        softened = any(self.objective.softening(name) != 1 for name in self.objective.quantities)
        buffers = (6 if self._taught() else 3) + 3 * softened + self.own_rows
        teacher = rows // self.head.depths * self.backbone.vocabulary if softened else 0
        return SINGLE * (buffers * rows * vocabulary + teacher)

    def _main_logits(self) -> float:
        """Of the unfrozen backbone's own loss: four forms of them, and as many against a teacher's."""
        forms = 0 if not self.unfrozen else 8 if self.teacher else 4
        return SINGLE * forms * self.training.chunk_rows * self.backbone.vocabulary

    def _activations(self) -> float:
        """Of the texts alive, roughly: 12 values of the hidden size and 4 of the MLP's a token and layer.

        Besides, the scores of every anchor over its text in three forms (``heads.attention.attend_chains``), and the
        states with their gradients.
        """
        kept, depths, anchors = self.alive * HALF, self.head.depths, self.texts.anchors
        inner = max(self.backbone.layers) // (3 * self.backbone.hidden)  # the MLP is most of a layer
        a_token = 12 * self.backbone.hidden + 4 * inner
        states = kept * 3 * depths * anchors * self.backbone.hidden
        backbone = kept * self.unfrozen * self.texts.length * a_token
        if isinstance(self.head, ParallelHead):
            return 2 * states + backbone
        cascade = isinstance(self.head, CascadeHead)
        blocks = kept * depths * (self.texts.length if cascade else anchors) * a_token
        chains = 1 if cascade else depths
        scores = 3 * kept * chains * anchors * self.texts.length * self.backbone.heads
        return states + blocks + scores + backbone


def writing_memory(backbone: Backbone, texts: Texts, batch: int) -> float:
    """Bytes alive while completions are written: weights, the rows' cache and states, their logits three times."""
    rows = min(batch, texts.written)
    a_row = HALF * texts.length * (sum(backbone.cached) + backbone.hidden) + 3 * SINGLE * backbone.vocabulary
    return HALF * backbone.parameters + rows * a_row


def stored_states(backbone: Backbone, texts: Texts, middle_layers: int = 0) -> float:
    """Bytes on disk of the states that training and validation read: final ones, and of as many middle layers."""
    return (texts.train + texts.validation) * texts.length * backbone.hidden * (1 + middle_layers) * HALF
