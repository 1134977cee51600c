"""`shardwise doctor` says what this machine is and how fast, measured here and now in some seconds."""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import cpu_model, memory_limit, this_machine, usable_cores, usable_memory
from shardwise.cluster.describe.toml import write_toml
from shardwise.cluster.describe.versions import Library, core_libraries, optional_libraries
from shardwise.cluster.measure.devices import DeviceRates, DiskRates, measure_devices, measure_disk
from shardwise.cluster.measure.link import LinkFit, LinkNotMeasured, measure_local_link
from shardwise.config.load import load_config
from shardwise.config.units import format_bytes
from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically
from shardwise.terminal import say, say_error

HELP = "Measure this machine: devices, memory, disk, the link between processes, versions."
CONFIG = True
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the measurements as a cluster file (TOML)")
    parser.add_argument("--force", action="store_true", help="let --out overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    for word in args.overrides:
        if (key := word.partition("=")[0]) != "run.dir":
            raise UserError(
                f"`{key}` cannot be used with `doctor`",
                why="it measures this machine, and of a config it reads run.dir, whose disk it measures",
                fix="leave it out",
            )
    run_directory = load_config(None, args.overrides).config.run.dir
    if args.out and Path(args.out).exists() and not args.force:
        why = "measurements are not overwritten by accident"
        raise UserError(f"{args.out} already exists", why=why, fix="give another name, or add --force")
    report = examine(run_directory)
    if args.out:
        write_atomically(args.out, cluster_toml(report))
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        say(render(report))
        if args.out:
            say(f"wrote     {args.out}")
    return Exit.DONE


def examine(run_directory: str) -> dict[str, Any]:
    """Returns everything that was found and measured, as one JSON-ready document."""
    started = time.perf_counter()
    cores, memory, cpu = usable_cores(), usable_memory(), cpu_model()
    _progress("disk")
    disk = measure_disk(run_directory)
    _progress("matmuls and memory copies (loads torch)")
    devices = measure_devices(cpu, memory)
    _progress("link between two local processes (loads torch twice)")
    link: dict[str, Any]
    try:
        link = _link_report(measure_local_link())
    except LinkNotMeasured as problem:
        link = {"problem": str(problem)}
    return {
        "schema": 1,
        "shardwise": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu,
        "cores": cores,
        "memory_bytes": memory,
        "memory_limit_bytes": memory_limit(),
        "devices": [asdict(device) for device in devices],
        "gpu_problem": this_machine().gpu_problem,
        "disk": asdict(disk),
        "link": link,
        "libraries": [asdict(library) for library in core_libraries()],
        "optional": [asdict(library) for library in optional_libraries()],
        "listening_ports": [],
        "seconds": round(time.perf_counter() - started, 2),
    }


def _link_report(fit: LinkFit) -> dict[str, Any]:
    return {
        "between": "2 local processes, gloo over loopback",
        "alpha_s": fit.alpha_s,
        "beta_s_per_byte": fit.beta_s_per_byte,
        "bytes_per_s": fit.bytes_per_s,
        "largest_error": fit.largest_error,
        "points": [{"bytes": size, "seconds": seconds} for size, seconds in fit.points],
    }


def render(report: dict[str, Any]) -> str:
    limit = " (limit of its control group)" if report["memory_limit_bytes"] == report["memory_bytes"] else ""
    lines = [
        f"machine   {report['cores']} cores, {format_bytes(report['memory_bytes'])}{limit}, {report['cpu']}",
        f"system    {report['system']}, Python {report['python']}, shardwise {report['shardwise']}",
    ]
    gpus = 0
    for entry in report["devices"]:
        device = DeviceRates(**entry)
        gpus += device.device != "cpu"
        lines.append(_device_line(device))
    if not gpus:
        problem = report.get("gpu_problem")
        lines.append(f"gpu       {problem}; runs are on CPUs" if problem else "gpu       none that torch can use")
    lines.append(_disk_line(DiskRates(**report["disk"])))
    lines += _link_lines(report["link"])
    lines.append(_versions("libraries", report["libraries"]))
    for entry in report["optional"]:
        library = Library(**entry)
        state = library.version or f"not installed:  {library.install}"
        lines.append(f"optional  {library.name:<14} {library.purpose:<14} {state}")
    lines.append("ports     none open: nothing here listens, and local runs talk over the loopback interface")
    lines.append(f"took      {report['seconds']:.1f} s")
    return "\n".join(lines)


def _device_line(device: DeviceRates) -> str:
    said = [f"{label} {_flops(rate)}" for label, rate in device.flops_per_s.items()]
    if device.copy_bytes_per_s is not None:
        said.append(f"copy {device.copy_bytes_per_s / 1e9:.1f} GB/s")
    said += [f"{label} does not work here ({problem})" for label, problem in device.problems.items()]
    if device.capability is not None:
        capability = ".".join(map(str, device.capability))
        said.insert(0, f"{device.name}, {format_bytes(device.memory_bytes)}, capability {capability}")
    line = f"{device.device:<8}  {'; '.join(said)}"
    if device.device == "cpu" and "bf16" in device.problems:
        line += (
            '\n          so keep memory.precision = "fp32"; this processor or its virtual machine lacks what '
            "oneDNN uses"
        )
    return line


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.0f} GFLOP/s"


def _disk_line(disk: DiskRates) -> str:
    speed = (
        f"writes {disk.write_bytes_per_s / 1e6:.0f} MB/s" if disk.write_bytes_per_s else f"cannot write: {disk.problem}"
    )
    return f"disk      {disk.path}: {format_bytes(disk.free_bytes)} free, {speed}"


def _link_lines(link: dict[str, Any]) -> list[str]:
    if "problem" in link:
        return [f"link      not measured: {link['problem']}"]
    alpha, rate, error = link["alpha_s"] * 1e6, link["bytes_per_s"] / 1e9, link["largest_error"]
    first = f"link      {link['between']}: alpha {alpha:.0f} us, {rate:.2f} GB/s (fits within {error:.0%})"
    points = ", ".join(f"{format_bytes(point['bytes'])} {point['seconds'] * 1e3:.2f} ms" for point in link["points"])
    return [first, f"          all-reduce: {points}"]


def _versions(label: str, entries: list[dict[str, Any]]) -> str:
    said = (f"{entry['name']} {entry['version'] or 'missing: ' + entry['install']}" for entry in entries)
    return f"{label:<9} {', '.join(said)}"


def cluster_toml(report: dict[str, Any]) -> str:
    """Returns this machine as one node of a cluster file, measured where it was measured: what `plan` and `bench`
    read."""
    rates = [DeviceRates(**entry) for entry in report["devices"]]
    link = report["link"]
    fit = None
    if "alpha_s" in link:
        points = tuple((point["bytes"], point["seconds"]) for point in link["points"])
        fit = LinkFit(link["alpha_s"], link["beta_s_per_byte"], points)
    machine = {"cpu": report["cpu"], "cores": report["cores"], "memory": report["memory_bytes"]}
    machine["disk_write"] = float(report["disk"]["write_bytes_per_s"] or 0)
    comments = (
        "Measured by `shardwise doctor`; `shardwise bench layers --out` adds what layers reach. Bytes, seconds, "
        "FLOP/s.",
    )
    return write_toml(this_cluster(this_machine(), rates, fit), comments, machine)


def _progress(what: str) -> None:
    """Prints a line to stderr, so that `--json` stays one document."""
    say_error(f"measuring {what} ...")
