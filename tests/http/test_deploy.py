"""The Helm chart, rendered by Helm's own code and checked by Kubernetes' schemas, and the compose file."""

import json
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from helm_python import chart as helm
from helm_python.errors import HelmError

from conftest import BINARY, PATIENCE
from test_operations import ALERTS, ROOT, named, rules, run

CHART = ROOT / "deploy/helm/plimsoll"
COMPOSE = ROOT / "deploy/compose"
# Those that Kubernetes itself does not have.
CUSTOM = {"ServiceMonitor", "PrometheusRule", "InferencePool"}
EVERYTHING = {
    "replicas": 3, "hfTokenSecret": "hub", "args": ["--max-model-len", "8192"], "runtimeClassName": "nvidia",
    "env": [{"name": "RUST_LOG", "value": "info"}], "imagePullSecrets": [{"name": "registry"}], "podLabels": {"team": "llm"},
    "podAnnotations": {"a": "b"}, "nodeSelector": {"gpu": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "cache": {"storageClass": "fast", "accessModes": ["ReadWriteMany"]}, "serviceMonitor": {"enabled": True, "labels": {"release": "x"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "x"}}, "dashboard": {"enabled": True}, "inferencePool": {"enabled": True},
    "kvEvents": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "router"}}}]}, "apiKeySecret": "keys", "priorityClassName": "high",
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "extraVolumes": [{"name": "templates", "configMap": {"name": "templates"}}],
    "extraVolumeMounts": [{"name": "templates", "mountPath": "/templates"}],
}
VALUES = {
    "defaults": {},
    "everything": EVERYTHING,
    "autoscaled": {**EVERYTHING, "autoscaling": {"enabled": True}},
    "cpu": {"gpus": 0, "model": "sim", "cache": {"enabled": False}, "resources": {}, "serviceAccount": {"create": False},
            "strategy": {"type": "Recreate"}},
    "tls": {**EVERYTHING, "tlsSecret": "certificate"},
    "alone": {**EVERYTHING, "replicas": 1},
    "ranks": {"gpus": 2, "tensorParallelSize": 2, "sharedMemory": "1Gi"},
}


def files(values: dict, name: str = "llm") -> dict[str, str]:
    with helm.Chart.load(CHART) as chart:
        return chart.render(values, name=name, namespace="serving")


def render(values: dict, name: str = "llm") -> list[dict]:
    manifests = [file for path, file in files(values, name).items() if not path.endswith("NOTES.txt")]
    return [document for file in manifests for document in yaml.safe_load_all(file) if document]


def notes(values: dict) -> str:
    [text] = [file for path, file in files(values).items() if path.endswith("NOTES.txt")]
    return text


def pod_of(values: dict) -> dict:
    return of_kind(render(values), "Deployment")["spec"]["template"]["spec"]


def device_of(values: dict) -> str:
    [container] = pod_of(values)["containers"]
    [flag] = [arg for arg in container["args"] if arg.startswith("--device")]
    return flag.removeprefix("--device=")


def of_kind(documents: list[dict], kind: str) -> dict:
    """The one of this kind; of services, that of the API."""
    [found] = [document for document in documents if document["kind"] == kind and not document["metadata"]["name"].endswith("-kv-events")]
    return found


def test_chart_is_linted():
    report = helm.lint(CHART, strict=True)
    assert report["errors"] == [] and all(message["severity"] <= 1 for message in report["messages"]), report


