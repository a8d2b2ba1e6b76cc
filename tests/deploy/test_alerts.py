"""The alert rules are valid, fire when they should, and watch metrics that are there."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def promtool(*arguments: str | Path) -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_is_valid() -> None:
    """The rules that it names included."""
    promtool("check", "config", DEPLOY / "prometheus.yml")
    assert "10 rules found" in promtool("check", "rules", DEPLOY / "alerts.yml")


def test_each_rule_fires_for_what_it_is_for() -> None:
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))


def test_rules_watch_what_is_there() -> None:
    """Every metric that a rule names is made somewhere, under that very name."""
    sources = "\n".join(
        path.read_text() for folder in ("router", "deploy") for path in (ROOT / folder).glob("*.py")
    )
    made = set(re.findall(r'"(baton_\w+)"', sources))
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        for name in re.findall(r"baton_\w+", rule["expr"]):
            assert name in made or name.removesuffix("_total") in made, name


def test_the_containers_have_the_rules() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounts = compose["services"]["prometheus"]["volumes"]
    assert "./alerts.yml:/etc/prometheus/alerts.yml:ro" in mounts
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
