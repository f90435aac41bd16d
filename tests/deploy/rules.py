"""What must hold in every rendered overlay: each rule returns what is wrong, [] when nothing is."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from tests.deploy.manifests import CHIPS, Doc, Manifests, Workload
from tpu_vl import cli
from tpu_vl.config import ServerConfig
from tpu_vl.flags import (
    COMMANDS,
    ENV_PREFIX,
    PrecompileFlags,
    ServeFlags,
    SizeFlags,
    env_name,
    read_flags,
)
from tpu_vl.precompile.executables import READY
from tpu_vl.precompile.targets import parse_target
from tpu_vl.server.routes import Routes
from tpu_vl.server.state import ServerState

Rule = Callable[[Manifests], list[str]]

ACCELERATORS = {"v6e": "tpu-v6e-slice", "tpu7x": "tpu7x"}
DEVICES_PER_CHIP = {"v6e": 1, "tpu7x": 2}
# Machine type -> vCPUs and GB of memory, by the vendor's pages of late 2026.
MACHINE_SIZES = {
    "ct6e-standard-1t": (44, 176),
    "ct6e-standard-4t": (180, 720),
    "ct6e-standard-8t": (180, 1440),
    "tpu7x-standard-4t": (224, 960),
}
# What the node's own agents and the kernel keep of a machine.
NODE_SHARE = 0.9
STAGE = "tpu-vl/stage"


def _unless(holds: bool, text: str) -> list[str]:
    return [] if holds else [text]


def slice_fits_target(m: Manifests) -> list[str]:
    """Selectors, chips and host resources are those of the target that the Job compiles for."""
    settings = m.environment(m.server.container("server"))
    target = parse_target(settings["TPU_VL_TARGET"])
    resources = m.server.container("server")["resources"]
    requests, limits = resources["requests"], resources["limits"]
    num_cpus, memory_gb = MACHINE_SIZES[target.machine.name]
    wanted = {
        "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[target.machine.chip],
        "cloud.google.com/gke-tpu-topology": target.topology,
    }
    tolerated = {(t["key"], t["operator"]) for t in m.server.pod.get("tolerations", [])}
    num_devices = target.num_chips * DEVICES_PER_CHIP[target.machine.chip]
    memory = int(requests["memory"].removesuffix("Gi")) * 2**30
    return [
        *_unless(m.server.pod.get("nodeSelector") == wanted, f"selectors are not {wanted}"),
        *_unless(target.num_hosts == 1, f"{target} has several hosts"),
        *_unless(m.server.num_chips == target.num_chips, f"not {target.num_chips} chips"),
        *_unless(requests[CHIPS] == limits[CHIPS], "chips: requests differ from limits"),
        *_unless((CHIPS, "Exists") in tolerated, f"does not tolerate the taint {CHIPS}"),
        *_unless(
            int(settings["TPU_VL_TENSOR_PARALLEL_SIZE"]) == num_devices,
            f"tensor parallelism is not over {num_devices} devices",
        ),
        *_unless(float(requests["cpu"]) <= NODE_SHARE * num_cpus, f"more than {num_cpus} vCPU"),
        *_unless(memory <= NODE_SHARE * memory_gb * 1e9, f"more than {memory_gb} GB"),
    ]


def one_slice(m: Manifests) -> list[str]:
    """With everything applied, the pods that there are at first ask for one slice in all."""
    holders = [w for w in m.workloads() if w.num_chips]
    scaler = m.one("HorizontalPodAutoscaler")["spec"]
    rolling = m.server.doc["spec"]["strategy"].get("rollingUpdate", {})
    return [
        *_unless([w.name for w in holders] == [m.server.name], "others than the server have chips"),
        *_unless(m.server.doc["spec"].get("replicas", 1) == 1, "more than one server at first"),
        *_unless(scaler["minReplicas"] == 1, "the autoscaler keeps more than one server"),
        *_unless(rolling.get("maxSurge") == 0, "an update needs a second slice"),
    ]


def _waits(workload: Workload) -> bool:
    return any(READY in " ".join(c.get("command", [])) for c in workload.pod["initContainers"])


def nobody_waits_on_the_jobs_chips(m: Manifests) -> list[str]:
    """The Job can always run beside the pods that wait for its marker: it needs no chip."""
    job, selectors = m.job, m.job.pod.get("nodeSelector", {})
    keys = [t.get("key") for t in job.pod.get("tolerations", [])]
    asked = [
        f"{c['name']} asks for chips"
        for c in job.containers
        for kind in ("requests", "limits")
        if CHIPS in c["resources"].get(kind, {})
    ]
    return [
        *asked,
        *_unless(not any("tpu" in k for k in selectors), "the Job selects TPU nodes"),
        *_unless(CHIPS not in keys and None not in keys, "the Job may land on a TPU node"),
        *_unless(_waits(m.server), "the server does not wait for the marker"),
        *_unless(not _waits(job), "the Job waits for its own marker"),
    ]


F = TypeVar("F", bound=SizeFlags)


def _flags(m: Manifests, container: Doc, cls: type[F]) -> F:
    """What a container's command reads, as the program itself reads it."""
    parsed = cli.make_parser().parse_args(m.arguments(container))
    assert COMMANDS[parsed.command][0] is cls, f"{container['name']} runs {parsed.command}"
    return read_flags(cls, parsed, m.environment(container))


