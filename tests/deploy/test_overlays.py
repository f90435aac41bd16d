"""Every overlay, plain and on a bucket, keeps every rule; and every rule can fail."""

import copy
import json
from collections.abc import Callable, Mapping

import pytest

from tests.deploy import rules
from tests.deploy.manifests import CHIPS, DEPLOY, OVERLAYS, ROOT, Doc, Manifests, render
from tests.server.fakes import in_loop, say, serving
from tpu_vl import cli

PLAIN, BUCKET = (), ("gcsfuse",)
COMPONENT = "app.kubernetes.io/component"


def test_the_overlays_are_the_promised_ones() -> None:
    assert OVERLAYS == ("tpu7x-2x2x1", "v6e-1x1", "v6e-2x2", "v6e-2x4")


@pytest.mark.parametrize("components", [PLAIN, BUCKET], ids=["filestore", "bucket"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_every_rule(overlay: str, components: tuple[str, ...]) -> None:
    m = Manifests(render(overlay, *components))
    wrong = {rule.__name__: rule(m) for rule in rules.RULES}
    assert {name: found for name, found in wrong.items() if found} == {}


def _server(m: Manifests) -> Doc:
    return m.server.container("server")


def _settings(m: Manifests) -> dict[str, str]:
    (found,) = (d for d in m.all("ConfigMap") if "RELEASE" in d["data"])
    return found["data"]


def _own_settings(m: Manifests) -> None:
    """Gives the Job sizes of its own."""
    m.job.container("precompile")["env"].append({"name": "TPU_VL_MAX_NUM_SEQS", "value": "64"})


def _job_on_chips(m: Manifests) -> None:
    for container in m.job.pod["containers"]:
        container["resources"]["limits"][CHIPS] = "4"
        container["resources"]["requests"][CHIPS] = "4"


def _set(at: Callable[[Manifests], Doc], **fields: object) -> Callable[[Manifests], object]:
    return lambda m: at(m).update(fields)


# One fault each, that the rule beside it must find.
FAULTS: list[tuple[rules.Rule, Callable[[Manifests], object]]] = [
    (rules.slice_fits_target, lambda m: _settings(m).update(TPU_VL_TARGET="v6e:2x4")),
    (rules.slice_fits_target, lambda m: _settings(m).update(TPU_VL_TENSOR_PARALLEL_SIZE="2")),
    (rules.slice_fits_target, lambda m: _server(m)["resources"]["limits"].update({CHIPS: "1"})),
    (rules.slice_fits_target, lambda m: _server(m)["resources"]["requests"].update(cpu="176")),
    (rules.slice_fits_target, lambda m: m.server.pod["tolerations"].clear()),
    (rules.slice_fits_target, lambda m: m.server.pod["nodeSelector"].popitem()),
    (rules.one_slice, _set(lambda m: m.server.doc["spec"], replicas=2)),
    (rules.one_slice, lambda m: m.one("HorizontalPodAutoscaler")["spec"].update(minReplicas=2)),
    (rules.one_slice, _set(lambda m: m.server.doc["spec"]["strategy"], rollingUpdate={})),
    (rules.one_slice, _job_on_chips),
    (rules.nobody_waits_on_the_jobs_chips, _job_on_chips),
    (
        rules.nobody_waits_on_the_jobs_chips,
        _set(lambda m: m.job.pod, tolerations=[{"operator": "Exists"}]),
    ),
    (rules.nobody_waits_on_the_jobs_chips, _set(lambda m: m.server.pod, initContainers=[])),
    (rules.same_sizes, _own_settings),
    (rules.same_sizes, lambda m: _settings(m).update(TPU_VL_MAX_LEN="1")),
    (rules.same_sizes, lambda m: _settings(m).update(RELEASE="r2")),
    (rules.same_sizes, lambda m: _server(m)["args"].remove("--require-executables")),
    (rules.same_sizes, lambda m: _server(m)["args"].append("--executables=/store/executables")),
    (rules.waits_long_enough, _set(lambda m: m.job.doc["spec"], activeDeadlineSeconds=9999)),
    (rules.waits_long_enough, _set(lambda m: m.server.doc["spec"], progressDeadlineSeconds=600)),
    (rules.probes, _set(_server, livenessProbe={"httpGet": {"path": "/health", "port": "http"}})),
    (rules.probes, lambda m: _server(m)["startupProbe"].update(failureThreshold=20)),
    (rules.probes, lambda m: _server(m).pop("readinessProbe")),
    (rules.drains, _set(lambda m: m.server.pod, terminationGracePeriodSeconds=45)),
    (rules.drains, lambda m: _server(m)["args"].append("--shutdown-timeout=61")),
    (rules.drains, lambda m: _server(m).pop("lifecycle")),
    (
        rules.traffic_reaches_servers_alone,
        lambda m: m.one("PodMonitoring")["spec"]["endpoints"][0].update(port="metrics"),
    ),
    (
        rules.traffic_reaches_servers_alone,
        lambda m: m.one("InferencePool")["spec"]["selector"]["matchLabels"].pop(COMPONENT),
    ),
    (
        rules.traffic_reaches_servers_alone,
        lambda m: m.job.labels.update(m.server.labels),
    ),
    (rules.traffic_reaches_servers_alone, lambda m: _server(m)["args"].remove("--host=0.0.0.0")),
    (rules.traffic_reaches_servers_alone, lambda m: _server(m)["args"].append("--port=80")),
    (
        rules.picker_is_there,
        lambda m: m.one("InferencePool")["spec"]["endpointPickerRef"].update(name="epp"),
    ),
    (
        rules.picker_is_there,
        lambda m: m.one("InferencePool")["metadata"].update(name="other"),
    ),
    (rules.scales_the_server, _set(lambda m: m.server.doc["spec"], replicas=1)),
    (
        rules.scales_the_server,
        lambda m: m.one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"].update(name="vl"),
    ),
    (rules.one_image, _set(_server, image="us-docker.pkg.dev/my-project/tpu-vl/tpu-vl:0.0.1")),
    (rules.one_image, _set(lambda m: m.job.container("weights"), image="tpu-vl")),
    (rules.locked_down, lambda m: _server(m)["securityContext"].update(privileged=True)),
    (rules.locked_down, lambda m: m.job.pod["securityContext"].update(runAsUser=0)),
    (rules.locked_down, lambda m: m.job.pod["volumes"].append({"name": "x", "hostPath": {}})),
    (rules.store_is_shared, lambda m: _server(m)["volumeMounts"][0].pop("readOnly")),
    (
        rules.store_is_shared,
        lambda m: m.one("PersistentVolumeClaim")["spec"].update(accessModes=["ReadWriteOnce"]),
    ),
    (rules.first_stage_is_whole, lambda m: m.one("Namespace")["metadata"].pop("labels")),
    (
        rules.first_stage_is_whole,
        lambda m: m.server.doc["metadata"]["labels"].update({rules.STAGE: "prepare"}),
    ),
    (rules.one_namespace, lambda m: m.one("Service", "tpu-vl")["metadata"].pop("namespace")),
]


@pytest.mark.parametrize(
    ("rule", "fault"), FAULTS, ids=[f"{i}-{r.__name__}" for i, (r, _) in enumerate(FAULTS)]
)
def test_a_rule_finds_its_fault(rule: rules.Rule, fault: Callable[[Manifests], object]) -> None:
    m = Manifests(render("v6e-2x2"))
    assert rule(m) == []
    assert rule(m.changed(fault)) != []


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, _ in FAULTS} == set(rules.RULES)


def test_the_bucket_is_mounted_for_the_containers_user() -> None:
    """FUSE has no owners: the options must give what runAsUser can read and write."""
    m = Manifests(render("v6e-2x2", "gcsfuse"))
    volume, claim = m.one("PersistentVolume"), m.one("PersistentVolumeClaim")
    user = m.server.pod["securityContext"]["runAsUser"]
    group = m.server.pod["securityContext"]["runAsGroup"]
    options = dict(o.partition("=")[::2] for o in volume["spec"]["mountOptions"])
    assert (options["uid"], options["gid"]) == (str(user), str(group))
    assert (options["file-mode"], options["dir-mode"]) == ("600", "700")
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    reference = volume["spec"]["claimRef"]
    assert reference == {k: claim["metadata"][k] for k in ("namespace", "name")}
    for workload in (m.job, m.server):
        template = workload.doc["spec"]["template"]["metadata"]
        assert template["annotations"] == {"gke-gcsfuse/volumes": "true"}
    assert "annotations" not in m.one("Deployment", "tpu-vl-endpoint-picker")["spec"]["template"]


def _plan(settings: Mapping[str, str], model: str, monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    size = model.removeprefix("Qwen/Qwen3-VL-").partition("B")[0]
    config = ROOT / "tests" / "configs" / f"qwen3_vl_{size}b.json"
    return cli.main(["plan", "--fast", "--json", "--model", str(config)])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlays_model_fits_its_slice(
    overlay: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _settings(Manifests(render(overlay)))
    assert _plan(settings, settings["WEIGHTS_REPO"], monkeypatch) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv_tokens"] >= int(settings["TPU_VL_MAX_MODEL_LEN"])


def test_a_model_that_is_too_large_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(Manifests(render("v6e-1x1")))
    assert _plan(settings, "Qwen/Qwen3-VL-32B-Instruct", monkeypatch) == 1


def test_the_privileged_component_changes_the_servers_container_alone() -> None:
    plain, privileged = (
        Manifests(copy.deepcopy(render("v6e-2x2", *c))) for c in (PLAIN, ("privileged",))
    )
    found = rules.locked_down(privileged)
    assert found == ["Deployment/tpu-vl: server is not locked down"]
    assert _server(privileged).pop("securityContext") == {
        "privileged": True,
        "runAsNonRoot": False,
        "runAsUser": 0,
    }
    _server(plain).pop("securityContext")
    assert privileged.docs == plain.docs


def test_the_image_is_named_in_one_place() -> None:
    named = [
        path.relative_to(DEPLOY).as_posix()
        for path in sorted(DEPLOY.rglob("*.yaml"))
        if "images:" in path.read_text() or "newTag" in path.read_text()
    ]
    assert named == ["base/kustomization.yaml"]


@in_loop
async def test_what_the_autoscaler_and_the_picker_read_is_exported() -> None:
    m = Manifests(render("v6e-2x2"))
    (metric,) = m.one("HorizontalPodAutoscaler")["spec"]["metrics"]
    names = [metric["pods"]["metric"]["name"].split("|")[1]]
    (picker,) = m.one("Deployment", "tpu-vl-endpoint-picker")["spec"]["template"]["spec"][
        "containers"
    ]
    names += [a.partition("=")[2] for a in picker["args"] if a.partition("=")[0].endswith("metric")]
    names = [n for n in names if n]
    assert len(names) == 3
    async with serving(say("a")) as app:
        text = (await app.http.get("/metrics")).text
    for name in names:
        assert f"# TYPE {name} gauge\n" in text
