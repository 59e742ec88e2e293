"""The report's sections, in its order. A section is a module with NAME, TITLE and `run(bench) -> list[Table]`.

To add one: write the module, name it here. `bench` (benchmarks/bench.py) has the options and the peers.
"""

from types import ModuleType

from benchmarks.sections import decoding, first_token, load, phases, router, shallow, short_prompts, streams

_MODULES = (first_token, decoding, streams, shallow, phases, short_prompts, load, router)
SECTIONS: dict[str, ModuleType] = {module.NAME: module for module in _MODULES}
BESIDE_PEERS = frozenset(module.NAME for module in (first_token, decoding, streams))  # what they measure is the peers
