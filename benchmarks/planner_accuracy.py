"""How well the planner predicts runs that others published.

    python benchmarks/planner_accuracy.py DIR                       every CSV of DIR that has training runs
    python benchmarks/planner_accuracy.py DIR --only FILE.csv       one of them
    python benchmarks/planner_accuracy.py DIR --rows ROWS.csv       each row's prediction beside its measurement
    python benchmarks/planner_accuracy.py DIR --json RESULT.json

Every row becomes a model, a cluster, a job, a layout and a stack profile (benchmarks/accuracy, benchmarks/stacks); what
cannot is skipped, with the reason. Clean rows: at most 16 nodes, 15 % of the 16-bit peak or more, recomputation known.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from accuracy.page import page
from accuracy.question import Question, question_of
from accuracy.run import GIB, Run, Skip, read_runs
from accuracy.score import Answer, by, intervals, score

import shardwise
from shardwise.errors import UserError
from shardwise.plan.prediction.predict import predict
from shardwise.spec.prediction import Prediction

ROW = (
    "model",
    "gpus",
    "gpu_kind",
    "nodes",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "zero",
    "sp",
    "recompute",
    "micro_batch",
    "global_batch",
    "seq",
    "precision",
    "stack",
    "compile",
    "async_tp",
)


def answer(run: Run) -> Answer:
    """Where a row does not say what is computed again: nothing if that fits, else cheap parts. Tables of tuned recipes
    seldom repeat whole blocks."""
    question = question_of(run)
    if not (run.has_failed or run.step_s or run.memory_bytes or run.number("tflops_per_gpu")):
        raise Skip("neither time, speed nor memory published")
    try:
        found = Answer(question, _predict(question))
        if found.fails and not question.recompute_known:
            question = replace(question, plan=replace(question.plan, recompute="selective"))
            found = Answer(question, _predict(question))
    except UserError as error:
        raise Skip(f"refused: {error.what}") from None
    return found


def _predict(asked: Question) -> Prediction:
    return predict(asked.model, asked.cluster, asked.job, asked.plan, asked.stack)


def read_directory(directory: Path, only: str | None) -> tuple[dict[str, list[Run]], list[str]]:
    """Runs by file, and the files that are not runs."""
    if not directory.is_dir():
        raise UserError(
            f"no directory {directory}",
            why="it is to hold CSV files of published runs",
            fix="name an existing directory",
        )
    files, others = {}, []
    for path in sorted(directory.glob("*.csv")):
        if only not in (None, path.name):
            continue
        runs = None if path.name.startswith("calib_") else read_runs(path)
        if runs is None:
            others.append(path.name)
        else:
            files[path.name] = runs
    if not files:
        raise UserError(
            f"no published runs in {directory}",
            why=f"no CSV{f' named {only}' if only else ''} there has the columns model, gpus, gpu_kind, tp and pp",
            fix="name a directory with such files; benchmarks/accuracy/run.py says what each column means",
        )
    return files, others


def show(value: float | None, scale: float = 100, unit: str = "%", digits: int = 1) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}{unit}"


HEAD = (
    f"{'':28} {'rows':>5} | {'step':>5} {'MAPE':>7} {'median':>7} {'bias':>7} | "
    f"{'mem':>5} {'p50':>6} {'p90':>7} {'p95':>7} {'bias':>7} | "
    f"{'OOM right':>9} {'prec.':>6} {'recall':>6} | {'groups':>6} {'rank':>6} {'regret':>7}"
)


def line(name: str, found: dict[str, Any]) -> str:
    step, memory, oom, rank = found["step"], found["memory"], found["oom"] or {}, found["ranking"]
    return (
        f"{name[:28]:28} {found['rows']:5} | {step['rows']:5} {show(step['mape']):>7} {show(step['median']):>7} "
        f"{show(step['bias']):>7} | "
        f"{memory['rows']:5} {show(memory['p50']):>6} {show(memory['p90']):>7} {show(memory['p95']):>7} "
        f"{show(memory['bias']):>7} | "
        f"{show(oom.get('accuracy')):>9} {show(oom.get('precision')):>6} {show(oom.get('recall')):>6} | "
        f"{rank['groups']:6} {show(rank['spearman_median'], 1, '', 2):>6} {show(rank['regret_median']):>7}"
    )


def write_rows(path: Path, answers: list[Answer]) -> None:
    parts = sorted({name for one in answers for name in one.prediction.step})
    kinds = sorted({name for one in answers for name in one.prediction.memory})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "file",
                "line",
                "clean",
                *ROW,
                "status",
                "fails",
                "mfu",
                "step_s",
                "predicted_s",
                "step_error",
                "memory_gib",
                "predicted_gib",
                "memory_error",
                *(f"s:{name}" for name in parts),
                *(f"gib:{name}" for name in kinds),
                "schedule",
                "assumed",
            ]
        )
        for one in answers:
            run, predicted = one.question.run, one.prediction
            known = [
                run.file,
                run.line,
                int(one.is_clean),
                *(run.text(name) for name in ROW),
                "failed" if run.has_failed else "ok",
            ]
            step = [int(one.fails), one.mfu, one.step_s, predicted.step_s, one.step_error]
            memory = [(one.memory_bytes or 0) / GIB or None, one.predicted_bytes / GIB, one.memory_error]
            detail = [predicted.step.get(name, 0.0) for name in parts]
            detail += [predicted.memory.get(name, 0) / GIB for name in kinds]
            last = [one.question.plan.schedule, "; ".join(one.question.assumed)]
            writer.writerow(
                [round(cell, 5) if isinstance(cell, float) else cell for cell in known + step + memory + detail + last]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", metavar="FILE.csv")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rows", type=Path, metavar="FILE.csv", help="write every row's prediction there")
    parser.add_argument(
        "--intervals", type=Path, metavar="FILE.toml", help="write src/shardwise/plan/prediction/intervals.toml anew"
    )
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write benchmarks/results/accuracy.md anew")
    asked = parser.parse_args()
    began = time.perf_counter()
    files, others = read_directory(asked.directory, asked.only)
    for name in others:
        print(f"{name}: not training runs, left out")
    total, done = sum(map(len, files.values())), 0
    answers: list[Answer] = []
    skipped: dict[str, Counter[str]] = {name: Counter() for name in files}
    for name, runs in files.items():
        for run in runs:
            try:
                answers.append(answer(run))
            except Skip as why:
                skipped[name][str(why)] += 1
            except Exception as error:  # one odd row must not end the rest; it is counted and shown
                skipped[name][f"a mistake of ours: {type(error).__name__}: {error}"] += 1
            done += 1
            if sys.stderr.isatty() and done % 20 == 0:
                print(f"\r{done} of {total} rows", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    seconds = time.perf_counter() - began

    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {"shardwise": shardwise.__version__, "python": platform.python_version()},
        "seconds": round(seconds, 1),
    }
    grouped = by(answers, lambda one: one.question.run.file)
    for title, keep in {"all": lambda one: True, "clean": lambda one: one.is_clean}.items():
        rows = {name: [one for one in grouped.get(name, []) if keep(one)] for name in files}
        figures = {name: score(found) for name, found in rows.items()}
        overall = score([one for one in answers if keep(one)])
        result[title] = {"overall": overall, "files": figures}
        about = "every row" if title == "all" else "clean rows: <= 16 nodes, MFU >= 15 %, recomputation known"
        print(f"\n{about}\n{HEAD}")
        for name, found in figures.items():
            print(line(name, found))
        print(line("overall", overall))
    result["skipped"] = {name: dict(reasons) for name, reasons in skipped.items() if reasons}
    result["assumed"] = {
        name: dict(Counter(word for one in found for word in one.question.assumed)) for name, found in grouped.items()
    }
    print("\nskipped")
    for name, reasons in result["skipped"].items():
        for reason, count in reasons.items():
            print(f"  {count:4}  {name}: {reason}")
    print("\nassumed, where a row does not say")
    for name, words in result["assumed"].items():
        for word, count in words.items():
            print(f"  {count:4}  {name}: {word}")
    print(f"\n{len(answers)} of {total} rows in {seconds:.1f} s")
    if asked.rows:
        write_rows(asked.rows, answers)
    if asked.intervals:
        asked.intervals.write_text(intervals(answers), encoding="utf-8")
    if asked.page:
        asked.page.write_text(page(result), encoding="utf-8")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(int(error.code))
