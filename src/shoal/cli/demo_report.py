"""The tables of `shoal demo`: what each answer cost, beside what the formulas say. Knows responses and formulas; calls nobody."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shoal.pb.v1 import shoal_pb2
from shoal.placement.arithmetic import decode_kv_layer_tokens, full_depth_wire_bytes, kv_bytes, wire_bytes
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request, and the model it ran on."""

    complete: shoal_pb2.GenerateComplete
    shape: ModelShape
    dtype: DType

    @property
    def visibility(self) -> Visibility:
        """As resolved by the router: boundary included."""
        return Visibility.parse(self.complete.visibility)

    @property
    def formula_bytes(self) -> int:
        """What design §2 says must have crossed."""
        return wire_bytes(self.shape, self.dtype, self.visibility, self.complete.prompt_tokens, self.complete.cached_tokens)

    @property
    def full_bytes(self) -> int:
        """What full depth would have shipped."""
        return full_depth_wire_bytes(
            self.shape, self.dtype, self.visibility, self.complete.prompt_tokens, self.complete.cached_tokens
        )

    @property
    def formula_layer_tokens(self) -> int:
        """What design §2 says decode must hold at the end."""
        return decode_kv_layer_tokens(self.shape, self.visibility, self.complete.prompt_tokens, self.complete.completion_tokens)

    def differences(self) -> list[str]:
        """Where what was counted differs from the formulas, in words; empty when all is right."""
        transfer, held = self.complete.transfer, self.complete.decode_kv
        pairs = (
            ("bytes on the wire", transfer.payload_bytes, self.formula_bytes),
            ("bytes of the plan", transfer.plan_bytes, self.formula_bytes),
            ("bytes at full depth", transfer.full_depth_bytes, self.full_bytes),
            ("KV layer-tokens held", held.layer_tokens, self.formula_layer_tokens),
            ("KV bytes held", held.bytes, kv_bytes(self.shape, self.dtype, self.formula_layer_tokens)),
        )
        return [f"{self.visibility}: {what}: counted {got:,}, formula {due:,}" for what, got, due in pairs if got != due]


def print_times(console: Console, answers: Sequence[Answer]) -> None:
    """TTFT and its parts in order, then TPOT; milliseconds."""
    names = ("in", "out", "TTFT", "token-\nize", "reserve", "prefill", "trans-\nfer", "first\nstep", "TPOT")
    table = _table("Time in milliseconds; tokens in and out", "visibility", *names)
    for answer in answers:
        times = answer.complete.timings
        parts = (times.ttft_ms, times.tokenize_ms, times.reserve_ms, times.prefill_ms, times.transfer_ms, times.first_step_ms)
        counts = (str(answer.complete.prompt_tokens), str(answer.complete.completion_tokens))
        table.add_row(str(answer.visibility.policy), *counts, *(_milliseconds(ms) for ms in (*parts, times.tpot_ms)))
    console.print(table)
    console.print("transfer: what shipping KV adds once the last layer is computed; the rest hides behind prefill.", style="dim")


def print_bytes(console: Console, answers: Sequence[Answer]) -> None:
    """What crossed beside the formula and beside full depth, and the KV that decode held."""
    names = ("b", "on the wire", "formula", "full depth", "saved", "layer-\ntokens", "KV bytes")
    table = _table("Bytes from prefill to decode, and KV held by decode at the end", "visibility", *names)
    for answer in answers:
        done, full = answer.complete, answer.full_bytes
        table.add_row(
            str(answer.visibility.policy),
            str(answer.visibility.boundary_tokens),
            f"{done.transfer.payload_bytes:,}",
            ("" if done.transfer.payload_bytes == answer.formula_bytes else "≠") + f"{answer.formula_bytes:,}",
            f"{full:,}",
            f"{1 - done.transfer.payload_bytes / full:.1%}" if full else "–",
            f"{done.decode_kv.layer_tokens:,}",
            f"{done.decode_kv.bytes:,}",
        )
    console.print(table)
    console.print("b: boundary, the last prompt tokens, which decode runs at full depth and nobody ships.", style="dim")


def print_blocks(console: Console, loads: Sequence[shoal_pb2.WorkerLoad]) -> None:
    """What every worker holds now."""
    table = _table("Workers afterwards", "worker", "blocks\nin use", "blocks", "layers\nheld", "weights\nread", "resident")
    for load in loads:
        sizes = (f"{load.weight_bytes_read / 1e6:,.0f} MB", f"{load.resident_bytes / 1e6:,.0f} MB")
        table.add_row(load.worker_id, str(load.num_used_blocks), str(load.num_total_blocks), str(load.num_layers_held), *sizes)
    console.print(table)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _table(title: str, first: str, *others: str) -> Table:
    """Fits 80 columns, so that no figure is ever cut."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
