"""Speed of a training step on random weights of the default's shape: ``python -m tools.bench_training``.

Prints anchors a second (an anchor is one chain of K drafts) of the whole step: head, loss, gradients,
optimiser. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from selfspec.backbones.load import DTYPES, arithmetic, output_projection
from selfspec.config import TrainConfig
from selfspec.distill.records import Completion
from selfspec.distill.states import StoredStates
from selfspec.heads.shared import SharedHead
from selfspec.heads.vocab import DraftVocab
from selfspec.losses import Objective
from selfspec.training.data import Dataset
from selfspec.training.loop import Trainer
from selfspec.training.setup import build_optimizers

HIDDEN, VOCABULARY, DEPTHS, PROMPT, TOKENS, SEQUENCES = 576, 49152, 3, 60, 220, 8
CASES = (("ce", 8192), ("kl", 8192), ("lk_hybrid", 8192), ("ce", VOCABULARY))


def backbone() -> PreTrainedModel:
    """One layer of SmolLM2-135M's shape: a head reads its sizes, embeddings and output projection only."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).requires_grad_(False).eval()


def dataset(model: PreTrainedModel) -> Dataset:
    """One batch of random completions with random states."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS)).tolist()
    texts = [
        Completion(f"r{number}", "random", "corpus", "chat", ids[:PROMPT], ids[PROMPT:], "length", 0.0)
        for number, ids in enumerate(tokens)
    ]
    hidden = torch.randn(SEQUENCES * TOKENS, HIDDEN)
    lse = torch.cat([(part @ output_projection(model).t()).logsumexp(-1) for part in hidden.split(256)])
    return Dataset(texts, StoredStates(hidden.numpy(), lse, torch.float32), DEPTHS)


def anchors_per_second(
    loss: str, draft_tokens: int, model: PreTrainedModel, data: Dataset, options: TrainConfig, seconds: float
) -> float:
    """The best step of those that ``seconds`` hold: the machine may be shared."""
    vocab = DraftVocab(torch.arange(draft_tokens), VOCABULARY)
    head = SharedHead(model, DEPTHS)
    trainer = Trainer(model, head, vocab, Objective(loss, eta=3.0), options, 0.8, data, data, seed=0)
    optimizers = build_optimizers(trainer.masters.masters, options)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        start = time.perf_counter()
        _, _, anchors = trainer.step(range(SEQUENCES), optimizers)
        best = max(best, anchors / (time.perf_counter() - start))
    return best


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="per line (default: 10)")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=min(torch.get_num_threads(), 2))
    parser.add_argument("--chunk-rows", type=int, default=128, help="rows of logits alive at once (default: 128)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = backbone()
    data = dataset(model)
    options = TrainConfig(
        epochs=1.0,
        optimizer=args.optimizer,
        learning_rate=1e-3,
        weight_decay=0.0,
        batch_sequences=SEQUENCES,
        warmup_fraction=0.0,
        schedule="constant",
        grad_clip=1.0,
        dtype="bfloat16",
        eval_every=1.0,
        chunk_rows=args.chunk_rows,
    )
    dtype = str(arithmetic(DTYPES[options.dtype])).removeprefix("torch.")
    print(f"{torch.get_num_threads()} threads, {dtype}, {args.optimizer}, chunk_rows {args.chunk_rows}, K = {DEPTHS}")
    for loss, draft_tokens in CASES:
        speed = anchors_per_second(loss, draft_tokens, model, data, options, args.seconds)
        print(f"{loss:<10} {draft_tokens:>6,} draft tokens  {speed:>6,.0f} anchors/s", flush=True)


if __name__ == "__main__":
    main()
