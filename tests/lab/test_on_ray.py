"""On a Ray cluster of two machines: whatever dies in the middle, no run is lost or done twice."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from smoke_runs import command, lines

from msvit_lab.folder_lock import find_holder
from msvit_lab.interrupts import RESUME_CODE
from msvit_lab.training.state import read_step

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
pytest.importorskip("ray", reason="Ray is not installed; pip install 'msvit[ray]'")
STARTED = 180.0  # seconds for the processes of a cluster to import everything
SWEEP = ["sweep", "scenes", "--smoke", "--target", "0.25", "--gate-weight", "20", "--dense-sizes", "64", "--from-dense"]
LONG = ["--set", "optim.epochs=60", "--set", "checkpoint_every=10", "--set", "log_every=1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a driver that uses two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)  # of the nodes and their workers, too
        node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}
        nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        nodes.add_node(**node)
        yield {"RAY_ADDRESS": nodes.address}
        nodes.shutdown()


def start(cluster: dict[str, str], *arguments: object) -> subprocess.Popen:
    about = command(*arguments)
    about["env"] |= cluster
    return subprocess.Popen(**about, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def finish(cluster: dict[str, str], *arguments: object, code: int = 0) -> str:
    process = start(cluster, *arguments)
    output = process.communicate(timeout=2 * STARTED)[0]
    assert process.returncode == code, output
    return output


def wait_for(what: Callable[[], object], process: subprocess.Popen) -> object:
    end = time.monotonic() + STARTED
    while not (found := what()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.02)
    return found


def workers(kind: str) -> list[int]:
    """Processes of this cluster that do something of this name: Ray writes it into their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(folder.name)
            if (folder / "cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found += [pid] if parent(parent(pid)) == os.getpid() else []  # of a node that was started here
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def whole_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    finish({}, *SWEEP, *LONG, "--out", out)
    return out


@pytest.mark.parametrize("victim", ["worker", "driver", "interrupt"])
def test_a_killed_process_loses_no_run_and_metrics_are_those_of_a_plain_sweep(cluster, whole_sweep, tmp_path, victim):
    arguments = [*SWEEP, *LONG, "--out", tmp_path / "cut", "--on", "ray"]
    process = start(cluster, *arguments)
    run = tmp_path / "cut/dense-64-s0"
    wait_for(lambda: (run / "checkpoint.safetensors").is_file() and read_step(run / "checkpoint.safetensors"), process)
    holder = find_holder(run)
    assert holder.pid != process.pid
    if victim == "worker":
        assert holder.pid in workers("train")
        os.kill(holder.pid, signal.SIGKILL)
        output = process.communicate(timeout=2 * STARTED)[0]
        assert process.returncode == 0, output
    else:
        step = read_step(run / "checkpoint.safetensors")
        process.send_signal(signal.SIGKILL if victim == "driver" else signal.SIGINT)
        output = process.communicate(timeout=STARTED)[0]
        if victim == "interrupt":
            assert process.returncode == RESUME_CODE, output
            assert find_holder(run) is None
            assert read_step(run / "checkpoint.safetensors") == lines(run, "train")[-1]["step"] >= step
        finish(cluster, *arguments)
    for name in ("dense-64-s0", "t0.25-w20-s0"):
        ours, theirs = tmp_path / "cut" / name, whole_sweep / name
        weights, wanted = (load_file(folder / "model/model.safetensors") for folder in (ours, theirs))
        assert all(torch.equal(weights[key], wanted[key]) for key in wanted)
        assert lines(ours) == lines(theirs), "no line is there twice"
        values = [json.loads((folder / "evaluations/val.json").read_text()) for folder in (ours, theirs)]
        assert values[0]["top1"] == values[1]["top1"]
    assert not list((tmp_path / "cut").rglob(".*"))


def test_ray_starts_here_where_there_is_no_cluster(tmp_path):
    finish({"RAY_ADDRESS": "local"}, *SWEEP, "--out", tmp_path, "--on", "ray")
    assert (tmp_path / "t0.25-w20-s0/evaluations/val.json").is_file()
