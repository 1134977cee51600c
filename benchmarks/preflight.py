"""Whether the checks before a job name the slow node, and nobody else: real nodes, a link limited by `tc tbf`, or none.

Three network namespaces, as tests/nodes acts them out. In every other trial the link of a node drawn at random has a
rate drawn at random. Needs root. `python benchmarks/preflight.py --trials 20 --out FILE.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "nodes")]

from nodes import Node, finish, make_nodes, why_none  # noqa: E402

from shardwise.launch.nodes.secret import new_secret  # noqa: E402

NUM_NODES = 3
SLOWEST, FASTEST = 50e6, 1e9  # bits per second; a few cores cannot send much faster than twice that


def checked(nodes: list[Node], port: int) -> tuple[int, str, float]:
    """Returns exit code, output and seconds of one check of the nodes."""
    began, folder = time.monotonic(), nodes[0].cwd
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(new_secret().hex())
    commands = [
        node.start(
            sys.executable,
            *("-m", "shardwise", "train", "--preflight", f"run.dir={folder}/runs"),
            SHARDWISE_NODE=index,
            SHARDWISE_NODES=NUM_NODES,
            SHARDWISE_HEAD=nodes[0].address,
            SHARDWISE_PORT=port,
            SHARDWISE_SECRET_FILE=secret,
        )
        for index, node in enumerate(nodes)
    ]
    codes = finish(commands, 200)
    assert len(set(codes)) == 1, codes
    return codes[0], commands[0].output, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if reason := why_none():
        sys.exit(f"error: {reason}")
    draw, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        for trial in range(2 * args.trials):
            *nodes, switch = make_nodes(NUM_NODES, Path(folder) / str(trial), own_name=None)
            try:
                slow = draw.randrange(NUM_NODES) if trial % 2 else None
                rate = round(SLOWEST * (FASTEST / SLOWEST) ** draw.random())
                if slow is not None:
                    nodes[slow].limit(f"{rate}bit")
                code, output, seconds = checked(nodes, 20_000 + trial)
            finally:
                for node in (*nodes, switch):
                    node.close()
            named = sorted({int(line.split()[2]) for line in output.splitlines() if line.startswith("error: node")})
            is_right = named == ([] if slow is None else [slow]) and code == (0 if slow is None else 5)
            limit = None if slow is None else rate
            rows.append({"slow": slow, "bits_per_s": limit, "named": named, "right": is_right, "s": seconds})
            said = "no node is slow" if slow is None else f"node {slow} has {rate / 1e6:.0f} Mbit/s"
            print(f"{'right' if is_right else 'WRONG'}  {said}; named {named}; {seconds:.1f} s", flush=True)
            if not is_right:
                print(output)
    found = {
        "named": sum(row["right"] for row in rows if row["slow"] is not None),
        "clean": sum(row["right"] for row in rows if row["slow"] is None),
        "of_each": args.trials,
        "longest_s": max(row["s"] for row in rows),
        "date": str(date.today()),
        "trials": rows,
    }
    print(f"named {found['named']} of {args.trials} slow nodes; {args.trials - found['clean']} false alarms")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
