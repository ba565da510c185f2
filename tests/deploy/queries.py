"""Every query of the dashboards and the rules, as somebody asks them who looks at one job."""

from __future__ import annotations

import json
import re
import socket

import yaml

from tests.deploy.rendering import ROOT

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "deploy/grafana").glob("*.json"))}
RULES = [
    rule
    for path in sorted((ROOT / "deploy/prometheus").glob("*.yaml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
OF_SCRIPTS_ALONE = {"job: Numbers of the script: A"}
"""Queries that a recipe has no numbers for."""
WIRE_INTERFACE = next((name for _, name in sorted(socket.if_nameindex()) if name != "lo"), "")
"""Whose frames are counted: whichever there is. Two workers of one box send none over it, and so none are predicted."""


def of_dashboards() -> dict[str, str]:
    """By dashboard, panel and letter."""
    return {
        f"{name}: {panel['title']}: {target['refId']}": target["expr"]
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


def of_rules() -> dict[str, str]:
    """What is recorded, as it is; of an alert, which is to have no answer, each metric that it asks for."""
    found = {f"rule {rule['record']}": rule["expr"] for rule in RULES if "record" in rule}
    for rule in RULES:
        if "alert" in rule:
            found |= {f"alert {rule['alert']}: {name}": name for name in sorted(metrics_in(rule["expr"]))}
    return found


def metrics_in(query: str) -> set[str]:
    """The names of metrics and of recorded ones."""
    return set(re.findall(r"\bthinwire[\w:]*", re.sub(r'"[^"]*"', "", query)))


def filled_in(query: str, job_id: str, interval: str) -> str:
    """With what Grafana puts in the place of its variables."""
    return query.replace("$job", job_id).replace("$__rate_interval", interval)
