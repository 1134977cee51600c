"""How fast `data prepare` is against calling the tokenizers library directly, and whether its memory stays constant.

    python benchmarks/tokenizing.py [--size 64MB] [--repeats 3] [--memory 64MB 256MB] [--out FILE.json]

Makes a synthetic corpus of .jsonl documents and a byte-level BPE tokenizer, then times, interleaved: (a) encode_batch
of the tokenizers library on all cores over the same documents already in memory, ids collected, nothing read or
written; (b) prepare: reading, parsing, encoding, splitting, writing and digesting. Each timing is a process of its own,
so that peak memory is honest and thread pools are cold for both. The target: (b) within 10 % of (a).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"
UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
SYLLABLES = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
VOCABULARY = 16_000


def size(text: str) -> int:
    found = re.fullmatch(r"([\d.]+)\s*(MB|GB|MiB|GiB)", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64MB or 1GB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def lexicon(rng: random.Random) -> list[str]:
    return ["".join(rng.choices(SYLLABLES, k=rng.choice((1, 1, 2, 2, 3, 4)))) for _ in range(50_000)]


def document(rng: random.Random, words: list[str]) -> str:
    """Words at roughly the frequencies of natural text (the n-th word about 1/n as often as the first)."""
    picks = (words[int(len(words) ** rng.random()) - 1] for _ in range(rng.randint(50, 800)))
    return "".join(word + rng.choice((" ", " ", " ", " ", " ", ", ", ". ", ".\n")) for word in picks)


def make_corpus(path: Path, num_bytes: int) -> None:
    rng = random.Random(0)
    words = lexicon(rng)
    pool = [json.dumps({"text": document(rng, words)}) + "\n" for _ in range(4000)]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:  # documents repeat beyond about 14 MB, their order does not
            written += file.write(rng.choice(pool))


def make_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(0)
    words = lexicon(rng)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator((document(rng, words) for _ in range(3000)), trainer)
    core.save(str(path))


def run_direct(corpus: Path, tokenizer: Path, method: str) -> dict[str, float]:
    """One call per 4,000 documents, ids collected as a user of the library would."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(tokenizer))
    encode = getattr(core, method)
    with corpus.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    began, began_cpu = time.perf_counter(), time.process_time()
    num_tokens = 0
    for first in range(0, len(texts), 4000):
        num_tokens += sum(len(one.ids) for one in encode(texts[first : first + 4000], add_special_tokens=False))
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,
        "tokens": num_tokens,
    }


def run_prepare(corpus: Path, tokenizer: str) -> dict[str, float]:
    sys.path.insert(0, str(SRC))
    from shardwise.data.prepare import prepare
    from shardwise.data.tokenizer import open_tokenizer

    opened = open_tokenizer(tokenizer)
    with tempfile.TemporaryDirectory(dir=corpus.parent) as scratch:
        began, began_cpu = time.perf_counter(), time.process_time()
        info = prepare([str(corpus)], opened, Path(scratch) / "out")
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": info.num_tokens, "peak_bytes": peak_memory()}


def peak_memory() -> int:
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def in_child(*words: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--child", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def compare(directory: Path, num_bytes: int, repeats: int) -> dict[str, object]:
    corpus, tokenizer = directory / "corpus.jsonl", directory / "tokenizer.json"
    make_corpus(corpus, num_bytes)
    ways = {
        "encode_batch": ("direct", str(corpus), str(tokenizer), "encode_batch"),
        "encode_batch_fast": ("direct", str(corpus), str(tokenizer), "encode_batch_fast"),
        "prepare": ("prepare", str(corpus), str(tokenizer)),
        "prepare bytes": ("prepare", str(corpus), "bytes"),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(repeats):
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:  # neighbours in time, both orders
            runs[name].append(in_child(*ways[name]))
    megabytes = corpus.stat().st_size / 1e6
    print(f"{'':<20}{'median s':>10}{'CPU s':>9}{'MB/s':>9}   prepare / this: time (lowest to highest), CPU time")
    table = {}
    for name, done in runs.items():
        middle, cpu = (statistics.median(run[key] for run in done) for key in ("seconds", "cpu_seconds"))
        ratios, cpu_ratios = (
            sorted(ours[key] / run[key] for ours, run in zip(runs["prepare"], done))
            for key in ("seconds", "cpu_seconds")
        )
        table[name] = {
            "runs": done,
            "MB_per_s": megabytes / middle,
            "prepare_ratio": ratios,
            "prepare_cpu_ratio": cpu_ratios,
        }
        of_wall, of_cpu = statistics.median(ratios), statistics.median(cpu_ratios)
        spread = f"{of_wall:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), {of_cpu:.3f}"
        print(
            f"{name:<20}{middle:>10.2f}{cpu:>9.2f}{megabytes / middle:>9.1f}   "
            f"{spread if name.startswith('encode') else ''}"
        )
    return {"corpus_MB": megabytes, "ways": table}


def memory(directory: Path, sizes: list[int]) -> list[dict[str, float]]:
    rows = []
    print(f"\n{'corpus':>12}{'peak memory':>16}{'seconds':>10}")
    for num_bytes in sizes:
        corpus = directory / "memory.jsonl"
        make_corpus(corpus, num_bytes)
        result = in_child("prepare", str(corpus), str(directory / "tokenizer.json"))
        rows.append({"corpus_bytes": num_bytes, **result})
        print(f"{num_bytes / 1e6:>9,.0f} MB{result['peak_bytes'] / 2**20:>12,.0f} MiB{result['seconds']:>10.1f}")
        corpus.unlink()
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, corpus, tokenizer, *method = sys.argv[2:]
        result = (
            run_prepare(Path(corpus), tokenizer)
            if kind == "prepare"
            else run_direct(Path(corpus), Path(tokenizer), *method)
        )
        print(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=size, default=size("64MB"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=size, nargs="*", default=[size("64MB"), size("256MB")], metavar="SIZE")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    import tokenizers

    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "tokenizers": tokenizers.__version__}
    print(
        f"{machine['cores']} cores, Python {machine['python']}, tokenizers {machine['tokenizers']}, vocabulary "
        f"{VOCABULARY:,}\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make_tokenizer(directory / "tokenizer.json")
        report = {"schema": 1, "machine": machine, "speed": compare(directory, args.size, args.repeats)}
        report["memory"] = memory(directory, args.memory)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
