"""The chart renders what Kubernetes and KubeRay take, refuses values that cannot work, and says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.covering import parametrize
from tests.deploy.reach import Pod, reaches
from tests.deploy.rendering import CHART, HELM, ROOT, VALUES, RenderRefused, objects, render, rendered, with_jobs
from tests.deploy.schemas import NEWEST, OLDEST, complaints
from tests.service.control_plane_harness import Service
from thinwire.contract.metric_names import most_series
from thinwire.service.config import Settings
from thinwire.service.launch.kuberay.kube import NEEDED, POLICIES
from thinwire.service.launch.kuberay.pods import Places, Pods, read_pods

CLAIMS = Path(__file__).parent / "values" / "claims.txt"
"""A template that mounts claims whose names begin as another's."""


@pytest.mark.few(2)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", VALUES)
def test_every_object_fits_the_schemas_of_the_oldest_and_the_newest_kubernetes(name, version):
    for found in with_jobs(objects(rendered(name))):
        assert complaints(found, version) == [], found["kind"]


@pytest.mark.few(3)
@parametrize(
    ("arguments", "reason"),
    [
        (["--set", "replica=2"], "replica is not allowed"),
        (["--set", "image.tga=1"], "tga is not allowed"),
        (["--set", "image.tag=latest"], "image.tag"),
        (["--set", "kuberay.image=worker:latest"], "kuberay.image"),
        (["--set", "replicas=0"], "greater than or equal to 1"),
        (["--set", "resources.limits=null"], "limits is required"),
        (["--set", "resources.limits.memory=1GB"], "resources.limits.memory"),
        (["--set", "resources.requests.cpu=-1"], "resources.requests.cpu"),
        (["--set", "resources.requests.cpu=2500m"], r"requests\.cpu: 2500m is above resources\.limits\.cpu: 2, which"),
        (["--set", "resources.requests.cpu=3"], r"requests\.cpu: 3 is above"),
        (["--set", "resources.requests.memory=1.1G,resources.limits.memory=1Gi"], r"requests\.memory: 1\.1G is above"),
        (["--set", "resources.requests.memory=1073741825,resources.limits.memory=1Gi"], r"requests\.memory"),
        (["--set", "resources.requests.memory=1Ti,resources.limits.memory=1e12"], r"requests\.memory"),
        (["--set", r"podLabels.app\.kubernetes\.io/name=a"], "podLabels"),
        (["--set", "podSecurity.user=0"], "podSecurity.user"),
        (["--set", "replicas=2"], "replicas: 2 needs PostgreSQL"),
        (["--set", "replicas=2,database.secret.name=a"], "replicas: 2 needs tokenSecret.name"),
        (["--set", "replicas=2,database.secret.name=a,tokenSecret.name=b"], "needs home.accessMode: ReadWriteMany"),
        (["--set", "launcher=ray"], "launcher: ray needs ray.address"),
        (["--set", "ray.address=http://head:8265"], "launcher is kuberay"),
        (["--set", "kuberay.template=kind: Pod"], "its kind is Pod"),
        (["--set", "kuberay.namespace=thinwire"], "namespace: thinwire is that of the release, where the autoscaler"),
        (["--set", "tls.secret=a,publicUrl=http://a.b"], "begin it with https://"),
        (["--set", "checkpoints.claim=a"], "must have a volume with claimName: a"),
        (["--set", "ingress.enabled=true,ingress.host=a.b"], "ingress.tlsSecret"),
        (["--set", "ingress.enabled=true,ingress.host=a.b,ingress.tlsSecret=c"], "ingress.controllerNamespace"),
        (["--set", "ingress.host=https://a.b/"], "ingress.host"),
        (["--set", "tolerations[0].keys=a"], "keys is not allowed|additional"),
        (["--set", "tolerations[0].operator=Is"], "tolerations.0.operator"),
        (["--set", "nodeSelector.pool=a b"], "nodeSelector.pool"),
        (["--set", "podLabels.team=-a"], "podLabels.team"),
        (["--set", "env.HOME=/root"], "HOME is set by the chart"),
        (["--set", "checkpoints.claim=a", "--set-file", f"kuberay.template={CLAIMS}"], "claimName: a"),
        (["--set", "checkpoints.claim=thinwire-home,launcher=ray,ray.address=http://a:1"], "name another"),
        (["--set", "monitoring.serviceMonitor=true"], r"needs monitoring\.tokenSecret.name: .*--role viewer"),
        (["--set", "monitoring.scrapeConfig=true,tokenSecret.name=a"], r"needs monitoring\.tokenSecret"),
        (
            ["--set", "monitoring.serviceMonitor=true,tokenSecret.name=a,monitoring.tokenSecret.name=a"],
            "a is the operator's token",
        ),
        (["--set", "monitoring.runbooks=here"], "monitoring.runbooks"),
        (["--set", "env.THINWIRE_PORT=80"], "must be a string|Invalid type"),
        (["--set-string", "env.THINWIRE_PORT=80"], "THINWIRE_PORT is set by the chart"),
        (["--kube-version", "1.28.0"], "kubeVersion"),
        (["--set", "kuberay.namespaces.vision=thinwire"], r"namespaces\.vision: thinwire is that of the release"),
        (["--set", "kuberay.namespaces.default=a"], "namespaces"),
        (["--set", "networkPolicy.egress.enabled=true"], r"needs networkPolicy\.egress\.apiServer: .*get endpoints"),
        (["--set", "networkPolicy.egress.enabled=true,networkPolicy.enabled=false"], r"needs networkPolicy\.enabled"),
        (["--set", "networkPolicy.egress.database[0].ipBlok=a"], "ipBlok is not allowed|additional"),
        (["--set", "extraVolumes[0].name=tls"], "tls is a volume of the chart"),
        (["--set", "extraEnv[0].name=THINWIRE_PORT"], "THINWIRE_PORT is set by the chart"),
        (["--set", "kuberay.pods.secrets.A.secretKeyRef.name=b"], "key is required"),
        (["--set", "kuberay.pods.secrets.A.value=b"], "value is not allowed|additional"),
        (["--set", "kuberay.pods.worker.tolerations[0].key=a"], "worker is not allowed|additional"),
        (["--set", "kuberay.pods.gpu.topologySpreadConstraints[0].maxSkew=1"], "topologyKey is required"),
        (
            [
                "--set",
                "networkPolicy.egress.enabled=true,networkPolicy.egress.apiServer[0].ipBlock.cidr=10.0.0.1/32,"
                "env.THINWIRE_OIDC_ISSUER=https://a.b",
            ],
            r"needs a rule in networkPolicy\.egress\.service: the service must reach https://a\.b",
        ),
    ],
    usual=[0, 3, 8, 14, 16, 21, 22, 23, 31, 35],
)
def test_values_that_cannot_work_are_refused_with_the_reason(arguments, reason):
    with pytest.raises(RenderRefused, match=reason):
        render(arguments)