def same_sizes(m: Manifests) -> list[str]:
    """The Job and the server come to the same sizes, one writes where the other reads."""
    job, server = m.job.container("precompile"), m.server.container("server")
    waiting = m.server.container("wait-for-executables")
    written, read = _flags(m, job, PrecompileFlags), _flags(m, server, ServeFlags)
    differing = [
        f"{f.name}: {getattr(written, f.name)} and {getattr(read, f.name)}"
        for f in dataclasses.fields(SizeFlags)
        if getattr(written, f.name) != getattr(read, f.name)
    ]
    release = m.environment(waiting)["RELEASE"]
    sources = [c["envFrom"] for c in (job, server, waiting)]
    unknown = sorted(
        name
        for name in {**m.environment(job), **m.environment(server)}
        if name.startswith(ENV_PREFIX) and name not in _variables()
    )
    return [
        *differing,
        *_unless(read.model is not None, "no model is named"),
        *_unless(written.out == read.executables, "executables are read elsewhere"),
        *_unless(written.out == f"/store/executables/{release}", "not the release's folder"),
        *_unless(read.require_executables, "the server may compile"),
        *_unless(all(s == sources[0] for s in sources), "not one ConfigMap for all"),
        *_unless(m.job.name.endswith(f"-{release}"), "the Job is not the release's"),
        *_unless(not unknown, f"{unknown} are no flags"),
    ]


def _variables() -> set[str]:
    classes = (ServeFlags, PrecompileFlags)
    return {env_name(f.name) for cls in classes for f in dataclasses.fields(cls)}


def waits_long_enough(m: Manifests) -> list[str]:
    """No limit ends before the one that it waits for."""
    environment = m.environment(m.server.container("wait-for-executables"))
    limit_s, job_s = int(environment["WAIT_LIMIT_S"]), m.job.doc["spec"]["activeDeadlineSeconds"]
    startup = m.server.container("server")["startupProbe"]
    startup_s = startup["periodSeconds"] * startup["failureThreshold"]
    deadline_s = m.server.doc["spec"]["progressDeadlineSeconds"]
    return [
        *_unless(limit_s > job_s, f"waits {limit_s} s for a Job of up to {job_s} s"),
        *_unless(deadline_s > limit_s + startup_s, f"the rollout fails after {deadline_s} s"),
    ]


def probes(m: Manifests) -> list[str]:
    """Startup and readiness ask for the model, liveness for the process alone."""
    server = m.server.container("server")
    routes = Routes(ServerState(), ServerConfig()).router.routes
    served = {getattr(route, "path", None) for route in routes}
    wanted = {
        "startupProbe": "/health",
        "readinessProbe": "/health",
        "livenessProbe": "/live",
    }
    wrong = []
    for name, path in wanted.items():
        get = server.get(name, {}).get("httpGet", {})
        wrong += _unless(get.get("path") == path and path in served, f"{name} is not on {path}")
        wrong += _unless(get.get("port") in _port_names(m.server), f"{name} has no such port")
    startup = server.get("startupProbe", {})
    every, times = startup.get("periodSeconds"), startup.get("failureThreshold")
    return wrong + _unless((every, times) == (30, 120), f"startup is {every} s x {times}")


def drains(m: Manifests) -> list[str]:
    """The grace period holds preStop, the server's own drain and its end."""
    drain_s = _flags(m, m.server.container("server"), ServeFlags).shutdown_timeout_s
    hook = m.server.container("server").get("lifecycle", {}).get("preStop", {})
    before_s = hook.get("sleep", {}).get("seconds", 0)
    grace_s = m.server.pod.get("terminationGracePeriodSeconds", 30)
    return [
        *_unless(before_s >= 5, "no time for load balancers before the server refuses"),
        *_unless(grace_s >= before_s + drain_s + 15, f"{grace_s} s are too few to drain"),
    ]


