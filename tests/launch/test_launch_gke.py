"""launch/gke_jobset.yaml against the published schemas of Kubernetes and JobSet, and against itself."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from tests.launch.fakes import LAUNCH

TEXT = (LAUNCH / "gke_jobset.yaml").read_text()
JOBSET: dict[str, Any] = yaml.safe_load(TEXT)
JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]
CONTAINER = POD["containers"][0]


def test_what_to_edit_is_in_one_block() -> None:
    head, block, rest = re.split(r"# -+ (?:Edit from here|to here\.)\n", TEXT)
    defined, used = (re.findall(rf"(?:: |- )\{sign}(\w+)", text) for sign, text in (("&", block), ("*", rest)))
    assert set(defined) == set(used)
    assert not re.findall(r"&\w+", head.split("apiVersion")[1] + rest)


def test_values_arrive_where_they_are_used() -> None:
    edits = {key.removeprefix("yatt-jax/"): value for key, value in JOBSET["metadata"]["annotations"].items()}
    assert JOB["parallelism"] == JOB["completions"] == 64
    assert POD["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": edits["accelerator"],
        "cloud.google.com/gke-tpu-topology": edits["topology"],
    }
    chips = {"google.com/tpu": edits["chips-of-a-machine"]}
    assert CONTAINER["resources"] == {"requests": chips, "limits": chips}
    assert CONTAINER["image"] == edits["image"]
    assert CONTAINER["args"] == [edits["config"], edits["workdir"]]
    assert POD["volumes"][0]["persistentVolumeClaim"]["claimName"] == edits["claim"]
    rows, columns = map(int, edits["topology"].split("x"))
    assert rows * columns == int(edits["chips-of-a-machine"]) * JOB["parallelism"]


def test_table_of_slices_adds_up_to_256_chips() -> None:
    table = re.findall(r"^# (tpu-\S+) +(\S+) +(\d+) +(\d+)$", TEXT, re.MULTILINE)
    assert len(table) == 3
    for accelerator, topology, machines, chips in table:
        product = 1
        for size in topology.split("x"):
            product *= int(size)
        assert product == 256 == int(machines) * int(chips), accelerator


def test_one_failed_process_restarts_all_and_bad_input_ends_the_run() -> None:
    assert JOB["backoffLimit"] == 0
    assert POD["restartPolicy"] == "Never"
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": CONTAINER["name"], "operator": "In", "values": [2]}
    policy = JOBSET["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    assert [(r["action"], r["onJobFailureReasons"]) for r in policy["rules"]] == [("FailJobSet", ["PodFailurePolicy"])]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", policy["rules"][0]["name"])


def test_job_follows_the_schema_of_kubernetes() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}, "spec": JOB}
    schemas.validate(job, schemas.latest_version(), strict=True)
    wrong = copy.deepcopy(job)
    wrong["spec"]["template"]["spec"]["containers"][0]["port"] = wrong["spec"]["template"]["spec"]["containers"][0].pop(
        "ports"
    )
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, schemas.latest_version(), strict=True)


def test_jobset_follows_its_published_models() -> None:
    """The models of JobSet, and of Kubernetes' Job and Pod within it, as its Python package has them."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    assert unknown(JOBSET, models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(JOBSET)).to_dict()) == []
    wrong = copy.deepcopy(JOBSET)
    wrong["spec"]["failurePolicy"]["maxRestart"] = wrong["spec"]["failurePolicy"].pop("maxRestarts")
    container = wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["port"] = container.pop("ports")
    found = unknown(wrong, models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(wrong)).to_dict())
    assert [path.rpartition("/")[2] for path in found] == ["maxRestart", "port"]


def unknown(given: Any, read: Any, path: str = "") -> list[str]:
    """Paths of what was given and is not as it was after being read; defaults may have been added."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [bad for key, value in given.items() for bad in unknown(value, read.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [bad for i, pair in enumerate(zip(given, read, strict=True)) for bad in unknown(*pair, f"{path}/{i}")]
    return [] if given == read else [path]
