"""The dashboards: what Grafana imports, made of what dashboards.py says, asking only for what is exported."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

from tests.deploy.queries import DASHBOARDS, RULES, filled_in, metrics_in, of_dashboards
from tests.deploy.rendering import ROOT
from tests.deploy.test_rules import promtool
from thinwire.contract.metric_names import METRICS
from thinwire.service.metrics import HELP

FOLDER = ROOT / "deploy/grafana"
OF_THE_SERVICE = {
    *(f"thinwire_service_job_{name}" for name in HELP),
    *(f"thinwire_service_{name}" for name in ("jobs", "launcher_ready", "launcher_answer_age_seconds")),
    *(
        f"thinwire_service_{name}"
        for name in ("token_expires_at_seconds", "disk_free_bytes", "disk_bytes", "database_ready", "spans_total")
    ),
    "thinwire_service_reconcile_age_seconds",
    "thinwire_service_requests_total",
    *(
        f"thinwire_service_{name}_seconds_{part}"
        for name in ("request", "reconcile")
        for part in ("bucket", "count", "sum")
    ),
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_the_three_dashboards_are_there_as_their_script_writes_them():
    made = runpy.run_path(str(FOLDER / "dashboards.py"))
    assert set(DASHBOARDS) == set(made["DASHBOARDS"]) == {"fleet", "job", "control-plane"}
    for name in DASHBOARDS:
        assert (FOLDER / f"{name}.json").read_text() == made["as_json"](name), "python deploy/grafana/dashboards.py"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_that_grafana_imports_anywhere(name):
    dashboard = DASHBOARDS[name]
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["title"]
    assert dashboard["uid"] == f"thinwire-{name}"
    assert len({other["uid"] for other in DASHBOARDS.values()}) == len(DASHBOARDS)
    panels = dashboard["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert panel["datasource"] == SOURCE
        assert all(target["datasource"] == SOURCE for target in panel["targets"])
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
    used = {name for query in of_dashboards().values() for name in re.findall(r"\$(\w+)", query)}
    assert used <= {"__rate_interval", "job"}
    assert ("job" in variables) == (name == "job")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_two_panels_overlap(name):
    taken = set()
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] <= 24 - at["w"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", ["job"])
def test_the_jobs_dashboard_shows_what_was_asked_for(name):
    shown = set().union(
        *(metrics_in(query) for where, query in of_dashboards().items() if where.startswith(f"{name}:"))
    )
    asked = (
        "loss phase compression_ratio wire_bytes_total world_size regroups_total error_to_momentum_ratio step_seconds"
    )
    shown |= {f"thinwire_{one}" for one in ("error_to_momentum_ratio",) if "thinwire:error_to_momentum:ratio" in shown}
    assert {f"thinwire_{one}" for one in asked.split()} | {"thinwire:step_part:ratio5m"} <= shown


def test_every_query_asks_for_metrics_that_are_exported_or_recorded():
    known = set(METRICS) | OF_THE_SERVICE | {rule["record"] for rule in RULES if "record" in rule}
    queries = [*of_dashboards().values(), *(rule["expr"] for rule in RULES)]
    for query in queries:
        assert metrics_in(query) - {"thinwire_"} <= known, query


def test_promtool_takes_every_query(tmp_path):
    rules = [
        {"record": f"q{number}", "expr": filled_in(query, "a", "1m")}
        for number, query in enumerate(of_dashboards().values())
    ]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", str(tmp_path / "queries.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def configuration(folder: Path) -> Path:
    """prometheus.yml with its rules, and token files that are there."""
    shutil.copytree(ROOT / "deploy/prometheus", folder, dirs_exist_ok=True)
    file = folder / "prometheus.yml"
    for name in ("token", "ray-token"):
        (folder / name).write_text("a token")
    file.write_text(file.read_text().replace("/etc/thinwire/", f"{folder}/"))
    return file


def test_promtool_takes_the_plain_configuration(tmp_path):
    done = promtool("check", "config", str(configuration(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def test_an_error_in_the_plain_configuration_is_found(tmp_path):
    file = configuration(tmp_path)
    file.write_text(file.read_text().replace("http_sd_configs", "http_sd_config", 1))
    assert promtool("check", "config", str(file)).returncode != 0