@parametrize(
    ("resource", "asked", "most"),
    [
        ("cpu", "2000m", "2"),
        ("cpu", "0.25", "250m"),
        ("cpu", "2", "2"),
        ("memory", "1G", "1Gi"),
        ("memory", "1024Mi", "1Gi"),
        ("memory", "1073741824", "1Gi"),
        ("memory", "512M", "1e9"),
        ("memory", "1E", "1Ei"),
        ("memory", "1e6", "1M"),
        ("ephemeral-storage", "1Gi", "1Gi"),
    ],
    usual=[0, 1],
)
def test_requests_up_to_the_limits_are_taken_in_any_unit(resource, asked, most):
    text = render(["--set", f"resources.requests.{resource}={asked},resources.limits.{resource}={most}"])
    (deployment,) = (each for each in objects(text) if each["kind"] == "Deployment")
    found = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert (str(found["requests"][resource]), str(found["limits"][resource])) == (asked, most)


@pytest.mark.parametrize("claim", ["ab", "a.b", "a-c"])
def test_a_claim_that_the_template_mounts_is_found_however_it_is_written(claim):
    assert f'name: "{claim}"' in render(
        ["--set", f"checkpoints.claim={claim}", "--set-file", f"kuberay.template={CLAIMS}"]
    )


