"""What this machine's processor can do, as Linux tells it, and what the user allows. Knows names of CPU features."""

import os
import platform
from enum import StrEnum
from functools import cache
from pathlib import Path

from shoal.errors import InvalidConfig


class InstructionSet(StrEnum):
    """What the kernels can be compiled for, the fastest first."""

    AVX512 = "avx512"
    AVX2 = "avx2"


NEEDS = {
    InstructionSet.AVX512: frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_bf16", "fma", "bmi2"}),
    InstructionSet.AVX2: frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"}),
}
AMX = frozenset({"amx_tile", "amx_bf16"})


@cache
def cpu_features() -> frozenset[str]:
    """The feature flags of the first processor; empty where they cannot be read."""
    return frozenset(_described("flags").split())


def missing_features(instructions: InstructionSet) -> list[str]:
    """What kernels compiled for these instructions need and this processor lacks."""
    return sorted(NEEDS[instructions] - cpu_features())


def named_instructions() -> InstructionSet | None:
    """What SHOAL_INSTRUCTIONS asks for; None where it is not set, or empty. Raises InvalidConfig."""
    named = os.environ.get("SHOAL_INSTRUCTIONS", "")
    if named and named not in list(InstructionSet):
        raise InvalidConfig(f"SHOAL_INSTRUCTIONS is {named!r}; known: {', '.join(InstructionSet)}")
    return InstructionSet(named) if named else None


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
