"""The scripts of examples/launch as a cluster runs them.

srun, scontrol and torchrun are replaced by scripts that record their arguments. The replaced torchrun starts the real
program, in one process.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import fsspec
import programs
import pytest
import yaml
from test_remote_checkpoints import s3_server  # noqa: F401 (a fixture)
from train_cases import SMALL_RUN

from megalite.config.cli import parse_args

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples/launch"
SRUN = """echo "srun $*" >>"$NOTES"; while [[ $1 == --* ]]; do shift; done; exec "$@" """
GETENT = """echo 127.0.0.1"""  # every name resolves to this node, so that it is the first node
SCONTROL = """echo "scontrol $*" >>"$NOTES"; [ "$1 $2" != "show hostnames" ] || printf 'node-a\\nnode-b\\n'"""
TORCHRUN = """echo "torchrun $*" >>"$NOTES"; echo "grace $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >>"$NOTES"; while [[ $1 == --* ]]; do shift; done
if [ -n "${LEAVES:-}" ]; then mkdir -p "$3"; printf '%s' "$LEAVES" >"$3/status.json"; exit "${CODE:-1}"; fi
python "$@" & child=$!
trap 'kill -TERM $child' TERM; trap 'kill -USR1 $child' USR1
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
[ $code = 0 ]"""  # like torchrun, which exits with 0 or 1 only


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job."""
    for name, script in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN, "getent": GETENT}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    return {**os.environ, **job, "PATH": path, "NOTES": str(tmp_path / "notes"), "SLURM_NTASKS_PER_NODE": "1"}


def start_script(name: str, *args: str, env: dict[str, str]) -> AbstractContextManager[subprocess.Popen[str]]:
    return programs.program_session(["bash", f"examples/launch/{name}", *args], env=env)


def calls_of(env: dict[str, str], command: str) -> list[str]:
    return [line for line in Path(env["NOTES"]).read_text().splitlines() if line.startswith(command)]


def status_json(outcome: str) -> str:
    return json.dumps(dict(outcome=outcome, step=4, reason='it said "outcome": "requeue"')) + "\n"


@pytest.mark.parametrize(
    "outcome,further,requeued",
    [
        ("requeue", False, True),
        ("crash", True, True),
        ("crash", False, False),
        ("hang", True, True),
        ("running", True, True),
        ("running", False, False),
        ("", False, False),  # no status was written
        *((outcome, True, False) for outcome in ("done", "usage", "preflight", "bad-result", "interrupted")),
    ],
)
def test_requeue_decision_by_outcome(tmp_path: Path, outcome: str, further: bool, requeued: bool) -> None:
    script = "source examples/launch/outcome.sh; begin $1; "
    script += "printf '%s' \"$2\" >$1/status.json; " if outcome else ""
    script += "echo 5 >$1/latest_checkpointed_iteration.txt; " if further else ""
    (tmp_path / "status.json").write_text(
        status_json("requeue").replace("4", "3")
    )  # the status of the previous attempt
    argv = ["bash", "-c", f"{script} worth_another $1", "-", str(tmp_path), status_json(outcome)]
    assert (subprocess.run(argv, cwd=ROOT, timeout=20).returncode == 0) is requeued


@pytest.mark.parametrize("count,requeued", [("0", True), ("49", True), ("50", False)])
def test_number_of_requeues_is_bounded(tmp_path: Path, cluster: dict[str, str], count: str, requeued: bool) -> None:
    env = {**cluster, "LEAVES": status_json("requeue"), "SLURM_RESTART_COUNT": count}
    with start_script("slurm.sh", str(tmp_path / "run"), "--lr", "1", env=env) as job:
        out, _ = job.communicate(timeout=30)
    assert calls_of(env, "scontrol requeue") == (["scontrol requeue 77"] if requeued else []), out
    [line] = calls_of(env, "torchrun")
    assert "--nnodes=2 " in line and "--rdzv-endpoint=node-a:29500 --rdzv-id=77 " in line
    assert line.endswith(f"pretrain_gpt.py --save {tmp_path}/run --load {tmp_path}/run --lr 1")


TORCH_2_11_FLAGS = """nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval
 signals-to-handle standalone node-rank master-addr master-port local-addr""".split()


