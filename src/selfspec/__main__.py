"""Command line: ``python -m selfspec generate --prompt "…"`` drafts with the trained head and shows what it bought."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before torch loads OpenMP; stages/__init__.py says why.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch

from selfspec import __version__
from selfspec.acceptance import outcome_counts
from selfspec.backbones import load
from selfspec.backbones.decoder import Decoder
from selfspec.benchmark import divergence
from selfspec.config import Config
from selfspec.config import load as load_config
from selfspec.decoding.drafter import drafter_for
from selfspec.decoding.loop import Generation, OnTokens, speculate
from selfspec.decoding.rules import rule_for
from selfspec.errors import SelfspecError
from selfspec.heads import checkpoint


class UsageError(SelfspecError):
    """An argument that cannot work; the message names it."""


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    root = argparse.ArgumentParser(prog="selfspec", description="Retrofit MTP heads and measure what they buy.")
    root.add_argument("--version", action="version", version=f"selfspec {__version__}")
    commands = root.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="write text with the trained head; prints tokens per round and the speedup",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    generate.add_argument("--prompt", required=True, help="what to ask")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without chat template")
    generate.add_argument("--head", type=Path, default=Path("models/head"), help="directory of the trained head")
    generate.add_argument(
        "--params", type=Path, default=Path("params.yaml"), help="params file that names the backbone"
    )
    generate.add_argument("--max-new-tokens", type=int, default=128, help="tokens written at most")
    generate.add_argument("--num-drafts", type=int, default=3, help="drafts per round; 0 decodes plainly")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--seed", type=int, default=0, help="of sampling")
    generate.add_argument("--no-compare", action="store_true", help="skip the plain run that the speedup is against")
    return root


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; selfspec's errors end in one line on stderr and exit code 2."""
    options = parser().parse_args(arguments)
    try:
        _generate(options)
    except (SelfspecError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _check(options: argparse.Namespace) -> None:
    if not options.prompt.strip():
        raise UsageError("--prompt: got an empty text, allowed: at least one word")
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens: got {options.max_new_tokens}, allowed: at least 1")
    if options.num_drafts < 0:
        raise UsageError(f"--num-drafts: got {options.num_drafts}, allowed: 0 or more")
    if not 0 <= options.temperature < float("inf"):
        raise UsageError(f"--temperature: got {options.temperature}, allowed: 0 (greedy) or more, finite")


def _generate(options: argparse.Namespace) -> None:
    _check(options)
    config: Config = load_config(options.params)
    checkpoint.check(options.head)  # before the backbone is loaded
    tokenizer: Any = load.load_tokenizer(config.backbone)
    model = load.load_model(config.backbone)
    head = checkpoint.load(options.head, model, load.DTYPES[config.backbone.dtype])
    decoder = Decoder(model, middle_layers=head.module.middle_layers)
    drafter = drafter_for(decoder, head)
    prompt = _token_ids(tokenizer, options)

    def run(num_drafts: int, max_new_tokens: int, on_tokens: OnTokens | None = None) -> Generation:
        generator = torch.Generator(device=decoder.device).manual_seed(options.seed)
        return speculate(
            decoder,
            drafter,
            [prompt],
            max_new_tokens=max_new_tokens,
            num_drafts=num_drafts,
            rule=rule_for(options.temperature, generator),
            end_tokens=decoder.end_tokens,
            on_tokens=on_tokens,
        )

    run(options.num_drafts, 8)  # warm-up: the first calls of a process allocate and pick kernels
    result = run(options.num_drafts, options.max_new_tokens, _printer(tokenizer))
    print("\n")
    print(_summary(result, options.num_drafts))
    if options.num_drafts and not options.no_compare:
        plain = run(0, options.max_new_tokens)
        ratio = (result.tokens / result.seconds) / (plain.tokens / plain.seconds)
        print(f"plain decoding in the same engine: {plain.tokens / plain.seconds:.1f} tok/s; speedup {ratio:.2f} x")
        if not options.temperature:
            found = divergence.find(decoder, prompt, result.completions[0], plain.completions[0])
            print(_comparison(found, tokenizer, load.arithmetic_name(config.backbone)))


def _token_ids(tokenizer: Any, options: argparse.Namespace) -> list[int]:
    if options.raw or tokenizer.chat_template is None:
        ids: list[int] = tokenizer(options.prompt).input_ids
        return ids
    messages = [{"role": "user", "content": options.prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _printer(tokenizer: Any) -> OnTokens:
    """Print text as it is committed, holding back bytes that are not a whole character yet."""
    written: list[int] = []
    shown = 0

    def on_tokens(row: int, tokens: list[int]) -> None:
        nonlocal shown
        written.extend(tokens)
        text = tokenizer.decode(written, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            print(text[shown:], end="", flush=True)
            shown = len(text)

    return on_tokens


def _comparison(found: divergence.Divergence | None, tokenizer: Any, dtype: str) -> str:
    if found is None:
        return "text identical to plain greedy decoding"
    drafted, plain = (
        "the end" if token is None else repr(tokenizer.decode([token])) for token in (found.drafted, found.plain)
    )
    return (
        f"text parts from plain greedy decoding at new token {found.position}: {drafted} instead of {plain}; "
        f"the backbone's {dtype} logits there are {found.gap:.3g} apart"
    )


def _summary(result: Generation, num_drafts: int) -> str:
    rounds = result.rounds[0]
    lines = [f"{result.tokens} tokens in {result.seconds:.2f} s: {result.tokens / result.seconds:.1f} tok/s"]
    counts = outcome_counts([rounds], num_drafts)[0]
    if num_drafts and counts.sum():
        tau = sum((accepted + 1) * count for accepted, count in enumerate(counts)) / counts.sum()
        shares = " / ".join(f"{count / counts.sum():.0%}" for count in counts)
        lines.append(f"{len(rounds)} rounds of {num_drafts} drafts, {tau:.2f} tokens per round")
        lines.append(f"accepted 0..{num_drafts}: {shares}")
        draft, verify = result.draft_seconds / result.seconds, result.verify_seconds / result.seconds
        lines.append(f"time: draft {draft:.0%}, verify {verify:.0%}, rest {1 - draft - verify:.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
