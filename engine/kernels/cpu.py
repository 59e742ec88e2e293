"""What this machine's processor can do, as Linux tells it. Knows names of CPU features; decides nothing."""

import platform
from enum import StrEnum
from functools import cache
from pathlib import Path


class InstructionSet(StrEnum):
    """What the kernels can be compiled for, the fastest first."""

    AVX512 = "avx512"
    AVX2 = "avx2"


NEEDS = {
    InstructionSet.AVX512: frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma", "bmi2"}),
    InstructionSet.AVX2: frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}),
}
AMX = frozenset({"amx_tile", "amx_bf16"})


@cache
def cpu_features() -> frozenset[str]:
    """The feature flags of the first processor; empty where they cannot be read."""
    return frozenset(_described("flags").split())


def missing_features(instructions: InstructionSet) -> list[str]:
    """What kernels compiled for these instructions need and this processor lacks."""
    return sorted(NEEDS[instructions] - cpu_features())


def has_amx() -> bool:
    """Whether there is a tile unit."""
    return cpu_features() >= AMX


def widens_bfloat16() -> bool:
    """Whether AVX-512 multiplies bfloat16 faster as floats: Intel's take two cycles for a product of bfloat16 words, half of one
    for one of floats (measured on a Xeon of the fifth generation); AMD's Zen 4 takes one."""
    return _described("vendor_id") == "GenuineIntel"


def _described(field: str) -> str:
    """What Linux says of the first processor; empty where it says nothing."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return ""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""
