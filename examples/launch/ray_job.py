"""Start a run on the nodes of a Ray cluster, with one torchrun per node.

    NNODES=2 NPROC=8 python examples/launch/ray_job.py DIR FLAGS

All nodes must have the repository at the same path, and DIR, which is --save and --load, on a file system that they
share. Ray only places one task per node; ranks, restarts and the rendezvous are torchrun's (torchrun.sh). A run that is
worth another start, or that lost a node, is started again on the nodes that Ray has then. To stop it after a save:
touch DIR/stop.
"""

import os
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SCRIPT = Path(__file__).resolve().with_name("torchrun.sh")
AGAIN = 75  # torchrun.sh exits with it if the run is worth another start


def address() -> str:
    """Return the address of this task's node."""
    return ray.util.get_node_ip_address()


def run_node(args: list[str], environment: dict[str, str]) -> int:
    """Run torchrun.sh on this task's node and return its exit code."""
    command = ["bash", str(SCRIPT), *args]
    return subprocess.run(command, env={**os.environ, **environment}, cwd=SCRIPT.parents[2]).returncode


def exit_code(node) -> int | None:
    """Wait for the task of a node and return the exit code of torchrun.sh, None if the node was lost."""
    try:
        return ray.get(node)
    except ray.exceptions.RayError as error:
        print(f"ray_job.py: {error}", file=sys.stderr)
        return None


def run_once(args: list[str], num_nodes: int, num_procs: int) -> int:
    """Run on `num_nodes` nodes, as soon as the cluster has them, and return the exit code of the run."""
    group = placement_group([{"CPU": 1, "GPU": num_procs}] * num_nodes, strategy="STRICT_SPREAD")  # a bundle per node
    print(f"ray_job.py: waits for {num_nodes} nodes with {num_procs} GPUs each", file=sys.stderr)
    ray.get(group.ready())

    def task(function, node: int):  # without retries: torchrun's rendezvous needs all nodes of an attempt
        placement = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node)
        options = {"num_cpus": 1, "num_gpus": num_procs, "max_retries": 0, "scheduling_strategy": placement}
        return ray.remote(function).options(**options)

    try:
        first = ray.get(task(address, 0).remote())
        environment = {"FIRST": first, "NNODES": str(num_nodes), "NPROC": str(num_procs)}
        nodes = [task(run_node, node).remote(args, environment) for node in range(num_nodes)]
        codes = [exit_code(node) for node in nodes]  # all of them: an attempt must not meet the end of the one before
    finally:
        remove_placement_group(group)
    if None in codes:
        return AGAIN
    return next((code for code in codes if code not in (0, AGAIN)), max(codes))


def main() -> int:
    """Run until the run is done, or not worth another start, at most REQUEUES times more; return its exit code."""
    if len(sys.argv) < 2:
        raise SystemExit("ray_job.py: DIR, the run directory, is missing: NNODES=2 python ray_job.py DIR FLAGS")
    num_nodes, num_procs = int(os.environ.get("NNODES", "1")), int(os.environ.get("NPROC", "8"))
    ray.init()
    for _ in range(int(os.environ.get("REQUEUES", "50")) + 1):
        code = run_once(sys.argv[1:], num_nodes, num_procs)
        if code != AGAIN:
            break
    return code


if __name__ == "__main__":
    raise SystemExit(main())
