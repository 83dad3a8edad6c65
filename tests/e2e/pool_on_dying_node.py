"""Plays episodes in a pool on the second node of a Ray cluster, and ends that node meanwhile: `pool_on_dying_node.py`.

Writes what was observed after it, and what the pool counted, as JSON.
"""

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(RAY_AUTH_MODE="disabled", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_USAGE_STATS_ENABLED="0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages" / "unirl-rollout" / "tests"))

import ray
from ray.cluster_utils import Cluster

from unirl.distributed.group.ray_hosting import HostingPlan, RayHostedPool
from unirl.rollout.environments.pool_member import PoolMember
from unirl.rollout.environments.pooled import PooledEnvironments

NODE: Any = {"num_cpus": 1, "object_store_memory": 100 << 20}

cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
ray.init(address=cluster.address, log_to_driver=False)
second = cluster.add_node(**NODE)
cluster.wait_for_nodes()
here = ray.get_runtime_context().get_node_id()
nodes = [here, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)]
pool = RayHostedPool.started(HostingPlan("env", functools.partial(PoolMember, 2), nodes=[1]), nodes, 120.0)
counting = importlib.import_module("played_environments").Counting()
workers: Any = PooledEnvironments(counting, pool, at="turns", step_timeout_s=60.0)
names = [f"e{number}" for number in range(4)]
workers.reset({name: ({}, 10 * number) for number, name in enumerate(names)})
workers.step(dict.fromkeys(names, "ab"))
cluster.remove_node(second)
observed = [step.observation for step in workers.step(dict.fromkeys(names, "c")).values()]
sys.stdout.write(json.dumps({"observed": observed, "restarts": pool.gauges()["restarts"]}) + "\n")
pool.close()
ray.shutdown()
cluster.shutdown()