def test_torchrun_flags_exist_in_every_release(tmp_path: Path, cluster: dict[str, str], monkeypatch) -> None:
    """The lowest supported torch has no --shutdown-timeout: it would print its usage and end."""
    from torch.distributed.run import config_from_args, get_args_parser

    env = {**cluster, "LEAVES": status_json("done"), "CODE": "0", "FIRST": "node-a", "NNODES": "1:4", "NPROC": "8"}
    with start_script("torchrun.sh", str(tmp_path / "run"), "--lr", "1", env=env) as job:
        assert job.wait(timeout=30) == 0
    args = calls_of(env, "torchrun")[0].split()[1:]
    flags = [arg[2:].partition("=")[0] for arg in args[: args.index("pretrain_gpt.py")]]
    assert len(flags) >= 8 and [flag for flag in flags if flag not in TORCH_2_11_FLAGS] == []
    [grace] = calls_of(env, "grace")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace.split()[1])
    namespace = get_args_parser().parse_args(args)
    assert namespace.training_script_args == ["--save", f"{tmp_path}/run", "--load", f"{tmp_path}/run", "--lr", "1"]
    config, _, _ = config_from_args(namespace)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 4, 8, 10)
    assert config.rdzv_configs["last_call_timeout"] == "30" and config.rdzv_configs["join_timeout"] == "900"
    assert "SIGUSR1" in config.signals_to_handle and getattr(config, "shutdown_timeout", 540) == 540


def test_launch_page_lists_the_script_variables() -> None:
    texts = "".join(file.read_text() for file in LAUNCH.glob("*.sh"))
    defaults = dict(re.findall(r"\$\{([A-Z]\w*):-([^}$]*)\}", texts))
    script_defaults = {name: default for name, default in defaults.items() if not name.startswith(("SLURM", "PET"))}
    page = (ROOT / "docs/launch.md").read_text().partition("## Variables of the scripts")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", page, re.MULTILINE))
    assert rows.keys() == script_defaults.keys() | {"FIRST", "NNODES"}
    assert {name: rows[name].strip("`") for name in script_defaults if script_defaults[name].isdigit()} == {
        name: default for name, default in script_defaults.items() if default.isdigit()
    }


def test_one_task_per_gpu_needs_no_torchrun(tmp_path: Path, cluster: dict[str, str]) -> None:
    env = {**cluster, "SLURM_NTASKS_PER_NODE": "8"}
    with start_script("slurm.sh", str(tmp_path / "run"), "--help", env=env) as job:
        out, _ = job.communicate(timeout=60)
    [line] = calls_of(env, "srun")
    run = f"pretrain_gpt.py --save {tmp_path}/run --load {tmp_path}/run --help"
    assert line == f"srun --kill-on-bad-exit=1 python {run}"
    assert job.returncode == 0 and "usage: pretrain_gpt.py" in out and not calls_of(env, "torchrun")


