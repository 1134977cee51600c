"""Manifests for Kubernetes, read back: what they ask for, and that their schemas accept them.

Schemas of Kubernetes itself are those of `kubernetes-validate`, where it is installed. Those of JobSet and Kubeflow are
the tables below, of the fields that are written here, as their releases of 2026 define them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_files import plan_file

from shardwise.errors import UserError
from shardwise.launch.place import NodePlace, own_place
from shardwise.launch.planned_job import Wanted, launch_spec
from shardwise.launch.schedulers.kubernetes_jobs import KINDS
from shardwise.launch.schedulers.kubernetes_manifest import manifest, secrets_of
from shardwise.launch.schedulers.kubernetes_pod import PodOptions
from shardwise.launch.schedulers.yaml_text import Noted, document
from shardwise.launch.spec import LaunchSpec

pytestmark = pytest.mark.needs("yaml")

NAME = "app.kubernetes.io/instance"
OPTIONS = PodOptions(image="registry/shardwise:1", namespace="ml", claims=(("runs", "/runs"), ("text", "/data")))
VARIANTS = {kind: replace(OPTIONS, kind=kind) for kind in KINDS} | {
    "queued": replace(OPTIONS, queue="team", node_selector=(("gpu", "h100"),), user=2000),
    "queued-jobset": replace(OPTIONS, kind="jobset", queue="team"),
}


@pytest.fixture
def spec(workdir: Path) -> LaunchSpec:
    words = ["data.source=/data/it's here: #1", "run.loggers=jsonl,wandb"]
    return launch_spec([str(plan_file(workdir))], words, Wanted())


def documents(text: str) -> dict[str, dict[str, Any]]:
    """Every document by its kind."""
    import yaml

    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def job_specs(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The specs of Jobs inside of whatever starts them."""
    if "Job" in found:
        return [found["Job"]["spec"]]
    if "JobSet" in found:
        return [one["template"]["spec"] for one in found["JobSet"]["spec"]["replicatedJobs"]]
    if "TrainingRuntime" in found:
        return [
            one["template"]["spec"] for one in found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        ]
    return []


