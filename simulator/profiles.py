"""Named sets of efficiencies: what share of the nominal figures a deployment reaches. Knows no model; holds measured constants.

`kernels-a100` and `kernels-h100` are fitted to tables of measured kernels and are an upper bound; `engine` is what deployed
engines reach. The link's share and the hand-off are fitted to published transfers. docs/validation.md shows all residuals.
"""

from dataclasses import dataclass, fields, replace

from shoal.errors import InvalidConfig
from shoal.simulator.names import find

_OVERHEADS = (
    *("num_half_tokens", "layer_s", "step_s", "row_s", "request_s", "handoff_s", "transfer_step_s", "allreduce_s"),
    *("crowd_prefill", "crowd_decode", "join_s"),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """Shares of peak in (0, 1], overheads in seconds (0 or more)."""

    name: str
    source: str
    gemm: float  # e_g: of peak FLOP/s, linear layers of a long prompt
    attention: float  # e_a: of peak FLOP/s, causal attention of a long prompt
    weight_read: float  # e_w: of memory bandwidth
    kv_read: float  # e_kv: of memory bandwidth
    link: float = 0.745  # of a link's nominal rate
    num_half_tokens: float = 0.0  # rows at which linear layers reach half of e_g
    layer_s: float = 0.0  # t_layer
    step_s: float = 0.0  # t_step
    row_s: float = 0.0  # t_row: per request of a decode step (sampling, bookkeeping)
    request_s: float = 0.0  # t_request: router, reservation and reply, constant per request
    handoff_s: float = 0.005  # t_handoff: constant per request
    transfer_step_s: float = 1.6e-6  # extra latency of one layer's message, beside the link's own
    allreduce_s: float = 1e-5  # latency of one all-reduce among tensor-parallel ranks
    memory: float = 0.9  # of device memory for weights and KV
    crowd_prefill: float = (
        0.0  # by how much a prefill step is longer while decode steps: pools that share one host's caches and cores
    )
    crowd_decode: float = 0.0  # share of decode's time that prefill's steps take from it meanwhile
    join_s: float = 0.0  # of decode's time, per request: what taking in its KV takes from the steps of others

    def __post_init__(self) -> None:
        for share in ("gemm", "attention", "weight_read", "kv_read", "link", "memory"):
            if not 0 < getattr(self, share) <= 1:
                raise InvalidConfig(f"profile {self.name}: {share} should lie in (0, 1], not {getattr(self, share)}")
        for name in _OVERHEADS:
            if not getattr(self, name) >= 0:
                raise InvalidConfig(f"profile {self.name}: {name} should be 0 or more, not {getattr(self, name)}")

    def changed(self, **values: float) -> "Profile":
        """This profile with other numbers. Raises InvalidConfig for unknown names and impossible values."""
        known = {field.name for field in fields(self)} - {"name", "source"}
        unknown = set(values) - known
        if unknown:
            raise InvalidConfig(f"a profile has no {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
        return replace(self, name=f"{self.name} (changed)", **values)  # type: ignore[arg-type]


_KERNELS = "fitted to kernel tables of aiconfigurator 0.12 (Apache-2.0), Llama-3.1-8B, 512–131,072 tokens, batch 1–64"
_MOONCAKE = "link share fitted to Mooncake's published transfers (H800, 8 × RoCE)"

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="kernels-a100",
            source=f"{_KERNELS}; {_MOONCAKE}; hand-off fitted to Splitwise (A100, 200 Gb/s)",
            gemm=0.815,
            attention=0.559,
            weight_read=0.878,
            kv_read=0.742,
            num_half_tokens=74.0,
            layer_s=58.6e-6,
            step_s=1.39e-3,
            handoff_s=0.00796,
        ),
        Profile(
            name="kernels-h100",
            source=f"{_KERNELS}; {_MOONCAKE}; hand-off fitted to Splitwise (H100, 400 Gb/s)",
            gemm=0.703,
            attention=0.656,
            weight_read=0.700,
            kv_read=0.911,
            num_half_tokens=64.0,
            layer_s=6.4e-6,
            step_s=12e-6,
            handoff_s=0.00498,
        ),
        Profile(
            name="engine",
            source=f"middle of deployed engines (prefill 0.3–0.45 of FLOP/s, decode 0.2–0.6 of bandwidth); {_MOONCAKE}",
            gemm=0.4,
            attention=0.35,
            weight_read=0.45,
            kv_read=0.5,
            num_half_tokens=100.0,
            step_s=0.001,
        ),
        Profile(
            name="ideal",
            source="nominal figures without losses: a bound, never a prediction",
            gemm=1.0,
            attention=1.0,
            weight_read=1.0,
            kv_read=1.0,
            link=1.0,
            handoff_s=0.0,
            transfer_step_s=0.0,
            allreduce_s=0.0,
            memory=1.0,
        ),
    )
}


def profile_named(name: str) -> Profile:
    """Raises NotFound with the nearest names."""
    return find(name, PROFILES, "profile", f"profiles: {', '.join(PROFILES)}")


def default_profile(gpu_name: str) -> Profile:
    """The kernel-table profile of the GPU's generation: Ampere and its kin, else Hopper's."""
    return PROFILES["kernels-a100" if gpu_name.upper().startswith(("A100", "L4", "RTX")) else "kernels-h100"]
