"""A cut link between prefill and decode, in network namespaces of our own (Linux, root, `ip`): see partition_lab.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netns import missing
from shoal.model_files import write_random_model
from tests.e2e.conftest import command_environment
from tests.e2e.harness import TRANSFER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

LATE_S = 2.0  # for two busy cores


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_cut_link_is_noticed_frees_both_ends_and_heals(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "tests.e2e.partition_lab", str(tmp_path), str(model)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=command_environment(), cwd=root)
    assert ended.returncode == 0, ended.stderr[-12_000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps(told, indent=1))
    legs, routed = told["legs"], told["routed"]
    for end in ("prefill", "decode"):
        assert legs[end]["code"] == "UNAVAILABLE"
        assert legs[end]["after_s"] < TRANSFER.peer_timeout_s + LATE_S
        assert legs[end]["free_after_s"] < TRANSFER.peer_timeout_s + TRANSFER.message_timeout_s(1 << 20) + LATE_S
    assert legs["while_cut"] in ("Unavailable", "DeadlineExceeded")
    assert legs["same_tokens_after"]
    assert told["pairs"] == {"made": 2, "closed": 1}  # each made pair has an epoch of its own, never used again
    assert routed["decode_worker"] != routed["struck"] and routed["num_retries"] == 1 and len(routed["notices"]) == 1
    assert routed["tokens"] == legs["tokens"]