def test_every_value_is_in_the_schema_and_has_its_line():
    schema = json.loads((CHART / "values.schema.json").read_text())

    def same(values, schema, path):
        assert schema["additionalProperties"] is False, path
        assert set(values) == set(schema["properties"]) - {"global"}, path
        for key, below in schema["properties"].items():
            if "properties" in below:
                same(values[key], below, f"{path}.{key}")

    same(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


@pytest.mark.parametrize("name", VALUES)
def test_the_service_knows_each_setting_and_takes_its_value(name, tmp_path, monkeypatch):
    deployment = next(found for found in objects(rendered(name)) if found["kind"] == "Deployment")
    environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    settings = {
        env["name"].removeprefix("THINWIRE_").lower(): env.get("value", "postgresql+psycopg://a@b/c")
        for env in environment
        if env["name"].startswith("THINWIRE_")
    }
    assert set(settings) <= set(Settings.model_fields)
    if settings["launcher"] == "ray":
        for key, value in settings.items():
            monkeypatch.setenv(f"THINWIRE_{key.upper()}", value)
        taken = Settings()
        assert (taken.host, taken.port, taken.keep_days) == ("0.0.0.0", 8400, 30)
        assert [str(folder) for folder in taken.shared_folders] == ["/mnt/shared"]


def make_home(home, shared, secret, database="postgresql://db/thinwire"):
    """Do what the pod of a replica does before the service starts. Returns why it does not."""
    pod = next(found for found in objects(rendered("postgresql")) if found["kind"] == "Deployment")["spec"]["template"]
    step = pod["spec"]["initContainers"][0]
    environment = {"THINWIRE_HOME": home, "SHARED_FOLDER": shared, "TOKEN_FILE": secret, "DATABASE_URL": database}
    assert {env["name"] for env in step["env"]} == set(environment)
    command = [*step["command"], *step["args"]]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stderr


def test_replicas_share_the_run_folders_and_the_token_of_the_secret(tmp_path):
    shared, secret = tmp_path / "shared", tmp_path / "secret"
    secret.write_text("a token of the operator\n")
    homes = [tmp_path / name for name in ("first", "second")]
    of_both = {"database_url": f"sqlite:///{tmp_path / 'db'}", "packages_folder": shared / "packages"}
    for home in (*homes, *homes):  # a container may start twice
        assert make_home(home, shared, secret) == ""
        assert [path.stat().st_mode & 0o777 for path in (home, home / "token")] == [0o700, 0o600]
    first = Service(homes[0], **of_both)
    job = first.submit()
    first.turn()
    first.close()
    assert (shared / "runs").stat().st_mode & 0o777 == 0o700
    written = {path.name for path in (shared / "runs" / job).iterdir()}
    assert written
    second = Service(homes[1], **of_both)
    try:
        assert second.token == first.token == "a token of the operator"
        second.turn()
        assert second.job(job)["id"] == job
        assert written <= {path.name for path in (homes[1] / "runs" / job).iterdir()}
    finally:
        second.close()


@pytest.mark.parametrize(
    ("token", "database", "reason"),
    [
        ("", "postgresql://db/a", "the Secret 3 has fewer than 16 characters under its key 4"),
        (" short \n", "postgresql://db/a", "the Secret 3 has fewer than 16 characters"),
        ("a token of the operator\n", "", "the Secret 1 has no URL under its key 2"),
    ],
)
def test_a_secret_with_nothing_in_it_is_told_before_the_service_starts(tmp_path, token, database, reason):
    (tmp_path / "secret").write_text(token)
    assert reason in make_home(tmp_path / "home", tmp_path / "shared", tmp_path / "secret", database)
    assert not (tmp_path / "home" / "token").exists()


@pytest.mark.parametrize("name", ["a.b", "9lives"])
def test_a_release_whose_service_could_have_no_such_name_is_refused(name):
    command = [str(HELM), "template", name, str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"the release name {name} cannot be that of a Service" in done.stderr


def test_the_longest_name_of_a_release_and_odd_values_make_objects_that_fit(tmp_path):
    long = "tw-" + "release-" * 6 + "ab"
    values = ["--set", "listen=::,podSecurity.user=1000680000,podSecurity.group=1000680000,kuberay.namespace=ml-jobs"]
    values += ["--set", "monitoring.dashboards=true,monitoring.podMonitor=true,monitoring.prometheusRule=true"]
    values += ["--set", "kuberay.template=kind: RayJob"]
    command = [str(HELM), "template", long, str(CHART), "--namespace", "other", *values]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = objects(text)
    for each in found:
        assert complaints(each, NEWEST) == [], each["kind"]
        assert len(each["metadata"]["name"]) <= 63
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    environment = {
        env["name"]: env.get("value") for env in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert environment["THINWIRE_HOST"] == "::"
    service = next(each for each in found if each["kind"] == "Service")["metadata"]["name"]
    assert environment["THINWIRE_PUBLIC_URL"] == f"http://{service}.other:8400"


def test_with_tls_the_service_and_all_who_call_it_speak_it():
    found = objects(rendered("tls"))
    (pod,) = (each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment")
    box = pod["containers"][0]
    env = {one["name"]: one.get("value") for one in box["env"]}
    assert env["THINWIRE_PUBLIC_URL"] == "https://thinwire.thinwire:8400"
    (mount,) = (one for one in box["volumeMounts"] if one["name"] == "tls")
    (volume,) = (one["secret"] for one in pod["volumes"] if one["name"] == "tls")
    files = {f"{mount['mountPath']}/{item['path']}" for item in volume["items"]}
    assert files == {env[f"THINWIRE_TLS_{name}"] for name in ("CERTIFICATE", "KEY", "CA")}
    assert {item["key"] for item in volume["items"]} == {"tls.crt", "tls.key", "ca.crt"}  # as cert-manager writes them
    assert {box[f"{probe}Probe"]["httpGet"]["scheme"] for probe in ("startup", "liveness", "readiness")} == {"HTTPS"}
    asked = next(each for each in found if each["kind"] == "ScrapeConfig")["spec"]["httpSDConfigs"][0]
    assert asked["url"].startswith("https://thinwire.thinwire:8400/")
    (endpoint,) = next(each for each in found if each["kind"] == "ServiceMonitor")["spec"]["endpoints"]
    trusted = {"serverName": "thinwire.thinwire", "ca": {"secret": {"name": "thinwire-tls", "key": "ca.crt"}}}
    assert (endpoint["scheme"], endpoint["tlsConfig"], asked["tlsConfig"]) == ("https", trusted, trusted)
    public = render(["--set", "tls.secret=a,tls.ca=,publicUrl=https://a.example"])  # a CA that every machine trusts
    assert "THINWIRE_TLS_CA" not in public
    assert "ca.crt" not in public


def test_jobs_run_in_the_namespace_of_the_release_only_where_that_is_asked_for():
    def namespaces(*arguments):
        return {each["metadata"]["namespace"] for each in objects(render(arguments)) if each["kind"] == "Role"}

    assert namespaces() == {"thinwire-jobs"}
    assert namespaces("--set", "kuberay.sharedNamespace=true") == {"thinwire"}
    assert namespaces("--set", "kuberay.sharedNamespace=true,kuberay.namespace=thinwire") == {"thinwire"}
    shared = objects(render(["--set", "kuberay.sharedNamespace=true"]))
    (deployment,) = (each for each in shared if each["kind"] == "Deployment")
    env = {one["name"]: one.get("value") for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert (env["THINWIRE_KUBERAY_NAMESPACE"], env["THINWIRE_KUBERAY_SHARED_NAMESPACE"]) == ("thinwire", "true")


def test_the_ingress_may_lead_from_below_a_path():
    def paths(*more):
        text = render(["--values", str(VALUES["ingress"]), *more])
        (found,) = [one for one in objects(text) if one["kind"] == "Ingress"]
        return [(one["path"], one["pathType"]) for one in found["spec"]["rules"][0]["http"]["paths"]]

    assert paths() == [("/", "Prefix")]
    below = ("--set", "ingress.path=/thinwire/(.*)", "--set", "ingress.pathType=ImplementationSpecific")
    assert paths(*below) == [("/thinwire/(.*)", "ImplementationSpecific")]
    with pytest.raises(RenderRefused, match="path"):
        paths("--set", "ingress.path=thinwire")


def test_each_namespace_of_a_project_has_the_rights_and_the_policies_of_the_first():
    found = objects(rendered("namespaces"))

    def of(namespace):
        """The objects there that are of jobs."""
        kinds = ("Role", "RoleBinding", "NetworkPolicy")
        there = [one for one in found if one["kind"] in kinds and one["metadata"]["namespace"] == namespace]
        return [(one["kind"], one["metadata"]["name"], one.get("rules") or one.get("spec")) for one in there]

    assert len(of("1234")) == 4
    assert of("1234") == of("ml-vision") == of("ml-text")  # two projects in one namespace: once
    (deployment,) = (one for one in found if one["kind"] == "Deployment")
    env = {one["name"]: one.get("value") for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    told = json.loads(env["THINWIRE_KUBERAY_NAMESPACES"])
    assert told == {"vision": "ml-vision", "text": "ml-text", "speech": "ml-text"}
    policies = [one for one in found if one["kind"] == "NetworkPolicy"]
    service = Pod(
        "thinwire",
        {"app.kubernetes.io/name": "thinwire", "app.kubernetes.io/instance": "thinwire"},
        ports={"http": 8400},
    )
    workers = [Pod(name, {"ray.io/is-ray-node": "yes"}) for name in ("1234", "ml-vision", "ml-text", "ml-other")]
    assert [reaches(policies, worker, service, 8400) for worker in workers] == [True, True, True, False]
    assert not reaches(policies, workers[0], workers[1], 6379)


def test_the_plain_manifests_are_what_the_chart_renders():
    manifest = ROOT / "deploy/manifests/thinwire.yaml"
    assert manifest.read_text() == render(), "make manifests"


def test_monitors_look_for_labels_and_ports_that_are_there():
    found = objects(rendered("ingress"))
    service = next(each for each in found if each["kind"] == "Service")
    monitor = next(each for each in found if each["kind"] == "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["endpoints"]] == [port["name"] for port in service["spec"]["ports"]]
    assert (
        next(each for each in found if each["kind"] == "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"]
        == "metrics"
    )


def test_the_scrape_configuration_asks_the_service_for_the_workers():
    found = objects(rendered("ingress"))
    (scraped,) = (each["spec"] for each in found if each["kind"] == "ScrapeConfig")
    service = next(each for each in found if each["kind"] == "Service")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    (discovery,) = scraped["httpSDConfigs"]
    assert discovery["url"] == f"http://{name}.thinwire:{port}/v1/metrics/targets"
    assert discovery["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "prometheus-token", "key": "viewer"},
    }


def test_the_scrape_configuration_takes_from_workers_what_the_plain_one_takes():
    (scraped,) = (each["spec"] for each in objects(rendered("ingress")) if each["kind"] == "ScrapeConfig")
    plain = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]

    def camel(found):
        """As the operator's objects write it."""
        if isinstance(found, list):
            return [camel(one) for one in found]
        if not isinstance(found, dict):
            return found
        return {re.sub("_([a-z])", lambda match: match[1].upper(), key): camel(value) for key, value in found.items()}

    same = {"sample_limit", "label_limit", "label_name_length_limit", "label_value_length_limit", "honor_timestamps"}
    assert camel({key: plain[key] for key in same}).items() <= scraped.items()
    assert scraped["relabelings"] == camel(plain["relabel_configs"])
    assert scraped["metricRelabelings"] == camel(plain["metric_relabel_configs"])
    assert plain["sample_limit"] >= most_series(1)  # of the one that leads


def test_the_dashboards_of_the_chart_are_those_that_are_tested():
    found = objects(rendered("ingress"))
    (brought,) = (each for each in found if each["metadata"]["name"] == "thinwire-dashboards")
    assert brought["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {
        f"thinwire-{path.stem}.json": json.loads(path.read_text()) for path in (ROOT / "deploy/grafana").glob("*.json")
    }
    assert {name: json.loads(text) for name, text in brought["data"].items()} == files


def test_the_rules_of_the_chart_are_those_that_are_tested_with_runbooks_where_they_are_kept():
    found = [each for each in objects(rendered("ingress")) if each["kind"] == "PrometheusRule"]
    files = [ROOT / f"deploy/prometheus/{name}.yaml" for name in ("recording", "alerts")]
    there = "runbook_url: https://git.example.org/thinwire/docs/"
    expected = [yaml.safe_load(file.read_text().replace("runbook_url: docs/", there)) for file in files]
    assert [each["spec"] for each in found] == expected
    assert len({each["metadata"]["name"] for each in found}) == 2


def test_a_service_whose_token_comes_from_a_secret_knows_that():
    for name, source in (("ingress", "Secret thinwire-token"), ("as-it-is", None)):
        (found,) = (each for each in objects(rendered(name)) if each["kind"] == "Deployment")
        env = {one["name"]: one.get("value") for one in found["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert env.get("THINWIRE_OPERATOR_TOKEN_FROM") == source


def test_another_template_starts_the_pods_anew():
    hashes = [re.findall(r"thinwire/template: (.*)", rendered(name))[0] for name in ("as-it-is", "template")]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor", "ScrapeConfig", "PrometheusRule"])
def test_an_error_in_an_object_of_the_operator_is_found(kind):
    found = next(each for each in objects(rendered("ingress")) if each["kind"] == kind)
    assert complaints(found, NEWEST) == []
    found["spec"]["relabeling"] = []
    assert any("relabeling" in each for each in complaints(found, NEWEST))
    found["apiVersion"] = "monitoring.coreos.com/v2"
    assert complaints(found, NEWEST) == [f"monitoring.coreos.com has no {kind} in v2"]


def test_the_role_gives_the_launcher_what_it_needs_and_no_more():
    role = next(found for found in objects(rendered("as-it-is")) if found["kind"] == "Role")
    given = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    # Kueue may not be there, so the launcher does not insist on that right.
    needed = {(group, resource): set(verbs) for group, resource, verbs in (*NEEDED, POLICIES)}
    assert given == needed | {("kueue.x-k8s.io", "workloads"): {"list"}}


def test_what_is_added_to_the_pods_of_jobs_is_what_the_launcher_reads(tmp_path):
    """And the chart's defaults are the launcher's, except for what GPUs of clouds are tainted with."""
    read = {}
    for name in ("as-it-is", "guarded", "template"):
        (found,) = (each for each in objects(rendered(name)) if each["metadata"]["name"] == "thinwire-rayjob")
        (tmp_path / name).write_text(found["data"]["pods.yaml"])
        read[name] = read_pods(tmp_path / name)
    assert read["as-it-is"] == read["template"]
    plain = read["as-it-is"].gpu.tolerations
    assert plain == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert read["as-it-is"].model_copy(update={"gpu": Places()}) == Pods()
    guarded = read["guarded"]
    assert guarded.priorityClassName == "training"
    assert {one["name"] for one in guarded.env} >= {
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "AWS_CA_BUNDLE",
        "AWS_REGION",
    }
    assert [one["name"] for one in guarded.volumes] == ["ca-bundle", "data"]
    assert guarded.gpu.nodeSelector == {"pool": "gpus"}


def test_the_service_has_what_a_platform_asks_of_every_deployment():
    found = objects(rendered("guarded"))
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    box = pod["containers"][0]
    env = {one["name"]: one for one in box["env"]}
    assert len(env) == len(box["env"])
    assert env["OTEL_HEADERS"]["valueFrom"] == {"secretKeyRef": {"name": "otel", "key": "headers"}}
    assert env["SSL_CERT_FILE"]["value"] == "/etc/thinwire/ca-bundle/ca.crt"
    assert env["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert env["THINWIRE_PEER_HOST"]["value"] == "$(POD_IP)"
    assert [one["name"] for one in box["env"]].index("POD_IP") < [one["name"] for one in box["env"]].index(
        "THINWIRE_PEER_HOST"
    )
    mounted = {one["name"]: one["mountPath"] for one in box["volumeMounts"]}
    assert {"keys", "ca-bundle", "template"} <= mounted.keys() <= {one["name"] for one in pod["volumes"]}
    assert pod["priorityClassName"] == "system-services"
    (spread,) = pod["topologySpreadConstraints"]
    assert (
        spread["labelSelector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    one = "topologySpreadConstraints[0]"
    more = ["maxSkew=1", "topologyKey=a", "whenUnsatisfiable=DoNotSchedule", "labelSelector.matchLabels.b=c"]
    text = render(["--set", ",".join(f"{one}.{each}" for each in more)])
    (other,) = (each for each in objects(text) if each["kind"] == "Deployment")
    (own,) = other["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert own["labelSelector"] == {"matchLabels": {"b": "c"}}  # as it was asked for
    (account,) = (each for each in found if each["kind"] == "ServiceAccount")
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/thinwire"}
    assert deployment["metadata"]["annotations"] == {"example.org/owner": "platform"}
    (budget,) = (each["spec"] for each in found if each["kind"] == "PodDisruptionBudget")
    assert (budget["maxUnavailable"], budget["selector"]) == (1, deployment["spec"]["selector"])
