"""The Grafana dashboard asks for metrics that the server has, by labels that they have."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server_process import ROOT

from jaxsgl.frontend.metrics.exposition import registry_of
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.messages.replies import STEP_BOUNDS_S, BucketTimes, Load, SpeculationTotals, pack_times

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana" / "jaxsgl.json").read_text())
OF_PROMETHEUS = {"instance", "job"}  # labels that Prometheus adds when it scrapes


def exposed() -> dict[str, set[str]]:
    """Name of each sample -> its labels, as a server exposes them."""
    times = [BucketTimes(kind, "16", [1] * (len(STEP_BOUNDS_S) + 1), 1.0) for kind in ("decode", "extend")]
    drafts = SpeculationTotals(1, 2, 1, (1,), {"not_proposed": 1})
    load = Load(step_times=pack_times(times), speculation=drafts)
    metrics = Metrics(lambda: load)
    metrics.failed(ValueError())
    labels: dict[str, set[str]] = defaultdict(set)
    for family in parse_text(prometheus_client.generate_latest(registry_of(metrics, "m")).decode()):
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return labels


def queries() -> Iterator[tuple[str, str, str]]:
    """(title, query, legend) of all panels and variables."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"], ""


def problems(query: str, legend: str, known: dict[str, set[str]]) -> list[str]:
    """What is wrong with a query, in words."""
    plain = re.sub(r'"[^"]*"', '""', query)
    selectors = re.findall(r"([a-z_]\w*:?\w+)\s*(?:\{([^}]*)\})?", re.sub(r"by \([^)]*\)", "", plain))
    names = [(name, matchers) for name, matchers in selectors if name in known or ":" in name or "process_" in name]
    found = [f"unknown metric {name}" for name, _ in names if name not in known]
    labels = {label for name, _ in names for label in known.get(name, set())} | OF_PROMETHEUS
    asked = re.findall(r"(\w+)\s*=", " ".join(matchers for _, matchers in names))
    grouped = [label for group in re.findall(r"by \(([^)]*)\)", plain) for label in re.split(r",\s*", group)]
    shown = re.findall(r"\{\{(\w+)\}\}", legend)
    found += [f"unknown label {label}" for label in {*asked, *grouped, *shown} - labels]
    found += [f"the legend shows {label}, which the query sums away" for label in shown if label not in grouped]
    if not names:
        found.append("no metric")
    if "histogram_quantile" in query and not ("_bucket" in query and "le" in grouped):
        found.append("a quantile of what is no histogram by le")
    return found


@pytest.mark.parametrize(("title", "query", "legend"), list(queries()))
def test_every_query_finds_its_metrics_and_labels(title: str, query: str, legend: str) -> None:
    assert not problems(query, legend, exposed())


def test_wrong_queries_would_be_found() -> None:
    known = exposed()
    assert problems("sum(rate(sglang:no_such_total[5m]))", "", known)
    assert problems("sum by (colour) (sglang:num_running_reqs)", "", known)
    assert problems('sum(sglang:num_running_reqs{colour="red"})', "", known)
    assert problems("sum(sglang:num_running_reqs)", "{{model_name}}", known)
    assert problems("histogram_quantile(0.5, sum by (le) (rate(sglang:queue_time_seconds_count[5m])))", "", known)


def test_panels_have_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(places)) == len(places)
