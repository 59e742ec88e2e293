"""Two Ray nodes in network namespaces of our own: prefill in one, decode in the other, the router in a third (root, `ip`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netns import missing
from shoal.engine.local import LocalRequest
from shoal.model_files import write_random_model
from shoal.types import SamplingParams
from shoal.visibility import Visibility
from tests.e2e.conftest import command_environment
from tests.e2e.served import local

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_request_over_two_nodes_equals_a_single_process(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "benchmarks.namespaces", "--check", "--model", str(model), "--lengths", "60"]
    command += ["--dtype", "float32", "--visibilities", "full,speed:2", "--log", str(tmp_path / "log")]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=command_environment(), cwd=root)
    log = tmp_path / "log"
    assert ended.returncode == 0, ended.stderr[-4000:] + (log.read_text()[-8000:] if log.exists() else "")
    if ended.stdout.startswith("skipped: "):
        pytest.skip(ended.stdout.strip())
    told = json.loads(ended.stdout)
    for pool in ("prefill", "decode"):  # each worker bound the address of the node that has its label
        assert told["placed"][f"{pool}-0"].startswith(told["addresses"][pool] + ":")
    assert told["prefill_at"] == "prefill_worker" and 0 < told["payload_bytes"] == told["plan_bytes"] < told["sent"]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    [expected] = local(model, [LocalRequest(tuple(told["prompt"]), Visibility.parse(told["visibility"]), sampling)])
    assert told["tokens"] == list(expected.token_ids)
