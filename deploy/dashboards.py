"""`python -m deploy.dashboards [--check]`: Grafana's dashboards, from deploy/dashboard_panels.py.

Grafana wants a page of JSON for each panel; what differs from panel to panel is a title, a unit
and an expression or two, and that is what stands there. The files in `deploy/grafana/dashboards`
are what this module writes; `--check` says with exit status 1 that one of them is not.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.dashboard_panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent / "grafana" / "dashboards"

_WIDTH, _HEIGHT = 8, 8
"""Of a panel, on a grid that is 24 wide."""

_Json = dict[str, object]


def to_json(dashboard: Dashboard) -> str:
    panels = [_panel(index, panel) for index, panel in enumerate(dashboard.panels)]
    page: _Json = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["baton"],
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "schemaVersion": 41,
        "links": [
            {"type": "dashboards", "title": "Baton", "tags": ["baton"], "keepTime": True},
        ],
        "panels": panels,
    }
    return json.dumps(page, indent=1) + "\n"


def files() -> Iterator[tuple[Path, str]]:
    for dashboard in DASHBOARDS:
        yield FOLDER / f"{dashboard.uid.removeprefix('baton-')}.json", to_json(dashboard)


def _panel(index: int, panel: Panel) -> _Json:
    per_row = 24 // _WIDTH
    custom = {"fillOpacity": 25, "stacking": {"mode": "normal"}} if panel.stack else {}
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "baton"},
        "gridPos": {
            "x": index % per_row * _WIDTH,
            "y": index // per_row * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}} if panel.kind != "stat" else {},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    only_checks: bool = parser.parse_args(argv).check
    stale = [path for path, text in files() if not path.exists() or path.read_text() != text]
    if not only_checks:
        for path, text in files():
            path.write_text(text)
    for path in stale:
        print(
            f"{path.name} {'is not what deploy/dashboards.py says' if only_checks else 'written'}"
        )
    return 1 if only_checks and stale else 0


if __name__ == "__main__":
    sys.exit(main())
