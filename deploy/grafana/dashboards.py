"""Write the three dashboards beside this file as Grafana takes them: `python deploy/grafana/dashboards.py`.

A panel is a line here and forty in JSON. No datasource is named in them: `datasource` is a variable of each dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 39  # Grafana 11; newer ones take it over
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8  # of 24 columns: three panels a row
OF_JOB = 'job_id="$job"'


@dataclass(frozen=True)
class Panel:
    """queries: (PromQL, legend). unit: one of Grafana's names."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""
    custom: dict[str, Any] = field(default_factory=dict)


STACKED = {"stacking": {"mode": "normal"}, "fillOpacity": 60}
BARS = {"drawStyle": "bars", "fillOpacity": 60}

FLEET = [
    Panel("Jobs by state", [("max by (state) (thinwire_service_jobs) > 0", "{{state}}")], custom=STACKED),
    Panel("Alerts", [('count(ALERTS{alertname=~"Thinwire.*", alertstate="firing"}) or vector(0)', "")], kind="stat"),
    Panel("Jobs that are not over", [("max by (job_id, name, state) (thinwire_service_job_info)", "")], kind="table"),
    Panel("Goodput", [("thinwire:goodput:ratio10m", "{{job_id}}")], "percentunit", text="Share of the time in steps"),
    Panel("Since the last step", [("max by (job_id) (thinwire_service_job_step_age_seconds)", "{{job_id}}")], "s"),
    Panel(
        "Workers",
        [
            ("sum(max by (job_id) (thinwire_service_job_workers))", "training"),
            ("sum(max by (job_id) (thinwire_service_job_workers_min))", "at least"),
            ("sum(max by (job_id) (thinwire_service_job_workers_max))", "at most"),
        ],
    ),
    Panel("Workers that are waited for", [("max by (job_id) (thinwire_service_job_missing_workers)", "{{job_id}}")]),
    Panel("Compression", [("min by (job_id) (thinwire_compression_ratio)", "{{job_id}}")], text="fp32 over bytes sent"),
    Panel("Payload sent", [("thinwire:wire_bytes:rate5m", "{{job_id}}")], "Bps", custom=STACKED),
    Panel("Changes of workers, last hour", [("thinwire:regroups:increase1h", "{{job_id}}")]),
    Panel("Share of the slowest worker", [("max by (job_id) (thinwire_slowest_ratio)", "{{job_id}}")], "percentunit"),
    Panel("Age of the last checkpoint", [("max by (job_id) (thinwire_checkpoint_age_seconds)", "{{job_id}}")], "s"),
]


def of_job(metric: str, by: str = "", *more: str) -> str:
    """The largest over the workers, or over those of one value of a label."""
    return f"max{f' by ({by}) ' if by else ' '}({metric}{{{', '.join((OF_JOB, *more))}}})"


def rate(metric: str, by: str = "", *more: str) -> str:
    """A second, over the workers that are scraped."""
    selected = f"{metric}{{{', '.join((OF_JOB, *more))}}}"
    return f"sum{f' by ({by}) ' if by else ' '}(rate({selected}[$__rate_interval]))"


SENT = f'rate(thinwire_wire_bytes_total{{{OF_JOB}, purpose="optimizer"}}[$__rate_interval])'

