"""The manifest of `shardwise launch k8s`, acted out: its command, arguments and environment run on two nodes, which
find each other by the name of the Service, as a user of its own on a root file system that cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from nodes import Command, Node, finish, until
from training import check_same_losses, plan_file, run_of, steps_of

USER = 1000
LOCKED = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
"""What `setpriv` is told for a pod's securityContext."""


def documents(text: str) -> dict[str, dict[str, Any]]:
    """Returns the objects of a manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def be_machine(node: Node, objects: dict[str, dict[str, Any]], hosts: str) -> None:
    """Mounts on a node what the kubelet mounts into a pod: the ConfigMap, the Secret, and an /etc of its own."""
    pod = objects["Job"]["spec"]["template"]["spec"]
    at = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    secret_at = pod["initContainers"][0]["volumeMounts"][0]["mountPath"]
    own = "-o lowerdir=/etc,upperdir=/run/etc/changed,workdir=/run/etc/work"
    lines = [
        f"mkdir -p /run/etc/changed /run/etc/work {secret_at} {at['own-secret']}",
        f"mount -t overlay overlay {own} /etc",
        f"mkdir -p {at['plan']}",
        f"cp files/* {at['plan']}/",
        f"cp secret {secret_at}/secret",
        f"printf '{hosts}' > /etc/hosts",
        ": > /etc/resolv.conf",
        f"chown -R {USER} {at['own-secret']} {at['claim-0']}",
        "mount -o remount,bind,ro /",
    ]
    node.run("sh", "-ec", "\n".join(lines))


def start_pod(node: Node, index: int, objects: dict[str, dict[str, Any]]) -> Command:
    """Starts a pod of the job: the container that comes first, then the one that stays."""
    pod = objects["Job"]["spec"]["template"]["spec"]
    [first], [container] = pod["initContainers"], pod["containers"]
    as_user = ["setpriv", *LOCKED]
    node.run(*as_user, *first["command"])
    variables = {one["name"]: one["value"] for one in container["env"]}
    variables |= {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    return node.start(*as_user, *container["command"], *container["args"], **variables)


def action(code: int, objects: dict[str, dict[str, Any]]) -> str:
    """Returns what the Job's podFailurePolicy does about an exit code: the first rule that matches."""
    for rule in objects["Job"]["spec"]["podFailurePolicy"]["rules"]:
        if (codes := rule.get("onExitCodes")) and (code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
    return "Count"


def test_the_pods_of_a_job_train_and_survive_the_death_of_one(nodes, one_process, tmp_path: Path):
    hosts = {"tiny-0.tiny": "10.77.0.1"}
    a, b = nodes(2, own_name=None, hosts=hosts)
    plan_file(a.files / "tiny.toml")
    claim = a.cwd / "runs"
    (a.files / "runs").mkdir()
    text = a.run("shardwise", "launch", "k8s", "tiny.toml", "--image", "shardwise:1", "--pvc", f"claim:{claim}")
    objects = documents(text)
    (a.files / "files").mkdir()
    for name, content in objects["ConfigMap"]["data"].items():
        (a.files / "files" / name).write_text(content)
    (a.files / "secret").write_text("5a" * 16)
    assert objects["Service"]["metadata"]["name"] == "tiny" and "5a5a" not in text
    for node in (a, b):
        be_machine(node, objects, "127.0.0.1 localhost\\n10.77.0.1 tiny-0.tiny\\n")
        written = node.start("sh", "-c", "echo > /usr/here")
        assert finish([written]) != [0] and "Read-only" in written.output

    pods = [start_pod(node, index, objects) for index, node in enumerate((a, b))]
    until(lambda: steps_of(a) > 10, "step 10", pods, 90)
    assert f"Uid:\t{USER}" in Path("/proc", str(pods[0].pid), "status").read_text()
    b.kill_all()
    codes = finish(pods, 90)
    assert all(action(abs(code), objects) != "FailJob" for code in codes), codes
    done = steps_of(a)

    pods = [start_pod(node, index, objects) for index, node in enumerate((a, b))]
    assert finish(pods, 120) == [0, 0]
    check_same_losses(a, one_process)
    assert done > 10 and run_of(a).stat().st_uid == USER
