"""`shardwise launch` writes, submits and follows jobs of several nodes; `shardwise launch explain` reads a script of
somebody's and names its mistakes.

Nothing is queued or started unless it is asked for: without --submit the script is printed. The scripts themselves are
written in launch/schedulers/.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli import launch_explain
from shardwise.errors import Exit, UserError
from shardwise.terminal import say, say_error

if TYPE_CHECKING:
    from shardwise.launch.planned_job import Wanted
    from shardwise.launch.schedulers.kubernetes_pod import PodOptions
    from shardwise.launch.spec import LaunchSpec

HELP = "jobs of several nodes: write the script, submit it, follow it; `explain` names the mistakes of a script"
CONFIG = True
PREPARED = "a line of shell before the job starts, such as 'module load cuda'; repeatable"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="scheduler", required=True, metavar="slurm|k8s|ray|ssh|explain")
    slurm = verbs.add_parser("slurm", help="a batch script for sbatch")
    _add_job(slurm, "PLAN", several=True)
    slurm.add_argument("--partition", help="the queue; checked against `sinfo` where there is one")
    slurm.add_argument("--account", help="who pays")
    slurm.add_argument("--qos", help="quality of service")
    slurm.add_argument("--constraint", help="features that nodes must have")
    slurm.add_argument("--reservation", help="nodes that are kept for you")
    slurm.add_argument("--switches", metavar="N[@TIME]", help="leaf switches to span at most")
    slurm.add_argument("--nodelist", metavar="NODES", help="nodes to use")
    slurm.add_argument("--exclude", metavar="NODES", help="nodes to leave out")
    slurm.add_argument("--exclusive", action="store_true", help="nodes for this job alone, with all their memory")
    slurm.add_argument(
        "--gres", nargs="?", const="gpu", metavar="NAME", help="ask for --gres=NAME:N in place of --gpus-per-node"
    )
    slurm.add_argument("--no-kill", action="store_true", help="a lost node does not end the job on the others")
    slurm.add_argument("--container", metavar="IMAGE", help="an image that the job runs in")
    slurm.add_argument("--runtime", choices=("pyxis", "apptainer"), default="pyxis", help="who runs the image")
    slurm.add_argument("--mount", action="append", default=[], metavar="FROM:TO", help="seen in the container, too")
    slurm.add_argument("--prepare", action="append", default=[], metavar="LINE", help=PREPARED)
    slurm.add_argument("--at-once", type=int, metavar="N", help="parts of a job array (several PLANs) at a time")
    k8s = verbs.add_parser("k8s", help="a manifest for kubectl")
    _add_job(k8s, "PLAN", several=False)
    k8s.add_argument("--image", help="what pods run: an image with shardwise in it")
    k8s.add_argument(
        "--kind",
        choices=("indexed-job", "jobset", "trainjob", "pytorchjob"),
        default="indexed-job",
        help="indexed-job needs no operator; the others are JobSet's and Kubeflow's",
    )
    k8s.add_argument("--namespace", help="where the job is")
    k8s.add_argument(
        "--pvc", action="append", default=[], metavar="CLAIM[:PATH]", help="a volume; runs go to the first; repeatable"
    )
    k8s.add_argument("--queue", help="the queue of Kueue that starts the job")
    k8s.add_argument("--user", type=int, default=1000, metavar="UID", help="whom pods run as (default: 1000)")
    k8s.add_argument("--node-selector", action="append", default=[], metavar="LABEL:VALUE", help="machines to use")
    ray = verbs.add_parser("ray", help="a driver for `ray job submit`")
    _add_job(ray, "PLAN", several=False)
    ray.add_argument("--address", metavar="URL", help="of the Ray cluster's dashboard; default: Ray's own")
    ssh = verbs.add_parser("ssh", help="one process per host over ssh; --submit starts it")
    ssh.add_argument("hosts", metavar="HOSTS", help="h1,h2 or me@h1,me@h2: the nodes in their order, the head first")
    _add_job(ssh, "PLAN", several=False)
    ssh.add_argument("--head", metavar="ADDRESS", help="of the first host for the others; default: as ssh finds it")
    ssh.add_argument("--ssh", default="ssh", metavar="COMMAND", help="such as 'ssh -F config -p 2222'")
    ssh.add_argument("--program", metavar="COMMAND", help="shardwise on the hosts; default: this one, by its path")
    ssh.add_argument("--folder", metavar="DIR", help="where the hosts work; default: this directory")
    ssh.add_argument("--copy", action="store_true", help="copy the config file; nothing is copied otherwise")
    ssh.add_argument("--detach", action="store_true", help="the job goes on when this terminal has gone")
    launch_explain.add_arguments(verbs.add_parser("explain", help="name the mistakes of a script"))


def _add_job(parser: argparse.ArgumentParser, what: str, several: bool) -> None:
    """Adds the options that all schedulers have."""
    parser.add_argument("plan", nargs="+" if several else 1, metavar=what, help="a config file, as `plan` writes them")
    parser.add_argument(
        "--cluster", metavar="CLUSTER", help="4x8xh100 or a file; default: what the file was planned for"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="refuse unless the plan takes so many")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="refuse unless the plan has so many")
    parser.add_argument("--cpus-per-node", type=int, metavar="N", help="cores of a node")
    parser.add_argument(
        "--memory", metavar="BYTES", help="CPU memory of a node, such as 512GiB; default: the plan's need"
    )
    parser.add_argument("--time", metavar="TIME", help="how long the job may run, such as 12h; default: as predicted")
    parser.add_argument("--grace", metavar="TIME", help="notice before the end, to save; default: as predicted")
    parser.add_argument("--name", help="name of the job and the run; default: the file's")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="a variable that ranks see, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there; nothing is printed")
    parser.add_argument("--submit", action="store_true", help="hand it to the scheduler")
    parser.add_argument("--preflight", action="store_true", help="check the nodes against each other, train nothing")
    parser.add_argument("--follow", action="store_true", help="show the logs of all ranks until the job ends")


def run(args: argparse.Namespace) -> int:
    return {"slurm": _slurm, "k8s": _k8s, "ray": _ray, "ssh": _ssh, "explain": launch_explain.run}[args.scheduler](args)


def _wanted(args: argparse.Namespace) -> Wanted:
    from shardwise.config.units import parse_bytes
    from shardwise.config.values import read_amount
    from shardwise.launch.planned_job import Wanted

    for option in ("nodes", "gpus_per_node", "cpus_per_node"):
        if (count := getattr(args, option)) is not None and count < 1:
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"{name} {count} asks for nothing", why="a job needs one at least", fix=f"{name} 1")
    for name in args.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(
                f"--env {name.partition('=')[0]} is not the name of a variable",
                why="only names are written: values stay in your shell, out of scripts",
                fix=f"export it, then --env {re.sub(r'[^A-Za-z0-9_]', '', name.partition('=')[0]) or 'NAME'}",
            )
    return Wanted(
        cluster=args.cluster,
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        cpus_per_node=args.cpus_per_node,
        memory_bytes=read_amount("--memory", args.memory, parse_bytes, "512GiB") if args.memory else None,
        time=args.time,
        grace=args.grace,
        name=args.name,
        env=tuple(args.env),
    )


def _spec(args: argparse.Namespace) -> LaunchSpec:
    from shardwise.launch.planned_job import checking, launch_spec

    spec = launch_spec(args.plan, args.overrides, _wanted(args))
    return checking(spec) if args.preflight else spec


def _origin(args: argparse.Namespace) -> str:
    """Returns the command line that makes this script again, for its second line."""
    from shardwise.launch.spec import in_shell

    return f"shardwise launch {args.scheduler} {in_shell((*args.plan, *args.overrides))}"


def _slurm(args: argparse.Namespace) -> int:
    from shardwise.launch.schedulers.slurm_partition import fitted
    from shardwise.launch.schedulers.slurm_script import PASSED_ON, SlurmOptions, script
    from shardwise.launch.submit import submit

    options = SlurmOptions(
        passed_on=tuple((name, value) for name in PASSED_ON if (value := getattr(args, name))),
        exclusive=args.exclusive,
        gres=args.gres,
        no_kill=args.no_kill,
        container=args.container,
        runtime=args.runtime,
        mounts=tuple(args.mount),
        prepare=tuple(args.prepare),
        at_once=args.at_once,
    )
    spec = fitted(_spec(args), args.partition, args.time is not None, os.environ, args.submit)
    text = script(spec, options, _origin(args))
    if not args.submit:
        return _show(args, text, "sbatch")
    _keep(args, text)
    Path(spec.run_dir).mkdir(parents=True, exist_ok=True)
    job = submit(["sbatch", "--parsable"], text).partition(";")[0]
    say(f"queued   job {job}, {spec.nodes} node{'s' if spec.nodes > 1 else ''}, run {spec.run_of(spec.parts[0])}")

    def is_queued() -> bool:
        asked = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True)
        return asked.returncode == 0 and bool(asked.stdout.strip())

    return _follow(args, spec, is_queued)


def _k8s(args: argparse.Namespace) -> int:
    import json
    import secrets

    from shardwise.launch.schedulers.kubernetes_manifest import in_pods, manifest, secrets_of
    from shardwise.launch.submit import command_of, submit

    options, spec = _pods(args), _spec(args)
    text = manifest(spec, options, _origin(args))
    if not args.submit:
        return _show(args, text, "kubectl apply -f")
    _keep(args, text)
    kubectl = ["kubectl", *(["--namespace", options.namespace] if options.namespace else [])]
    for one in secrets_of(in_pods(spec, options), options, secrets.token_hex(16), dict(os.environ)):
        submit([*kubectl, "apply", "-f", "-"], json.dumps(one))
    print(submit([*kubectl, "apply", "-f", "-"], text))
    logs = ["logs", "--follow", "--prefix", f"--selector=app.kubernetes.io/instance={spec.name}"]
    logs += [f"--max-log-requests={spec.nodes}", "--pod-running-timeout=24h"]
    if not args.follow:
        say(f"follow   {' '.join([*kubectl, *logs])}")
        return Exit.DONE
    return subprocess.run([command_of("kubectl"), *kubectl[1:], *logs]).returncode


def _pods(args: argparse.Namespace) -> PodOptions:
    from shardwise.launch.schedulers.kubernetes_pod import PodOptions

    if not args.image:
        raise UserError(
            "no image is named", why="pods start from an image with shardwise in it", fix="--image REGISTRY/NAME:TAG"
        )
    claims = [claim.partition(":") for claim in args.pvc]
    selectors = [word.partition(":") for word in args.node_selector]
    wrong = [f"--pvc {''.join(parts)}" for parts in claims if not parts[0] or (parts[1] and parts[2][:1] != "/")]
    wrong += [f"--node-selector {''.join(parts)}" for parts in selectors if not parts[0] or not parts[2]]
    if len(claims) > 1:
        wrong += [f"--pvc {parts[0]} without a path" for parts in claims[1:] if not parts[2]]
    if wrong:
        raise UserError(
            f"`{wrong[0]}` cannot be read", why="a claim and a path, a label and a value", fix="--pvc my-claim:/data"
        )
    return PodOptions(
        image=args.image,
        kind=args.kind,
        namespace=args.namespace,
        claims=tuple((name, path or "/runs") for name, _, path in claims) or PodOptions.claims,
        queue=args.queue,
        user=args.user,
        node_selector=tuple((name, value) for name, _, value in selectors),
    )


def _ray(args: argparse.Namespace) -> int:
    from shardwise.launch.schedulers.ray_script import script
    from shardwise.launch.submit import command_of, write_script

    spec = _spec(args)
    text = script(spec, _origin(args))
    words = ["ray", "job", "submit", *(["--address", args.address] if args.address else [])]
    words += [] if args.follow else ["--no-wait"]
    if not args.submit:
        return _show(args, text, f"{' '.join(words)} -- python")
    command = command_of("ray")
    file = args.out or Path(spec.run_dir) / ".launch" / f"{spec.name}-ray.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_script(file, text, is_program=False)
    return subprocess.run([command, *words[1:], "--", "python", str(file.resolve())]).returncode


def _ssh(args: argparse.Namespace) -> int:
    import random
    import secrets
    import shlex

    from shardwise.launch.by_ssh import Hosts, SshOptions, check_hosts, given, head_address, script
    from shardwise.launch.place import LOWEST_PORT, NUM_PORTS
    from shardwise.launch.submit import command_of

    spec = _spec(args)
    options = SshOptions(
        hosts=tuple(host.strip() for host in args.hosts.split(",") if host.strip()),
        ssh=tuple(shlex.split(args.ssh)),
        program=tuple(shlex.split(args.program)) if args.program else (sys.executable, "-m", "shardwise"),
        folder=args.folder or os.getcwd(),
        head=args.head,
        port=random.randrange(LOWEST_PORT, LOWEST_PORT + NUM_PORTS),
        copy=args.copy,
        detach=args.detach,
    )
    check_hosts(spec, options)
    text = script(spec, options)
    if not args.submit:
        return _show(args, f"# what each of {', '.join(options.hosts)} runs\n{text}", "--submit starts it; by hand: sh")
    _keep(args, text)
    command_of(options.ssh[0])
    head, secret = head_address(options), secrets.token_hex(16)
    inputs = [given(spec, options, number, head, secret, os.environ) for number in range(spec.nodes)]
    hosts = Hosts(options, text, inputs, say)
    try:
        if options.detach:
            hosts.let_go()
        return hosts.wait()
    except BaseException:
        hosts.let_go()
        try:
            hosts.wait()
        except BaseException:
            hosts.kill()
        raise


def _keep(args: argparse.Namespace, text: str) -> None:
    from shardwise.launch.submit import write_script

    if args.out is not None:
        write_script(args.out, text, is_program=text.startswith("#!"))


def _show(args: argparse.Namespace, text: str, command: str) -> int:
    """Prints a script, or writes it where --out says."""
    if args.follow:
        raise UserError("--follow follows what --submit has queued", why="nothing is queued", fix="--submit --follow")
    if args.out is None:
        sys.stdout.write(text)
        return Exit.DONE
    _keep(args, text)
    say(f"wrote    {args.out}")
    say(f"next     {command} {args.out}")
    return Exit.DONE


def _follow(args: argparse.Namespace, spec: LaunchSpec, is_queued: object) -> int:
    """Shows the logs of the first part of a job until it ends; Ctrl-C leaves the job as it is."""
    from collections.abc import Callable
    from typing import cast

    from shardwise.launch.follow import follow
    from shardwise.run.rundir import RunDir

    run = RunDir(spec.run_of(spec.parts[0]))
    if not args.follow:
        say(f"follow   shardwise watch {run.path}")
        return Exit.DONE
    state = follow(run, cast(Callable[[], bool], is_queued), say)
    say_error(f"ended    {state}: {run.path}")
    return Exit.DONE if state == "finished" else Exit.STOPPED if state == "stopped" else Exit.FOUND_WRONG
