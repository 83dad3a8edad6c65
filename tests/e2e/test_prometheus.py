"""A real Prometheus scrapes a run, and every panel of the dashboard finds something in it."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from unirl.tracking.prometheus import PrometheusTracker
from unirl.types.errors import ConfigError

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
CONFIG = {"recipe": "worlds/test", "seed": 1, "num_rollouts": 40}
METRICS = {
    "reward/mean": 1.5,
    "reward/shapes/mean": 1.5,
    "eval/reward": 1.2,
    "perf/samples_per_s": 40.0,
    "timing_s/rollout": 2.0,
    "timing_s/train": 1.0,
    "perf/pool/rollout/busy_s": 2.0,
    "perf/pool/rollout/members": 2.0,
    "perf/pool/rollout/restarts": 1.0,
    "schedule/lag/oldest": 1.0,
    "policy/first_ratio_max_abs_dev": 0.0,
    "train/grad_norm": 0.4,
    "group/zero_std_ratio": 0.1,
    "sync/megabytes": 168.0,
}


@pytest.fixture
def tracker(tmp_path):
    tracker = PrometheusTracker(port=0)
    tracker.start(CONFIG, tmp_path, 0)
    yield tracker
    tracker.close()


def fetched(address):
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read().decode()


def scraped(tracker):
    """Sample -> value."""
    lines = fetched(f"http://127.0.0.1:{tracker.port}/metrics").splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and line[0] != "#"}


def test_what_adds_up_is_counted_and_everything_is_a_gauge(tracker):
    tracker.log(METRICS, 1)
    tracker.log(METRICS | {"reward/mean": 1.75, "timing_s/train": 3.0}, 2)
    tracker.alert("zero_gradient", "no weight moves", 2)
    found = scraped(tracker)
    assert found["unirl_rollouts"] == 2 and found["unirl_rollouts_planned"] == 40
    assert found['unirl_metric{name="reward/mean"}'] == found['unirl_reward_mean{scorer=""}'] == 1.75
    assert found['unirl_reward_mean{scorer="shapes"}'] == 1.5
    assert found['unirl_phase_seconds_total{phase="train"}'] == 4
    assert found["unirl_pushed_bytes_total"] == 2 * 168e6
    assert found['unirl_pool_busy_seconds_total{pool="rollout"}'] == 4
    assert found['unirl_pool_members{pool="rollout"}'] == 2 and found['unirl_pool_restarts{pool="rollout"}'] == 1
    assert found['unirl_staleness_versions{request="oldest"}'] == 1
    assert found['unirl_alarms_total{alarm="zero_gradient"}'] == 1
    assert any(name.startswith("unirl_run_info{") and 'recipe="worlds/test"' in name for name in found)


def test_a_run_that_starts_its_workers_again_serves_at_the_same_port(tmp_path):
    tracker = PrometheusTracker(port=0)
    tracker.start(CONFIG, tmp_path, 0)
    again = PrometheusTracker(port=tracker.port)
    tracker.close()
    again.start(CONFIG, tmp_path, 3)
    try:
        assert scraped(again)["unirl_rollouts"] == 3
    finally:
        again.close()
        again.close()


def test_a_taken_port_is_named_with_what_to_do(tracker, tmp_path):
    other = PrometheusTracker(port=tracker.port)
    with pytest.raises(ConfigError, match=r"cannot serve at 127.0.0.1:\d+: .*Set trackers.prometheus.port to a free"):
        other.start(CONFIG, tmp_path, 0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def prometheus(tracker, tmp_path):
    """Asks a real Prometheus that scrapes the tracker every second."""
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("needs the package prometheus of Debian")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(MONITORING / "alarms.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{tracker.port}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [program, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"])

    def ask(path):
        deadline = time.monotonic() + 60
        while True:
            try:
                return json.loads(fetched(f"http://127.0.0.1:{port}/api/v1/{path}"))["data"]
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    yield ask
    process.terminate()
    process.wait(timeout=30)


@pytest.mark.slow
def test_every_panel_and_rule_finds_what_a_real_prometheus_has_scraped(tracker, prometheus):
    dashboard = json.loads((MONITORING / "grafana_dashboard.json").read_text())
    assert {"title", "uid", "schemaVersion", "templating", "panels"} <= set(dashboard)
    queries = {
        (panel["title"], target["expr"].replace("$instance", ".*"))
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    assert len(queries) >= len(dashboard["panels"]) > 10
    tracker.alert("zero_gradient", "no weight moves", 1)
    deadline, step = time.monotonic() + 60, 0
    empty = queries
    while empty and time.monotonic() < deadline:
        step += 1
        tracker.log(METRICS, step)
        time.sleep(1)
        empty = {
            (title, query)
            for title, query in empty
            if not prometheus(f"query?query={urllib.parse.quote(query)}")["result"]
        }
    assert not empty
    rules = {rule["name"]: rule for group in prometheus("rules")["groups"] for rule in group["rules"]}
    assert set(rules) == {"RunStandsStill", "RunAlarm", "EnginesRestart", "SamplesTeachNothing"}
    assert {rule["health"] for rule in rules.values()} <= {"ok", "unknown"}
