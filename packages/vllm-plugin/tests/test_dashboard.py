from __future__ import annotations

import json
import re
from pathlib import Path

from vllm_drafter.metrics import METRICS

DOCS = Path(__file__).resolve().parents[3] / "docs"


def exported() -> set[str]:
    names = set()
    for name, (kind, _) in METRICS.items():
        endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
        names |= {f"vllm_drafter_{name}{ending}" for ending in endings[kind]}
    return names


def test_every_metric_that_the_dashboard_names_is_exported():
    text = (DOCS / "grafana.json").read_text()
    json.loads(text)
    named = set(re.findall(r"vllm_drafter_\w+", text))
    assert len(named) > 15
    assert named <= exported()


def test_every_metric_is_on_the_dashboard():
    text = (DOCS / "grafana.json").read_text()
    assert [name for name in METRICS if f"vllm_drafter_{name}" not in text] == []


def test_every_metric_is_explained_with_its_type():
    text = (DOCS / "metrics.md").read_text()
    for name, (kind, _) in METRICS.items():
        total = "_total" if kind == "counter" else ""
        assert f"| `vllm_drafter_{name}{total}` | {kind} | " in text
