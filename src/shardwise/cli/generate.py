"""`shardwise generate` samples text from a run, a checkpoint or a model directory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit, UserError

if TYPE_CHECKING:
    from shardwise.data.tokenizer import Tokenizer
    from shardwise.model.decoder import Decoder
    from shardwise.run.generate import Sampling
    from shardwise.run.weights import StoredWeights

HELP = "Sample text from a run, a checkpoint or a Hugging Face directory."
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a run, `last`, a checkpoint directory, a model directory or a hub id")
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue (default: standard input, or nothing); several times: computed together",
    )
    parser.add_argument("--num", type=int, default=1, metavar="N", help="samples of each prompt (default: 1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="most texts computed together (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to sample (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="sample among the likeliest tokens up to this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default: 0)")
    parser.add_argument("--chat", action="store_true", help="a conversation through the model's chat template")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.weights import find_weights

    _check(args)
    weights = find_weights(args.source, args.runs)
    tokenizer = weights.tokenizer()
    from shardwise.run.device import best_device
    from shardwise.run.generate import Sampling

    device = best_device()
    model = weights.load(device)
    if not getattr(model, "remembers", True):  # a model of transformers
        why = "has no key/value cache that works here, so every token computes all before it again"
        print(f"note     {weights.name} {why}", file=sys.stderr)
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    if args.num * len(args.prompt or [""]) > 1:
        return _many(args, model, tokenizer, weights, sampling)
    if args.chat:
        return _chat(args, model, tokenizer, weights, sampling)
    text = args.prompt[0] if args.prompt else ("" if sys.stdin.isatty() else sys.stdin.read())
    prompt = tokenizer.encode_prompt(text) or [tokenizer.separator]
    if args.json:
        completion = "".join(_pieces(args, model, tokenizer, prompt, sampling))
        print(json.dumps({"schema": 1, "prompt": text, "completion": completion}))
        return Exit.DONE
    print(text, end="", flush=True)
    for piece in _pieces(args, model, tokenizer, prompt, sampling):
        print(piece, end="", flush=True)
    print()
    return Exit.DONE


def _check(args: argparse.Namespace) -> None:
    for name, value, bad, range_ in (
        ("--temperature", args.temperature, not 0 <= args.temperature < float("inf"), "0 or more"),
        ("--top-p", args.top_p, not 0 < args.top_p <= 1, "above 0, at most 1"),
        ("--max-tokens", args.max_tokens, args.max_tokens < 1, "1 or more"),
        ("--num", args.num, args.num < 1, "1 or more"),
        ("--batch", args.batch, args.batch < 1, "1 or more"),
        ("--seed", args.seed, not 0 <= args.seed < 2**63, "0 or more, below 2^63"),
    ):
        if bad:
            fix = "leave it out for the default"
            raise UserError(f"{name} is out of range: {value}", why=f"it must be {range_}", fix=fix)


def _pieces(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, prompt: list[int], sampling: Sampling
) -> Iterator[str]:
    from shardwise.cli.until_stop import UntilStop
    from shardwise.run.generate import generate

    stream, until = tokenizer.stream(), UntilStop(args.stop)
    for token in generate(model, prompt, args.max_tokens, sampling, frozenset({tokenizer.separator})):
        yield until.push(stream.push(token))
        if until.has_ended:
            return
    yield until.push(stream.finish()) + until.finish()


def _many(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, weights: StoredWeights, sampling: Sampling
) -> int:
    """Continues several texts, some at a time, prints them one after the other and returns the exit code."""
    from shardwise.data.chat import open_template

    texts = [text for text in args.prompt or [""] for _ in range(args.num)]
    prompts = [tokenizer.encode_prompt(text) or [tokenizer.separator] for text in texts]
    if args.chat:
        custom = weights.config.data.chat_template if weights.config else None
        template = open_template(custom, weights.tokenizer_dir, tokenizer)
        prompts = [tokenizer.encode(template.prompt([{"role": "user", "content": text}])) for text in texts]
    found: list[str] = []
    for first in range(0, len(prompts), args.batch):
        seeded = replace(sampling, seed=sampling.seed + first)
        found += _together(args, model, tokenizer, prompts[first : first + args.batch], seeded)
    if args.json:
        rows = [{"prompt": text, "completion": said} for text, said in zip(texts, found)]
        print(json.dumps({"schema": 1, "completions": rows}))
        return Exit.DONE
    for number, (text, said) in enumerate(zip(texts, found), 1):
        print(f"--- {number} of {len(texts)}\n{'' if args.chat else text}{said}")
    return Exit.DONE


def _together(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, prompts: list[list[int]], sampling: Sampling
) -> list[str]:
    from shardwise.cli.until_stop import UntilStop
    from shardwise.run.generate import generate_batch

    streams, untils = [tokenizer.stream() for _ in prompts], [UntilStop(args.stop) for _ in prompts]
    texts = [""] * len(prompts)

    def enough(row: int, token: int) -> bool:
        texts[row] += untils[row].push(streams[row].push(token))
        return untils[row].has_ended

    generate_batch(model, prompts, args.max_tokens, sampling, frozenset({tokenizer.separator}), enough)
    return [text + until.push(stream.finish()) + until.finish() for text, stream, until in zip(texts, streams, untils)]


def _chat(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, weights: StoredWeights, sampling: Sampling
) -> int:
    """Chats turn by turn and returns the exit code; with --prompt one turn, else until end of input."""
    from shardwise.data.chat import open_template

    custom = weights.config.data.chat_template if weights.config else None
    template = open_template(custom, weights.tokenizer_dir, tokenizer)
    messages: list[dict[str, Any]] = []
    if args.json and args.prompt is None:
        raise UserError("--chat --json needs --prompt", why="it reports one turn", fix='--prompt "..."')
    while True:
        if args.prompt is not None:
            said: str | None = args.prompt[0] if not messages else None
        else:
            said = _ask()
        if said is None:
            return Exit.DONE
        messages.append({"role": "user", "content": said})
        prompt = tokenizer.encode(template.prompt(messages))
        answer = ""
        for piece in _pieces(args, model, tokenizer, prompt, sampling):
            answer += piece
            if not args.json:
                print(piece, end="", flush=True)
        print(json.dumps({"schema": 1, "prompt": said, "completion": answer}) if args.json else "")
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
