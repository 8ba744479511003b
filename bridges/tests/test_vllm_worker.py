"""A real vLLM on a CPU answers, where it is installed: bridges/rollouts_by_a_server.md says how."""
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from bridges.http_client import Client
from bridges.remote_rollouts import RolloutServer
from conftest import ROOT
from engine.errors import UserError
from runs import SHORT, free_port, lines, run

pytestmark = pytest.mark.skipif(not find_spec("vllm") or torch.cuda.is_available(),
                                reason="starts a vLLM for CPUs")
WORKER = ["--worker-cls", "bridges.vllm_worker.Worker"]


@contextmanager
def vllm(log, *options):
    """The address of a server of models/tiny."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
               ROOT / "models/tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype",
               "float32", "--enforce-eager", *options]
    settings = dict(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH=str(ROOT))
    with open(log, "w") as written:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=written,
                                   stderr=written, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(address, process, log):
    while process.poll() is None:
        try:
            return Client("--rollouts", address, 60.0).get("/v1/models")
        except UserError:
            time.sleep(1)
    pytest.fail(log.read_text()[-2000:])


def test_with_our_worker_vllm_has_the_weights_of_each_step(tmp_path):
    with vllm(tmp_path / "log", *WORKER) as address:
        assert "done." in run(*SHORT, "--rollouts", address, "--out", tmp_path / "x").stdout
    gaps = [line["sampler_gap"] for line in lines(tmp_path / "x/metrics.jsonl")]
    assert len(gaps) == 3 and max(gaps) < 1e-5


def test_old_weights_and_a_folder_that_vllm_does_not_see_end_the_run(tmp_path, monkeypatch):
    """The first half fails where vLLM no longer keeps an old output matrix: then our worker is of
    no more use."""
    with vllm(tmp_path / "log") as address:
        argv = [*SHORT, "--rollouts", address, "--out", tmp_path / "x"]
        said = run(*argv, expect=1).stderr
        assert "it has not all of the weights that it was told to load" in said
        assert len(lines(tmp_path / "x/metrics.jsonl")) == 1
        ask = RolloutServer.ask_to_load
        monkeypatch.setattr(RolloutServer, "ask_to_load",
                            lambda server, path: ask(server, f"/elsewhere{path}"))
        said = run("--resume", tmp_path / "x", expect=1).stderr
        assert "does the server see /elsewhere" in said and "start it again" in said
