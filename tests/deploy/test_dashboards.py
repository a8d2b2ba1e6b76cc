"""The dashboards are what their lists say, every expression parses, and they are provisioned.

That each expression names what a cluster really exports: tests/e2e/up/test_baton_up.py.
"""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from deploy import dashboards
from deploy.dashboard_panels import DASHBOARDS, Dashboard

DEPLOY = Path(dashboards.__file__).parent
GRAFANA = DEPLOY / "grafana"


def test_the_files_are_current(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dashboards.main(["--check"]) == 0
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    assert dashboards.main(["--check"]) == 1
    assert "cluster.json" in capsys.readouterr().out
    assert dashboards.main([]) == 0
    assert dashboards.main(["--check"]) == 0


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_every_expression_parses_and_fits_its_legend(dashboard: Dashboard) -> None:
    for panel in dashboard.panels:
        for legend, expression in panel.queries.items():
            promql_parser.parse(expression.replace("$__rate_interval", "1m"))
            for label in re.findall(r"{{(\w+)}}", legend):
                by = re.findall(r"by \(([\w, ]+)\)", expression)
                assert not by or all(label in group for group in by), (panel.title, label)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_a_page_is_whole(dashboard: Dashboard) -> None:
    page = json.loads(dashboards.to_json(dashboard))
    assert page["uid"] == dashboard.uid
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in page["panels"]]
    assert len(set(places)) == len(dashboard.panels)
    assert all(x + 8 <= 24 for x, _ in places)
    titles = [panel["title"] for panel in page["panels"]]
    assert len(set(titles)) == len(titles)
    assert all(panel["description"] and panel["targets"] for panel in page["panels"])


def test_the_containers_have_them() -> None:
    """Every panel's data source is the one provisioned, the files lie where it says."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    mounts = dict(mount.split(":")[:2] for mount in service["volumes"])
    for source in ("./grafana/provisioning", "./grafana/dashboards"):
        assert (DEPLOY / source).is_dir()
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/baton.yml").read_text())
    assert provider["providers"][0]["options"]["path"] == mounts["./grafana/dashboards"]
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == mounts["./grafana/dashboards"]
    assert (GRAFANA / "dashboards" / home.name).exists()
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    pages = [json.loads(file.read_text()) for file in (GRAFANA / "dashboards").glob("*.json")]
    assert len(pages) == len(DASHBOARDS)
    used = {panel["datasource"]["uid"] for page in pages for panel in page["panels"]}
    assert used == {source["uid"]}