def pods(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    if "PyTorchJob" in found:
        return [one["template"] for one in found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()]
    return [one["template"] for one in job_specs(found)]


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


def environment_of(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container_of(pod)["env"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_runs_the_one_line_with_the_config_that_is_mounted(spec, variant, workdir):
    found = documents(manifest(spec, VARIANTS[variant], "made"))
    assert found["ConfigMap"]["data"] == {"job.toml": (workdir / "job.toml").read_text()}
    for pod in pods(found):
        container = container_of(pod)
        assert container["command"] == ["shardwise"]
        assert container["args"] == [
            "train", "/etc/shardwise/job.toml", "run.dir=/runs", "run.name=job", "data.source=/data/it's here: #1",
            "run.loggers=jsonl,wandb", "--resume", "auto",
        ]  # fmt: skip
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert {mounts["plan"], mounts["claim-0"], mounts["claim-1"]} == {"/etc/shardwise", "/runs", "/data"}
        assert mounts.keys() <= {one["name"] for one in pod["spec"]["volumes"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_find_their_places(spec, variant):
    """What Kubernetes or the operator sets beside the manifest's variables leads a pod to its number and the head."""
    found = documents(manifest(spec, VARIANTS[variant], "made"))
    for number, pod in enumerate(pods(found)):
        environ = environment_of(pod) | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        if "PyTorchJob" in found:
            environ |= {"RANK": str(number), "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
        else:
            environ |= {"JOB_COMPLETION_INDEX": str(number)}
        place = own_place(environ)
        assert isinstance(place, NodePlace)
        assert (place.index, place.count, place.port) == (number, 4, 29_400)
        assert place.heads == (expected_head(found),)
        assert place.secret_file == "/run/shardwise/secret"


def expected_head(found: dict[str, dict[str, Any]]) -> str:
    """The name of pod 0: its host name and its subdomain, as each kind makes them."""
    if "Job" in found:
        name = found["Job"]["metadata"]["name"]
        service = found["Service"]
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"].items() <= pods(found)[0]["metadata"]["labels"].items()
        assert pods(found)[0]["spec"]["subdomain"] == service["metadata"]["name"]
        return f"{name}-0.{service['metadata']['name']}"
    if "PyTorchJob" in found:
        return f"{found['PyTorchJob']['metadata']['name']}-master-0"
    job = found.get("JobSet") or found["TrainJob"]
    inner = found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    return f"{job['metadata']['name']}-{inner['replicatedJobs'][0]['name']}-0-0.{inner['network']['subdomain']}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_are_locked_down(spec, variant):
    found = documents(manifest(spec, VARIANTS[variant], "made"))
    for pod in pods(found):
        inner = pod["spec"]
        assert inner["securityContext"]["runAsNonRoot"] is True and inner["securityContext"]["runAsUser"] > 0
        assert inner["automountServiceAccountToken"] is False
        assert inner["terminationGracePeriodSeconds"] == spec.grace_s
        for container in (*inner["containers"], *inner["initContainers"]):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
        shm = next(one for one in inner["volumes"] if one["name"] == "shm")
        assert shm["emptyDir"]["medium"] == "Memory"
        (term,) = inner["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_secret_is_in_no_manifest(spec, variant, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "f" * 40)
    text = manifest(spec, VARIANTS[variant], "made")
    assert "Secret" not in documents(text) and "f" * 40 not in text
    assert not re.search(r"[0-9a-f]{32}", text)


def test_submit_makes_the_secrets_that_pods_name(spec):
    made = secrets_of(spec, OPTIONS, "0" * 32, {"WANDB_API_KEY": "key", "HOME": "/home/me"})
    data = {one["metadata"]["name"]: one["stringData"] for one in made}
    (pod,) = pods(documents(manifest(spec, OPTIONS, "made")))
    mounted = next(one["secret"]["secretName"] for one in pod["spec"]["volumes"] if one["name"] == "secret")
    assert data[mounted] == {"secret": "0" * 32}
    named = next(one["valueFrom"]["secretKeyRef"] for one in container_of(pod)["env"] if one["name"] == "WANDB_API_KEY")
    assert data[named["name"]] == {"WANDB_API_KEY": "key"} == {named["key"]: "key"}


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob"])
def test_only_75_and_5_start_again(spec, kind):
    for job in job_specs(documents(manifest(spec, replace(OPTIONS, kind=kind), "made"))):
        assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
        actions = {
            code: rule["action"]
            for rule in reversed(job["podFailurePolicy"]["rules"])
            for code in rule.get("onExitCodes", {}).get("values", [])
        }
        assert {code for code, action in actions.items() if action != "FailJob"} == {5, 75}
        assert {2, 3, 4, 6} <= actions.keys() and actions[5] == "Count" and actions[75] == "Ignore"
        assert job["backoffLimit"] >= spec.nodes and job["template"]["spec"]["restartPolicy"] == "Never"
        names = {
            rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
        }
        assert names == {container_of(job["template"])["name"]}


def test_only_the_job_s_own_pods_may_connect(spec):
    outside = documents(manifest(spec, OPTIONS, "made"))["NetworkPolicy"]["spec"]
    assert outside["ingress"] == [{"from": [{"podSelector": {"matchLabels": {NAME: "job"}}}]}]
    blocks = [to["ipBlock"] for rule in outside["egress"] for to in rule.get("to", []) if "ipBlock" in to]
    assert len(blocks) == 2, "W&B is outside of the cluster"
    closed = documents(manifest(replace(spec, reads_network=False), OPTIONS, "made"))["NetworkPolicy"]["spec"]
    assert not [to for rule in closed["egress"] for to in rule.get("to", []) if "ipBlock" in to]


def test_one_node_has_no_workers(spec):
    one = replace(spec, nodes=1)
    replicas = documents(manifest(one, VARIANTS["pytorchjob"], "made"))["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master"}
    assert pods(documents(manifest(one, OPTIONS, "made")))


def test_several_config_files_are_refused(spec):
    with pytest.raises(UserError, match="several jobs"):
        manifest(replace(spec, parts=spec.parts * 2), OPTIONS, "made")


# Schemas -------------------------------------------------------------------------------------------------------------

ANY: dict[str, Any] = {}
JOB = {"completions": int, "parallelism": int, "completionMode": str, "backoffLimit": int, "suspend": bool}
JOB |= {"podFailurePolicy": ANY, "template": ANY}
NETWORK = {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str}
RULE = {"action": str, "name": str, "onJobFailureReasons": [str], "targetReplicatedJobs": [str]}
REPLICATED = {"name": str, "replicas": int, "groupName": str, "template": {"metadata": ANY, "spec": JOB}}
JOB_SET = {
    "network": NETWORK,
    "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": [RULE]},
    "replicatedJobs": [REPLICATED],
    "suspend": bool,
}
REPLICAS = {"replicas": int, "restartPolicy": str, "template": ANY}
OTHERS = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", JOB_SET),
    "TrainingRuntime": (
        "trainer.kubeflow.org/v1alpha1",
        {"mlPolicy": {"numNodes": int, "torch": ANY}, "template": {"metadata": ANY, "spec": JOB_SET}},
    ),
    "TrainJob": (
        "trainer.kubeflow.org/v1alpha1",
        {
            "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
            "trainer": {"numNodes": int, "image": str, "command": [str], "args": [str]},
            "suspend": bool,
        },
    ),
    "PyTorchJob": (
        "kubeflow.org/v1",
        {
            "nprocPerNode": str,
            "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
            "runPolicy": {"backoffLimit": int, "cleanPodPolicy": str, "suspend": bool},
        },
    ),
}


def strange(value: Any, schema: Any, path: str) -> list[str]:
    """Where a value is not as its schema has it."""
    if schema is ANY:
        return []
    if isinstance(schema, list):
        return [bad for at, one in enumerate(value) for bad in strange(one, schema[0], f"{path}[{at}]")]
    if isinstance(schema, dict):
        unknown = [f"{path}.{key}" for key in value if key not in schema]
        known = [key for key in value if key in schema]
        return unknown + [bad for key in known for bad in strange(value[key], schema[key], f"{path}.{key}")]
    return [] if type(value) is schema else [f"{path} is {value!r}"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_operators_know_every_field(spec, variant):
    for kind, one in documents(manifest(spec, VARIANTS[variant], "made")).items():
        if kind in OTHERS:
            version, schema = OTHERS[kind]
            assert one["apiVersion"] == version
            assert strange(one["spec"], schema, kind) == []


def test_a_strange_field_is_found():
    assert strange({"network": {"subDomain": "a", "subdomain": 1}}, JOB_SET, "x") == [
        "x.network.subDomain",
        "x.network.subdomain is 1",
    ]


@pytest.mark.needs("kubernetes_validate")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_schemas_of_kubernetes_accept_every_manifest(spec, variant):
    import kubernetes_validate

    found = documents(manifest(spec, VARIANTS[variant], "made"))
    inner = [(job, "Job") for job in job_specs(found)]
    inner += [({"template": pod | {"spec": pod["spec"] | {"restartPolicy": "Never"}}}, "Job") for pod in pods(found)]
    wrapped = [{"apiVersion": "batch/v1", "kind": kind, "metadata": {"name": "x"}, "spec": one} for one, kind in inner]
    checked = [one for kind, one in found.items() if kind not in OTHERS]
    for one in (*checked, *wrapped, *secrets_of(spec, VARIANTS[variant], "0" * 32, {})):
        without_nothing = {**one, "metadata": {k: v for k, v in one["metadata"].items() if v is not None}}
        kubernetes_validate.validate(without_nothing, "1.32", strict=True)


# The writer of YAML --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["", "yes", "No", "null", "1", "1.5", "0x10", "1e3", "a: b", "# no", "- x", "it's", 'a "word"', "é", "a\tb", "~",
     "a\nb\n", "a\nb", "  two\n spaces\n", "*star", "&and", "{x}", "12:30:00", "2024-01-01", "=", "<<", True, 3,
     "a\n\nb\n", "a\n\n", "\n", " \n", "a\u2028b\n", "a\x85b"],
)  # fmt: skip
def test_values_are_read_back_as_they_were(value):
    import yaml

    tree = {"key": [value, {"inner": value}], "other": {"deep": value}}
    assert yaml.safe_load(document(tree)) == tree


def test_what_has_no_value_is_left_out():
    assert document({"a": None, "b": 1}) == "b: 1\n"


def test_notes_stand_above_what_they_are_about():
    text = document({"a": Noted(1, "one"), "b": [Noted({"c": Noted(2, "two"), "d": 3}, "both")]})
    assert text.splitlines() == ["# one", "a: 1", "b:", "  # both", "    # two", "  - c: 2", "    d: 3"]