def _port_names(workload: Workload) -> dict[str, int]:
    ports = [p for c in workload.pod["containers"] for p in c.get("ports", [])]
    return {p["name"]: p["containerPort"] for p in ports}


def _selected(m: Manifests, labels: Mapping[str, str]) -> list[str]:
    return [w.name for w in m.workloads() if labels.items() <= w.labels.items()]


def traffic_reaches_servers_alone(m: Manifests) -> list[str]:
    """Service, pool and monitoring select the server's pods and ports that these have."""
    ports = _port_names(m.server)
    service = m.one("Service", "tpu-vl")["spec"]
    pool, monitoring = m.one("InferencePool")["spec"], m.one("PodMonitoring")["spec"]
    (endpoint,) = monitoring["endpoints"]
    selectors = {
        "Service": service["selector"],
        "InferencePool": pool["selector"]["matchLabels"],
        "PodMonitoring": monitoring["selector"]["matchLabels"],
        "Deployment": m.server.doc["spec"]["selector"]["matchLabels"],
    }
    wrong = [
        f"{kind} selects {_selected(m, labels)}"
        for kind, labels in selectors.items()
        if _selected(m, labels) != [m.server.name]
    ]
    flags = _flags(m, m.server.container("server"), ServeFlags)
    return [
        *wrong,
        *_unless(flags.host == "0.0.0.0", "the server listens to itself alone"),
        *_unless(ports == {"http": flags.port}, f"the server listens on {flags.port}"),
        *_unless([p["targetPort"] for p in service["ports"]] == ["http"], "Service: no such port"),
        *_unless(pool["targetPorts"] == [{"number": ports["http"]}], "pool: no such port"),
        *_unless(endpoint["port"] in ports, "PodMonitoring: no such port"),
        *_unless(
            (endpoint["path"], endpoint["interval"]) == ("/metrics", "15s"),
            "PodMonitoring: not /metrics every 15 s",
        ),
    ]


def picker_is_there(m: Manifests) -> list[str]:
    """The pool's endpoint picker exists, and serves this pool on that port."""
    pool = m.one("InferencePool")
    reference = pool["spec"]["endpointPickerRef"]
    if not m.has("Service", reference["name"]):
        return [f"no Service {reference['name']}"]
    service = m.one("Service", reference["name"])["spec"]
    chosen = [w for w in m.workloads() if service["selector"].items() <= w.labels.items()]
    if len(chosen) != 1:
        return [f"the picker's Service selects {[w.name for w in chosen]}"]
    (container,) = chosen[0].containers
    account = chosen[0].pod["serviceAccountName"]
    (port,) = (p for p in service["ports"] if p["port"] == reference["port"]["number"])
    binding = m.one("RoleBinding")
    policies = [*m.all("HealthCheckPolicy"), *m.all("GCPBackendPolicy")]
    names = {d["spec"]["targetRef"]["name"] for d in policies} | {pool["metadata"]["name"]}
    return [
        *_unless(port["targetPort"] in _port_names(chosen[0]), "the picker has no such port"),
        *_unless(f"--pool-name={pool['metadata']['name']}" in container["args"], "another pool"),
        *_unless(m.has("Role", binding["roleRef"]["name"]), "no such Role"),
        *_unless(
            [(s["name"], s["namespace"]) for s in binding["subjects"]]
            == [(account, m.one("Namespace")["metadata"]["name"])],
            "the Role is bound to another account",
        ),
        *_unless(len(policies) == 2 and len(names) == 1, "the load balancer's policies miss it"),
    ]


def scales_the_server(m: Manifests) -> list[str]:
    """The autoscaler reads the queue and drives the Deployment, which leaves the number to it."""
    spec = m.one("HorizontalPodAutoscaler")["spec"]
    (metric,) = spec["metrics"]
    target = spec["scaleTargetRef"]
    return [
        *_unless(m.has(target["kind"], target["name"]), "scales what is not there"),
        *_unless(f"{target['kind']}/{target['name']}" == m.server.name, "scales another"),
        *_unless("replicas" not in m.server.doc["spec"], "an apply would reset the number"),
        *_unless(
            metric["pods"]["metric"]["name"]
            == "prometheus.googleapis.com|vllm:num_requests_waiting|gauge",
            "does not scale on the queue",
        ),
    ]