@pytest.mark.parametrize("name", VALUES)
def test_manifests_have_kubernetes_schemas(name):
    documents = render(VALUES[name])
    kinds = [document["kind"] for document in documents]
    assert {"Deployment", "Service"} <= set(kinds)
    for document in documents:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, "1.33", strict=True)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names)) and all(name.startswith("llm-plimsoll") for _, name in names)
    # Everything that selects pods selects those of the deployment.
    labels = of_kind(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert of_kind(documents, "Service")["spec"]["selector"].items() <= labels.items()
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector", {}))
        assert selector.get("matchLabels", {}).items() <= labels.items()
    # And those alone: a gateway that takes the pod of `helm test` for a replica sends it requests.
    chosen = of_kind(documents, "Service")["spec"]["selector"]
    for document in documents:
        assert document["kind"] != "Pod" or not chosen.items() <= document["metadata"]["labels"].items()


def test_pods_are_told_what_the_values_say():
    documents = render(EVERYTHING)
    pod = of_kind(documents, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"][0] == "Qwen/Qwen3-8B" and container["args"][-2:] == ["--max-model-len", "8192"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert [variable["name"] for variable in container["env"]] == ["POD_IP", "HF_TOKEN", "RUST_LOG"]
    # The drain fits into the time that Kubernetes gives.
    drain = int(next(arg for arg in container["args"] if arg.startswith("--drain-timeout")).split("=")[1])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + pause
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    # The server writes to these two alone.
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {"/hub", "/tmp", "/templates"}
    cpu = of_kind(render(VALUES["cpu"]), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in str(cpu["resources"])


def test_a_pod_has_as_many_gpus_as_ranks():
    pod = pod_of(VALUES["ranks"])
    [container] = pod["containers"]
    assert "--tensor-parallel-size=2" in container["args"] and container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    on_cpu = pod_of({"gpus": 0, "tensorParallelSize": 4})["containers"][0]
    assert {"--device=cpu", "--tensor-parallel-size=4"} <= set(on_cpu["args"])
    assert not [arg for arg in pod_of({})["containers"][0]["args"] if "tensor-parallel" in arg]
    for wrong in [{"gpus": 2}, {"tensorParallelSize": 2}, {"gpus": 4, "tensorParallelSize": 2}]:
        with pytest.raises(HelmError, match="as many GPUs as it has ranks"):
            render(wrong)


def test_a_gpu_that_is_missing_ends_the_start():
    # By itself the server would fall back to the CPU, where it is too slow to be of use, and say so in its log alone.
    assert device_of({}) == "cuda" and device_of(VALUES["cpu"]) == "cpu"
    assert device_of({"gpus": 0, "resources": {"limits": {"nvidia.com/mig-3g.71gb": "1"}}}) == "cuda"


@pytest.mark.parametrize("name", VALUES)
def test_variables_of_services_stay_outside(name):
    # A service called plimsoll, as in `helm install plimsoll`, would set PLIMSOLL_PORT=tcp://... in every pod, which ends the start.
    pods = [document["spec"] for document in render(VALUES[name]) if document["kind"] == "Pod"]
    for pod in [pod_of(VALUES[name]), *pods]:
        assert pod["enableServiceLinks"] is False


def test_volumes_are_there_and_each_is_mounted():
    for values in VALUES.values():
        for pod in [document["spec"] for document in render(values) if document["kind"] == "Pod"] + [pod_of(values)]:
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            mounts = [mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])]
            assert volumes == set(mounts) and len(mounts) == len(volumes)


def test_keys_and_certificates():
    [container] = pod_of(VALUES["tls"])["containers"]
    flags = dict(arg[2:].split("=", 1) for arg in container["args"] if arg.startswith("--") and "=" in arg)
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for name in ["api-key-file", "ssl-certfile", "ssl-keyfile"]:
        assert str(Path(flags[name]).parent) in mounts
    # A probe that speaks another protocol never succeeds.
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"]:
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert pod_of({})["containers"][0][probe]["httpGet"]["scheme"] == "HTTP"
    # Prometheus asks pods by their address, which no certificate names.
    [endpoint] = of_kind(render(VALUES["tls"]), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"] == {"serverName": "llm-plimsoll.serving.svc"}
    more = {"enabled": True, "endpoint": {"tlsConfig": {"serverName": "llm.example", "insecureSkipVerify": True}}}
    [endpoint] = of_kind(render({**VALUES["tls"], "serviceMonitor": more}), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["tlsConfig"] == more["endpoint"]["tlsConfig"] and endpoint["scheme"] == "https"
    assert "https://127.0.0.1" in notes(VALUES["tls"]) and "Bearer" in notes(VALUES["tls"])
    [selftest] = of_kind(render(VALUES["alone"]), "Pod")["spec"]["containers"]
    assert f"--api-key-file={flags['api-key-file']}" in selftest["args"]


@pytest.mark.parametrize(("values", "there"), [
    ({}, True), (VALUES["alone"], True),
    ({"tlsSecret": "certificate"}, False),
    # It asks through the service: one server counts, and another answers.
    ({"replicas": 2}, False), ({"autoscaling": {"enabled": True}}, False), ({"replicas": 0}, False),
])
def test_helm_test_is_there_where_it_can_tell(values, there):
    assert ("Pod" in {document["kind"] for document in render(values)}) == there
    assert ("helm test" in notes(values)) == there


@pytest.mark.parametrize("args", [["--port", "9000"], ["--drain_timeout=300"], ["--shutdown-timeout=300"], ["--ssl-certfile", "/x"], ["--device=cpu"], ["-tp", "2"], ["-tp=2"], ["--tp-size=2"]])
def test_flags_that_values_set_are_refused(args):
    with pytest.raises(HelmError, match="is set by the value"):
        render({"args": args})


@pytest.mark.parametrize("name", ["PLIMSOLL_PORT", "PLIMSOLL_DRAIN_TIMEOUT", "PLIMSOLL_SHUTDOWN_TIMEOUT", "PLIMSOLL_SSL_CERTFILE", "PLIMSOLL_API_KEY_FILE", "PLIMSOLL_TENSOR_PARALLEL_SIZE"])
def test_variables_that_values_set_are_refused(name):
    with pytest.raises(HelmError, match=f"{name} is set by the value"):
        render({"env": [{"name": name, "value": "1"}], "apiKeySecret": "keys"})
    others = [{"name": "PORT", "value": "1"}, {"name": "PLIMSOLL_MAX_NUM_SEQS", "value": "8"}]
    assert pod_of({"env": others})["containers"][0]["env"] == others


def test_a_volume_of_one_node():
    strategy = {name: of_kind(render(values), "Deployment")["spec"]["strategy"]["type"] for name, values in VALUES.items()}
    # A new pod on another node would wait for the volume for ever, and the old one for the new one to be ready.
    assert strategy["defaults"] == "Recreate" and "An upgrade ends the old pod" in notes({})
    assert strategy["everything"] == "RollingUpdate"
    for values in [{"cache": {"enabled": False}}, {"cache": {"existingClaim": "shared"}}]:
        assert of_kind(render(values), "Deployment")["spec"]["strategy"]["type"] == "RollingUpdate" and "An upgrade ends" not in notes(values)
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}
    one_by_one = {"rollingUpdate": {"maxSurge": 0}}
    assert of_kind(render({"strategy": rolling}), "Deployment")["spec"]["strategy"] == rolling
    for together in [{"replicas": 2}, {"replicas": 2, "strategy": one_by_one}, {"autoscaling": {"enabled": True}}, {"strategy": rolling}]:
        assert "WARNING" in notes(together) and "An upgrade ends" not in notes(together)
    assert "WARNING" not in notes({"strategy": one_by_one}) and "An upgrade ends" in notes({"strategy": one_by_one})
    for fine in [{}, EVERYTHING, {"replicas": 2, "cache": {"enabled": False}}, {"replicas": 2, "cache": {"existingClaim": "shared"}}]:
        assert "WARNING" not in notes(fine)


@pytest.mark.parametrize("name", VALUES)
def test_the_server_knows_every_flag(name):
    for pod in [document["spec"] for document in render(VALUES[name]) if document["kind"] == "Pod"] + [pod_of(VALUES[name])]:
        [container] = pod["containers"]
        words = [*container.get("command", ["plimsoll", "config"])[1:], *container["args"]]
        if is_test := "command" in container:
            # Nobody listens there, which it finds out once it has read its flags.
            words = ["--url=http://127.0.0.1:9" if word.startswith("--url=") else word for word in words] + ["--wait=0"]
        done = subprocess.run([BINARY, *words], capture_output=True, text=True, timeout=PATIENCE)
        assert "unexpected argument" not in done.stderr and "invalid value" not in done.stderr, done.stderr
        assert is_test or done.returncode == 0, done.stderr


def test_scaling_and_disruptions():
    scaled = render(VALUES["autoscaled"])
    assert "replicas" not in of_kind(scaled, "Deployment")["spec"]
    metrics = {metric["pods"]["metric"]["name"] for metric in of_kind(scaled, "HorizontalPodAutoscaler")["spec"]["metrics"]}
    assert metrics == {"plimsoll_requests_waiting", "plimsoll_kv_cache_usage_ratio"}
    assert of_kind(scaled, "PodDisruptionBudget")
    # A budget for the only pod would keep its node from ever being drained.
    assert "PodDisruptionBudget" not in {document["kind"] for document in render({})}


def test_custom_resources():
    documents = render(EVERYTHING)
    assert of_kind(documents, "PrometheusRule")["spec"] == yaml.safe_load(ALERTS.read_text())
    assert of_kind(documents, "ServiceMonitor")["spec"]["endpoints"] == [{"port": "http", "path": "/metrics", "interval": "15s"}]
    assert "plimsoll_requests_running" in named(of_kind(documents, "ConfigMap")["data"]["plimsoll.json"])
    more = {"authorization": {"credentials": {"name": "keys", "key": "prometheus"}}, "interval": "5s"}
    [endpoint] = of_kind(render({"serviceMonitor": {"enabled": True, "endpoint": more}}), "ServiceMonitor")["spec"]["endpoints"]
    assert more.items() <= endpoint.items() and endpoint["port"] == "http"
    pool = of_kind(documents, "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "llm-plimsoll-epp", "port": {"number": 9002}, "failureMode": "FailClose"}


def test_alerts_know_the_job_however_long_the_release_is_called():
    documents = render({"serviceMonitor": {"enabled": True}}, name="a" * 53)
    job = of_kind(documents, "Service")["metadata"]["labels"][of_kind(documents, "ServiceMonitor")["spec"]["jobLabel"]]
    [down] = [rule["expr"] for rule in rules() if rule["alert"] == "PlimsollDown"]
    assert re.fullmatch(re.search('job=~"(.+)"', down)[1], job)


def test_routers_find_the_events_of_each_pod():
    documents = render({**EVERYTHING, "kvEvents": {"enabled": True, "port": 6001, "replayPort": 6002, "model": "qwen"}})
    [container] = of_kind(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    [flag] = [arg for arg in container["args"] if arg.startswith("--kv-events-config=")]
    assert json.loads(flag.split("=", 1)[1]) == {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:6001", "replay_endpoint": "tcp://*:6002",
        "topic": "kv@$(POD_IP):8000@qwen",
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "kv-events": 6001, "kv-replay": 6002}
    [service] = [document for document in documents if document["metadata"]["name"] == "llm-plimsoll-kv-events"]
    assert service["spec"]["clusterIP"] == "None"
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == {"kv-events": 6001, "kv-replay": 6002}
    # The API is open to all, the events to the router alone.
    assert "NetworkPolicy" not in {document["kind"] for document in documents}
    [api, events] = next(document for document in render(EVERYTHING) if document["kind"] == "NetworkPolicy")["spec"]["ingress"]
    assert api == {"ports": [{"port": "http"}]}
    assert events["from"] == EVERYTHING["kvEvents"]["from"] and {port["port"] for port in events["ports"]} == {"kv-events", "kv-replay"}
    silent = [arg for arg in of_kind(render({}), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"] if "kv-events" in arg]
    assert silent == []


@pytest.mark.parametrize("wrong", [{"gpu": 1}, {"model": ""}, {"replicas": "2"}, {"autoscaling": {"maxReplica": 3}}])
def test_unknown_and_wrong_values_are_refused(wrong):
    with pytest.raises(HelmError), helm.Chart.load(CHART) as chart:
        chart.validate_schema(wrong)


def test_compose():
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).exists(), source
    plimsoll = services["plimsoll"]
    assert re.fullmatch(r"\d+s", plimsoll["stop_grace_period"])
    # A GPU that the container does not get ends the start; by itself the server would fall back to the CPU.
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in plimsoll["command"]]
    done = subprocess.run([BINARY, "config", *words, "--json"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    settings = {name: setting["value"] for name, setting in json.loads(done.stdout)["settings"].items()}
    assert settings["device"] == "cuda"
    [devices] = plimsoll["deploy"]["resources"]["reservations"]["devices"]
    assert plimsoll["command"][plimsoll["command"].index("--tensor-parallel-size") + 1] == devices["count"] == "${RANKS:-1}"
    assert devices["capabilities"] == ["gpu"]


def test_health_check_waits_as_long_as_the_chart():
    [minutes] = re.findall(r"^HEALTHCHECK .*--start-period=(\d+)m ", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    startup = pod_of({})["containers"][0]["startupProbe"]
    assert int(minutes) * 60 >= startup["failureThreshold"] * startup["periodSeconds"]


def test_prometheus_of_compose_is_valid(tmp_path):
    promtool = subprocess.run([ROOT / "scripts/install-tool", "promtool", "prometheus"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    for file in [COMPOSE / "prometheus.yml", ALERTS]:
        (tmp_path / file.name).write_text(Path(file).read_text())
    run(promtool, "check", "config", tmp_path / "prometheus.yml")