def wait_for_step(run_dir: Path, step: int, job: subprocess.Popen[str]) -> int:
    """Wait until the job has reached a step, and return the id of the training process."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and job.poll() is None:
        with suppress(OSError, ValueError, IndexError):
            row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
            if row["step"] >= step:
                return json.loads((run_dir / "status.json").read_text())["pid"]
        time.sleep(0.05)
    raise AssertionError(job.communicate(timeout=5)[0])


@pytest.mark.nightly(guards=("examples/launch",))
@pytest.mark.parametrize("case", ["done", "signal", "killed", "no data"])
def test_slurm_job_exit_codes(tmp_path: Path, cluster: dict[str, str], case: str) -> None:
    """The status is the one that the program wrote."""
    run_dir = tmp_path / "run"
    flags = [*SMALL_RUN, "--device", "cpu", "--save-interval", "2", "--train-iters", "2" if case == "done" else "99999"]
    if case == "no data":
        flags = [flag for flag in flags if flag != "--mock-data"] + ["--data-path", str(tmp_path / "nothing")]
        run_dir.mkdir()
    with start_script("slurm.sh", str(run_dir), *flags, env=cluster) as job:
        if case not in ("done", "no data"):
            pid = wait_for_step(run_dir, 4, job)
            os.kill(job.pid, signal.SIGUSR1) if case == "signal" else os.kill(pid, signal.SIGKILL)
        out, _ = job.communicate(timeout=60)
    requeued = case in ("signal", "killed")
    assert calls_of(cluster, "scontrol requeue") == (["scontrol requeue 77"] if requeued else []), out
    expected = {"done": "done", "signal": "requeue", "no data": "preflight"}.get(case, "running")
    assert json.loads((run_dir / "status.json").read_text())["outcome"] == expected, out
    assert job.returncode == {"done": 0, "no data": 1}.get(case, 75), out


def test_node_waits_for_the_first_node(tmp_path: Path, cluster: dict[str, str]) -> None:
    """The script waits, since torchrun waits only 60 s, and pods start when their images are pulled."""
    (tmp_path / "getent").write_text("#!/bin/sh\necho 192.0.2.7\n")  # an address of another machine
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = {**cluster, "LEAVES": status_json("done"), "CODE": "0", "FIRST": "localhost", "PORT": str(port)}
    with start_script("torchrun.sh", str(tmp_path / "run"), "--lr", "1", env=env) as job:
        time.sleep(3)
        assert job.poll() is None and not (tmp_path / "notes").exists()
        with socket.create_server(("127.0.0.1", port)):
            out, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and f"waits up to 900 s for the first node, localhost:{port}" in out
    assert calls_of(env, "torchrun")
    with start_script("torchrun.sh", str(tmp_path / "run"), env=env | {"START_WITHIN": "2"}) as job:
        assert job.wait(timeout=60) == 0  # torchrun itself reports that nothing answers
    (tmp_path / "getent").write_text("#!/bin/sh\nhostname -I | tr ' ' '\\n'\n")  # addresses of this machine
    with start_script("torchrun.sh", str(tmp_path / "run"), env=env) as job:
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and "waits" not in out


def job_of(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the Job (batch/v1) of a manifest, and the environment that the cluster gives its second pod.

    For a TrainJob this does what Kubeflow Trainer 2.3 does (pkg/runtime/framework/plugins: torch/torch.go and
    jobset/builder.go).
    """
    documents = {document["kind"]: document for document in yaml.safe_load_all((LAUNCH / name).read_text())}
    pod_env = {"JOB_COMPLETION_INDEX": "1"}
    if "JobSet" in documents:
        assert documents["JobSet"]["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        [replicated] = documents["JobSet"]["spec"]["replicatedJobs"]
        assert replicated["replicas"] == 1
        return replicated["template"]["spec"], pod_env
    assert {document["apiVersion"] for document in documents.values()} == {"trainer.kubeflow.org/v1alpha1"}
    runtime, train_job = documents["TrainingRuntime"], documents["TrainJob"]
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert train_job["spec"]["runtimeRef"] == reference
    assert "torch" in runtime["spec"]["mlPolicy"] and "trainer.kubeflow.org/framework" in runtime["metadata"]["labels"]
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template, trainer = replicated["template"], train_job["spec"]["trainer"]
    assert replicated["name"] == "node" and template["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    containers = template["spec"]["template"]["spec"]["containers"]
    [container] = [container for container in containers if container["name"] == "node"]
    container |= {name: trainer[name] for name in ("command", "args", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    nodes, job_name = trainer["numNodes"], train_job["metadata"]["name"]
    pod_env |= {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1"}
    pod_env |= {"PET_MASTER_ADDR": f"{job_name}-node-0-0.{job_name}", "PET_MASTER_PORT": "29500"}
    assert not pod_env.keys() & {variable["name"] for variable in container["env"]}  # Trainer refuses such variables
    return template["spec"] | {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"}, pod_env


@pytest.mark.parametrize("name", ["kubernetes.yaml", "jobset.yaml"])
def test_kubernetes_example_starts(name: str, tmp_path: Path, cluster: dict[str, str], monkeypatch) -> None:
    from torch.distributed.run import config_from_args, get_args_parser

    job, pod_env = job_of(name)
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    uid_gid = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1]
    assert pod["securityContext"] == {"runAsNonRoot": uid_gid[0] != "0", "fsGroup": int(uid_gid[1])}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert not parse_args(container["args"]).problems
    container_env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert container_env["NPROC"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (job["completionMode"], job["completions"]) == ("Indexed", job["parallelism"])
    assert int(container_env["NNODES"].rpartition(":")[2]) == job["completions"]
    grace = int(dict(re.findall(r"(GRACE):-(\d+)", (LAUNCH / "torchrun.sh").read_text()))["GRACE"])
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] > grace

    disrupted, final = job["podFailurePolicy"]["rules"]
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert final["action"] == "FailJob" and final["onExitCodes"]["operator"] == "In"
    assert final["onExitCodes"]["containerName"] == container["name"]
    codes = {}
    for outcome in ("done", "requeue", "preflight"):
        env = {
            **cluster,
            **container_env,
            **pod_env,
            "LEAVES": status_json(outcome),
            "CODE": "0" if outcome == "done" else "1",
        }
        command = [arg.replace("/checkpoints", str(tmp_path)) for arg in container["command"]]
        codes[outcome] = subprocess.run([*command, *container["args"]], cwd=ROOT, env=env, timeout=30).returncode
        (tmp_path / "run/status.json").unlink()
    values = final["onExitCodes"]["values"]
    assert codes["done"] == 0 and codes["requeue"] not in {0, *values} and codes["preflight"] in values
    assert not {137, 143} & {
        *values
    }  # killed, for example when memory is short: a crash, after which the job starts again
    line = calls_of(cluster, "torchrun")[0]
    assert "--nnodes=1:2 --nproc-per-node=8 " in line and "--rdzv-endpoint=megalite-node-0-0.megalite:29500 " in line
    for variable, value in pod_env.items():  # torchrun reads PET_... too
        monkeypatch.setenv(variable, value)
    config, _, _ = config_from_args(get_args_parser().parse_args(line.split()[1:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "megalite-node-0-0.megalite:29500")


def test_kubernetes_examples_start_the_same_pods() -> None:
    (trainer_job, _), (jobset_job, _) = job_of("kubernetes.yaml"), job_of("jobset.yaml")
    containers = [job["template"]["spec"].pop("containers")[0] for job in (trainer_job, jobset_job)]
    assert trainer_job == jobset_job
    ports, env = containers[1].pop("ports"), containers[1]["env"].pop(0)
    assert containers[0] == containers[1]
    # Trainer adds these
    assert ports == [{"containerPort": 29500}] and env == {"name": "FIRST", "value": "megalite-node-0-0.megalite"}


def skypilot(home_dir: Path) -> tuple[str, dict[str, str]]:
    """Return the command of the nodes of skypilot.yaml, and their environment."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    env = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n", "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2], "SKYPILOT_TASK_ID": "t1"}
    return task["run"], {**env, **task["envs"], "HOME": str(home_dir)}


def test_skypilot_example_starts(tmp_path: Path, cluster: dict[str, str]) -> None:
    command, sky_env = skypilot(tmp_path)
    env = {**cluster, **sky_env, "LEAVES": status_json("done"), "CODE": "0"}
    assert subprocess.run(["bash", "-euc", command], cwd=ROOT, env=env, timeout=30).returncode == 0
    [line] = calls_of(env, "torchrun")
    assert "--nnodes=2 --nproc-per-node=8 " in line and "--rdzv-endpoint=10.0.0.5:29500 --rdzv-id=t1 " in line
    args = parse_args(shlex.split(line.partition("pretrain_gpt.py ")[2]))
    assert not args.problems
    bucket = "s3://megalite-checkpoints/run"
    assert (args.values["save"], args.values["load"], args.values["run_dir"]) == (bucket, bucket, f"{tmp_path}/run")


@pytest.mark.nightly(guards=("examples/launch",))
@pytest.mark.usefixtures("s3_server")
def test_skypilot_resumes_from_the_bucket_on_new_nodes(tmp_path: Path, cluster: dict[str, str]) -> None:
    command, sky_env = skypilot(tmp_path)
    flags = shlex.join([*SMALL_RUN, "--device", "cpu", "--lr-decay-iters", "4"])
    bucket = "s3://runs/skypilot"
    for steps, message in (("2", "starts from scratch"), ("4", "at step 2")):
        run = command.replace("--config run.toml", f"{flags} --train-iters {steps}")
        env = {**cluster, **sky_env, "CHECKPOINTS": bucket}
        result = subprocess.run(["bash", "-euc", run], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
        assert result.returncode == 0 and message in result.stdout, result.stdout + result.stderr
        assert fsspec.filesystem("s3", skip_instance_cache=True).exists(f"{bucket}/iter_000000{steps}/COMPLETE")
        shutil.rmtree(tmp_path / "run")


RAY = '''
"""A stand-in for Ray: tasks are threads; what Ray is asked for goes to NOTES."""
import json, os, threading, types

class RayError(Exception): ...
exceptions = types.SimpleNamespace(RayError=RayError)
losses = int(os.environ.get("LOSES", "0"))  # times that the second node is lost

def note(line):
    with open(os.environ["NOTES"], "a") as file:
        file.write(line + "\\n")

def init(): note("ray init")

class Task:
    def __init__(self, call): self.thread, self.result = threading.Thread(target=self.run, args=(call,)), None; self.thread.start()
    def run(self, call):
        try: self.result = call()
        except Exception as error: self.result = error

def get(task):
    task.thread.join()
    if isinstance(task.result, Exception): raise task.result
    return task.result

def remote(function):
    def options(scheduling_strategy, **options):
        def call(*args):
            global losses
            node = scheduling_strategy.index
            note(f"ray task {function.__name__} {node} {json.dumps(options)}")
            result = function(*args)
            if function.__name__ == "run_node" and node == 1 and losses:
                losses -= 1
                raise RayError("the node died")
            return result
        return types.SimpleNamespace(remote=lambda *args: Task(lambda: call(*args)))
    return types.SimpleNamespace(options=options)
'''
RAY_UTIL = {
    "__init__": "def get_node_ip_address(): return '10.0.0.5'\n",
    "placement_group": """import ray, types
def placement_group(bundles, strategy):
    ray.note(f"ray group {strategy} {bundles}")
    return types.SimpleNamespace(ready=lambda: ray.Task(lambda: None))
def remove_placement_group(group): ray.note("ray removed")
""",
    "scheduling_strategies": """class PlacementGroupSchedulingStrategy:
    def __init__(self, placement_group, placement_group_bundle_index): self.index = placement_group_bundle_index
""",
}


@pytest.mark.parametrize(
    ("outcome", "code", "losses", "attempts", "exit_code"),
    [
        ("done", 0, 0, 1, 0),
        ("preflight", 1, 0, 1, 1),
        ("requeue", 1, 0, 2, 75),  # until REQUEUES
        ("done", 0, 1, 2, 0),  # a node is lost once
    ],
)
def test_ray_example_starts(
    tmp_path: Path, cluster: dict[str, str], outcome: str, code: int, losses: int, attempts: int, exit_code: int
) -> None:
    package = tmp_path / "ray"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text(RAY)
    for name, source in RAY_UTIL.items():
        (package / f"util/{name}.py").write_text(source)
    # Both nodes start before one of them ends, and each attempt writes a status of its own.
    script = 'sleep 0.6; LEAVES="$LEAVES $(date +%s%N)"'
    (tmp_path / "torchrun").write_text(f"#!/usr/bin/env bash\n{script}\n{TORCHRUN}\n")
    env = {**cluster, "PYTHONPATH": str(tmp_path), "NNODES": "2", "NPROC": "4", "REQUEUES": "1"}
    env |= {"LEAVES": status_json(outcome), "CODE": str(code), "LOSES": str(losses)}
    command = [sys.executable, "examples/launch/ray_job.py", str(tmp_path / "run"), "--lr", "1"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == exit_code, result.stdout + result.stderr
    lines = calls_of(env, "torchrun")
    assert len(lines) == 2 * attempts
    for line in lines:
        assert "--nnodes=2 --nproc-per-node=4 " in line and "--rdzv-endpoint=10.0.0.5:29500 " in line
        assert line.endswith(f"pretrain_gpt.py --save {tmp_path}/run --load {tmp_path}/run --lr 1")
    assert calls_of(env, "ray group") == attempts * [
        "ray group STRICT_SPREAD [{'CPU': 1, 'GPU': 4}, {'CPU': 1, 'GPU': 4}]"
    ]
    tasks = [line.split(maxsplit=4) for line in calls_of(env, "ray task run_node")]
    assert sorted(node for _, _, _, node, _ in tasks) == sorted(["0", "1"] * attempts)
    options = {"num_cpus": 1, "num_gpus": 4, "max_retries": 0}
    assert all(json.loads(text) == options for *_, text in tasks)
    assert len(calls_of(env, "ray removed")) == attempts