def one_image(m: Manifests) -> list[str]:
    """Job and server run one image, with a tag of its own."""
    images = {c["image"] for w in (m.job, m.server) for c in w.containers}
    tags = [c["image"].rpartition(":")[2] for w in m.workloads() for c in w.containers]
    return [
        *_unless(len(images) == 1, f"images {sorted(images)}"),
        *_unless(all("/" not in t and t != "latest" for t in tags), f"tags {tags}"),
    ]


def locked_down(m: Manifests) -> list[str]:
    """No pod runs as root, writes into its image, gains rights or sees its node."""
    wrong = []
    for workload in m.workloads():
        pod = workload.pod
        context = pod.get("securityContext", {})
        user, profile = context.get("runAsUser", 0), context.get("seccompProfile", {}).get("type")
        holds = context.get("runAsNonRoot") is True and user > 0 and profile == "RuntimeDefault"
        wrong += _unless(holds, f"{workload.name} may be root")
        host = {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        paths = [v["name"] for v in pod["volumes"] if "hostPath" in v]
        wrong += _unless(not host and not paths, f"{workload.name} sees its node")
        for container in workload.containers:
            allowed = container.get("securityContext", {})
            holds = (
                allowed.get("allowPrivilegeEscalation") is False
                and allowed.get("readOnlyRootFilesystem") is True
                and allowed.get("capabilities") == {"drop": ["ALL"]}
                and not {"privileged", "runAsUser", "runAsNonRoot"} & allowed.keys()
            )
            wrong += _unless(holds, f"{workload.name}: {container['name']} is not locked down")
    for workload in (m.job, m.server):
        holds = workload.pod.get("automountServiceAccountToken") is False
        wrong += _unless(holds, f"{workload.name} gets a token")
    return wrong


def store_is_shared(m: Manifests) -> list[str]:
    """One claim, written by the Job on its node and read by servers on theirs."""
    claims, wrong = set(), []
    for workload, is_read_only in ((m.job, False), (m.server, True)):
        volumes = {v["name"]: v for v in workload.pod["volumes"]}
        claims.add(volumes["store"]["persistentVolumeClaim"]["claimName"])
        for container in workload.containers:
            mounts = {v["name"]: v for v in container["volumeMounts"]}
            wrong += _unless(set(mounts) == set(volumes), f"{container['name']}: other volumes")
            found = mounts["store"].get("readOnly", False)
            wrong += _unless(found == is_read_only, f"{container['name']}: read-only is {found}")
    claim = m.one("PersistentVolumeClaim")
    return [
        *wrong,
        *_unless(claims == {claim["metadata"]["name"]}, f"claims {sorted(claims)}"),
        *_unless(claim["spec"]["accessModes"] == ["ReadWriteMany"], "on one node at a time"),
    ]


def first_stage_is_whole(m: Manifests) -> list[str]:
    """What carries the stage label `prepare` is the Job with all it needs, and has no chip."""
    staged = [d for d in m.docs if d["metadata"].get("labels", {}).get(STAGE) == "prepare"]
    kinds = {(d["kind"], d["metadata"]["name"]) for d in staged}
    pod = m.job.pod
    needed = {
        ("Job", m.job.doc["metadata"]["name"]),
        ("Namespace", m.job.doc["metadata"]["namespace"]),
        ("ServiceAccount", pod["serviceAccountName"]),
        ("PersistentVolumeClaim", m.one("PersistentVolumeClaim")["metadata"]["name"]),
        *(("ConfigMap", s["configMapRef"]["name"]) for c in m.job.containers for s in c["envFrom"]),
        *(("PersistentVolume", d["metadata"]["name"]) for d in m.all("PersistentVolume")),
    }
    return _unless(kinds == needed, f"staged without need or missing: {sorted(kinds ^ needed)}")


def one_namespace(m: Manifests) -> list[str]:
    """Everything lies in the namespace that is made, but what has none."""
    (name,) = (d["metadata"]["name"] for d in m.all("Namespace"))
    cluster_wide = {"Namespace", "PersistentVolume"}
    wrong = [
        f"{d['kind']}/{d['metadata']['name']}"
        for d in m.docs
        if d["kind"] not in cluster_wide and d["metadata"].get("namespace") != name
    ]
    return _unless(not wrong, f"outside the namespace: {wrong}")


RULES: tuple[Rule, ...] = (
    slice_fits_target,
    one_slice,
    nobody_waits_on_the_jobs_chips,
    same_sizes,
    waits_long_enough,
    probes,
    drains,
    traffic_reaches_servers_alone,
    picker_is_there,
    scales_the_server,
    one_image,
    locked_down,
    store_is_shared,
    first_stage_is_whole,
    one_namespace,
)
