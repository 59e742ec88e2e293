"""What a child process writes must never make it stand still."""

import asyncio

from shoal.cli.children import Child

_PROGRAM = "import sys; sys.stderr.write('x' * (3 << 20) + '\\n'); sys.stderr.write('after\\n'); print('done')"


async def test_a_line_longer_than_any_limit_does_not_stop_its_child() -> None:
    output: list[str] = []
    log: list[str] = []
    child = await Child.spawn("test", ["-c", _PROGRAM], on_output=output.append, on_log=log.append)
    assert await asyncio.wait_for(child.wait(), 20) == 0
    assert output == ["done"] and log[-1] == "after"