JOB = [
    Panel("Loss", [(of_job("thinwire_loss"), "training"), (of_job("thinwire_validation_loss"), "validation")]),
    Panel("Phase", [(of_job("thinwire_phase", "phase"), "{{phase}}")], custom=STACKED),
    Panel(
        "Step", [(of_job("thinwire_step"), "made"), (of_job("thinwire_service_job_planned_steps"), "planned")], "none"
    ),
    Panel("Compression", [(of_job("thinwire_compression_ratio", "rank"), "worker {{rank}}")]),
    Panel(
        "Payload against dense fp32",
        [
            (f"sum({SENT})", "sent"),
            (f"sum({SENT} * on (job_id, rank) thinwire_compression_ratio{{{OF_JOB}}})", "a ring all-reduce of fp32"),
        ],
        "Bps",
    ),
    Panel("Payload by purpose", [(rate("thinwire_wire_bytes_total", "purpose"), "{{purpose}}")], "Bps", custom=STACKED),
    Panel("Payload by link", [(rate("thinwire_link_bytes_total", "link"), "{{link}}")], "Bps", custom=STACKED),
    Panel(
        "Frames between boxes",
        [
            (rate("thinwire_wire_counted_bytes_total"), "counted by the interface"),
            (rate("thinwire_wire_predicted_bytes_total"), "predicted by the ledger"),
        ],
        "Bps",
        text="Only where THINWIRE_WIRE_INTERFACE names an interface",
    ),
    Panel("Rounds skipped", [(rate("thinwire_rounds_skipped_total"), "a second")]),
    Panel(
        "Step time",
        [(of_job("thinwire_step_seconds"), "measured"), (of_job("thinwire_predicted_step_seconds"), "predicted")],
        "s",
    ),
    Panel(
        "Step time by part",
        [
            (
                f"thinwire:step_part:ratio5m{{{OF_JOB}}} * on (job_id) group_left () "
                f"thinwire:step_seconds:mean5m{{{OF_JOB}}}",
                "{{part}}",
            )
        ],
        "s",
        text="On CPUs alone",
        custom=STACKED,
    ),
    Panel("Throughput", [(of_job("thinwire_samples_per_second"), "samples/s")]),
    Panel(
        "Workers",
        [
            (of_job("thinwire_world_size"), "training"),
            (of_job("thinwire_service_job_workers_min"), "at least"),
            (of_job("thinwire_service_job_workers_max"), "at most"),
        ],
        text="A join is a step up, a death or a leave a step down",
        custom={"lineInterpolation": "stepAfter"},
    ),
    Panel(
        "Joins and deaths",
        [
            (f"max(increase(thinwire_regroups_total{{{OF_JOB}}}[$__rate_interval]))", "changes of workers"),
            (of_job("thinwire_service_job_missing_workers"), "workers waited for"),
        ],
        custom=BARS,
    ),
    Panel(
        "What changes cost",
        [
            (of_job("thinwire_regroup_seconds"), "seconds of the last change"),
            (of_job("thinwire_error_lost_norm"), "norm of the error memory that it lost"),
            (of_job("thinwire_steps_given_up_total"), "steps run again"),
        ],
    ),
    Panel("Goodput", [(f"thinwire:goodput:ratio10m{{{OF_JOB}}}", "share of the time in steps")], "percentunit"),
    Panel(
        "For whom the others wait",
        [(of_job("thinwire_last_ratio", "rank"), "worker {{rank}}"), (of_job("thinwire_slowest_ratio"), "the slowest")],
        "percentunit",
    ),
    Panel("Waiting for the exchange", [(of_job("thinwire_exchange_wait_seconds", "rank"), "worker {{rank}}")], "s"),
    Panel(
        "Error memory over an exchange",
        [(f"thinwire:error_to_momentum:ratio{{{OF_JOB}}}", "error to momentum")],
        text="1 to 2 is normal. A rise that does not end is not",
    ),
    Panel("Sign density", [(of_job("thinwire_sign_density_ratio", "side"), "{{side}}")], "percentunit"),
    Panel("Largest step over the learning rate", [(of_job("thinwire_max_step_ratio"), "max step")]),
    Panel(
        "Checkpoints",
        [
            (of_job("thinwire_checkpoint_age_seconds"), "age of the last"),
            (
                f"{of_job('thinwire_checkpoint_interval_steps')} * max(thinwire:step_seconds:mean5m{{{OF_JOB}}})",
                "interval",
            ),
        ],
        "s",
    ),
    Panel("Numbers of the script", [(of_job("thinwire_reported", "name"), "{{name}}")]),
    Panel("The slowest worker", [(of_job("thinwire_slowest_worker"), "its number")], "none", "stat"),
]

P99 = "histogram_quantile(0.99, sum by (le{by}) (rate({metric}_bucket[$__rate_interval])))"
CONTROL_PLANE = [
    Panel(
        "Requests",
        [("sum by (method, route, status) (rate(thinwire_service_requests_total[$__rate_interval]))", "")],
        "reqps",
    ),
    Panel(
        "Slowest requests, p99",
        [(P99.format(by=", route", metric="thinwire_service_request_seconds"), "{{route}}")],
        "s",
    ),
    Panel(
        "Errors",
        [('sum(rate(thinwire_service_requests_total{status=~"5.."}[$__rate_interval])) or vector(0)', "5xx a second")],
        "reqps",
    ),
    Panel(
        "Turn of the reconciler, p99", [(P99.format(by="", metric="thinwire_service_reconcile_seconds"), "p99")], "s"
    ),
    Panel("Since its last turn", [("thinwire_service_reconcile_age_seconds", "{{instance}}")], "s"),
    Panel("Turns", [("sum(rate(thinwire_service_reconcile_seconds_count[$__rate_interval]))", "a second")]),
    Panel("Launcher ready", [("max by (launcher) (thinwire_service_launcher_ready)", "{{launcher}}")], kind="stat"),
    Panel(
        "Since the launcher answered",
        [("min by (launcher) (thinwire_service_launcher_answer_age_seconds)", "{{launcher}}")],
        "s",
    ),
    Panel("Jobs by state", [("max by (state) (thinwire_service_jobs)", "{{state}}")]),
    Panel("Workers that are scraped", [("count by (job_id) (thinwire_step)", "{{job_id}}")]),
    Panel("Series of each job", [('count by (job_id) ({__name__=~"thinwire_.+", rank!=""})', "{{job_id}}")]),
]

JOB_VARIABLE = {
    "name": "job",
    "label": "Job",
    "type": "query",
    "datasource": SOURCE,
    "query": {"query": "label_values(thinwire_step, job_id)", "refId": "job"},
    "refresh": 2,
    "sort": 2,
}


def dashboard(name: str, panels: Sequence[Panel], variables: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """One dashboard, as Grafana imports it."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    other = {"type": "dashboards", "title": "Thinwire", "tags": ["thinwire"], "includeVars": True, "keepTime": True}
    return {
        "id": None,
        "uid": f"thinwire-{name}",
        "title": f"Thinwire: {name.replace('-', ' ')}",
        "tags": ["thinwire"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [other],
        "templating": {"list": [source, *variables]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, 24 // WIDTH)
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": panel.custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
                **({"instant": True, "format": "table"} if panel.kind == "table" else {}),
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


DASHBOARDS = {
    "fleet": dashboard("fleet", FLEET),
    "job": dashboard("job", JOB, [JOB_VARIABLE]),
    "control-plane": dashboard("control-plane", CONTROL_PLANE),
}


def as_json(name: str) -> str:
    """The file of this name."""
    return json.dumps(DASHBOARDS[name], indent=2) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (Path(__file__).parent / f"{name}.json").write_text(as_json(name))
