"""The rules for Prometheus: each alert fires on what it is for and on nothing else, and says what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from tests.conftest import missing
from tests.deploy.rendering import ROOT

RULES = ROOT / "deploy/prometheus"
CASES = Path(__file__).parent / "prometheus"


def rules(name: str) -> list[dict]:
    return [rule for group in yaml.safe_load((RULES / name).read_text())["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yaml")}


def promtool(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        missing("promtool is not installed: apt install prometheus")
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def test_promtool_takes_the_rules():
    done = promtool("check", "rules", *(str(path) for path in sorted(RULES.glob("*.yaml"))))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["healthy.yaml", "firing.yaml"])
def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(case):
    done = promtool("test", "rules", str(CASES / case))
    assert done.returncode == 0, done.stdout + done.stderr


def asked_otherwise(tmp_path: Path, alerts: Iterable[str], expr: str, case: str) -> str:
    """What promtool says of the case where these alerts ask something else; empty where it finds nothing wrong."""
    for folder, source in (("deploy/prometheus", RULES), ("tests/deploy/prometheus", CASES)):
        shutil.copytree(source, tmp_path / folder, dirs_exist_ok=True)
    written = yaml.safe_load((RULES / "alerts.yaml").read_text())
    for rule in (rule for group in written["groups"] for rule in group["rules"] if rule["alert"] in alerts):
        rule["expr"] = expr
    (tmp_path / "deploy/prometheus/alerts.yaml").write_text(yaml.safe_dump(written))
    done = promtool("test", "rules", str(tmp_path / "tests/deploy/prometheus" / case))
    return "" if done.returncode == 0 else done.stdout + done.stderr


EACH = [list(ALERTS), *(pytest.param([alert], marks=pytest.mark.slow) for alert in ALERTS)]
"""promtool takes a second: all at once, and each alone in make test-all."""


@pytest.mark.parametrize("alerts", EACH, ids=" ".join)
def test_an_alert_that_never_fires_is_found(tmp_path, alerts):
    told = asked_otherwise(tmp_path, alerts, "vector(1) > 2", "firing.yaml")
    assert [alert for alert in alerts if alert not in told] == []


@pytest.mark.parametrize("alerts", EACH, ids=" ".join)
def test_an_alert_that_always_fires_is_found(tmp_path, alerts):
    told = asked_otherwise(tmp_path, alerts, "vector(1)", "healthy.yaml")
    assert "FAILED" in told
    assert [alert for alert in alerts if alert not in told] == []


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_leads_to_a_paragraph_that_says_what_to_do(alert):
    annotations = ALERTS[alert]["annotations"]
    path, _, anchor = annotations["runbook_url"].partition("#")
    assert anchor in anchors(ROOT / path)
    text = (ROOT / path).read_text().split(f"#### {alert}\n", 1)[1].split("\n#", 1)[0]
    assert len(text) > 150, "a runbook of one line"
    assert annotations["summary"]
    assert ALERTS[alert]["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("alert", ALERTS)
def test_each_threshold_has_its_reason_beside_it(alert):
    lines = (RULES / "alerts.yaml").read_text().splitlines()
    assert lines[lines.index(f"      - alert: {alert}") - 1].startswith("      # ")
