"""docs/api.md names everything that exists, and its Python example runs."""

import asyncio
import contextlib
import io
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from shoal.pb.v1 import shoal_pb2
from shoal.router.main import command
from shoal.rpc.status import STATUS_OF
from tests.fakes.cluster import Cluster

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def messages() -> list[Descriptor]:
    return [d for d in shoal_pb2.DESCRIPTOR.message_types_by_name.values() if d.fields]


@pytest.mark.parametrize("message", messages(), ids=lambda d: d.name)
def test_every_field_is_documented(message: Descriptor) -> None:
    missing = [f.name for f in message.fields if not re.search(rf"`[^`]*\b{f.name}\b[^`]*`", PAGE)]
    assert not missing


def test_every_rpc_status_and_flag_is_documented() -> None:
    names = [m.name for m in shoal_pb2.DESCRIPTOR.services_by_name["Shoal"].methods]
    names += [status.name for status in STATUS_OF.values()] + [cls.__name__ for cls in STATUS_OF]
    names += [option.opts[0] for option in command.params]
    assert len(names) > 40
    assert not [name for name in names if name not in PAGE]


async def test_the_python_example_runs() -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    async with Cluster() as c:
        printed = io.StringIO()

        def run() -> None:
            with contextlib.redirect_stdout(printed):
                exec(compile(example.replace("127.0.0.1:50051", c.address), "api.md", "exec"), {})

        await asyncio.to_thread(run)
        assert re.search(r"\nlength: \d+ ms, 2200 bytes crossed\n$", printed.getvalue())
