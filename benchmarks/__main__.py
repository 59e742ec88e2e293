"""Shoal beside its peers on this machine: runs sections, keeps their results, writes a report.

docs/performance.md says how to install the peers.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots, report
from benchmarks.bench import Bench, Options
from benchmarks.peers import KINDS, PeerFailed, find_python
from benchmarks.sections import BESIDE_PEERS, SECTIONS
from shoal.errors import ShoalError
from shoal.model_files import open_model
from shoal.types import DType

_QUICK: tuple[tuple[int, ...], int] = ((512,), 2)  # prompt lengths, repetitions
_FULL: tuple[tuple[int, ...], int] = ((512, 2048, 4096, 7900), 5)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--section", action="append", help=f"only this one; may be given again; known: {', '.join(SECTIONS)}")
    parser.add_argument(
        "--peers",
        default=",".join(KINDS),
        help="engines of the sections that compare, comma-separated, shoal itself among them; one that is not installed is "
        f"skipped, and said so (default: {','.join(KINDS)})",
    )
    parser.add_argument("--quick", action="store_true", help="512 prompt tokens, 2 repetitions")
    parser.add_argument("--lengths", help="prompt tokens, comma-separated (default 512,2048,4096,7900)")
    parser.add_argument("--repeats", type=int, help="measured repetitions of each case (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every engine (default: all cores)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=[str(dtype) for dtype in DType])
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="exported weights, logs, results.json")
    parser.add_argument("--report", type=Path, help="the page to write (default: report.md in --folder)")
    parser.add_argument("--report-only", action="store_true", help="write the page from the results there are; measure nothing")
    return parser


def _options(given: argparse.Namespace) -> Options:
    """Raises ValueError with words that say what to change."""
    lengths, repeats = _QUICK if given.quick else _FULL
    try:
        lengths = tuple(int(text) for text in given.lengths.split(",")) if given.lengths else lengths
    except ValueError:
        raise ValueError(f"--lengths {given.lengths!r} is no comma-separated list of whole numbers") from None
    context = open_model(given.model).config.shape.max_context
    if not all(16 <= length <= context - 64 for length in lengths):
        raise ValueError(f"--lengths must lie in 16…{context - 64} for {given.model}")
    repeats = repeats if given.repeats is None else given.repeats
    if repeats < 1:
        raise ValueError("--repeats must be at least 1")
    cores = os.cpu_count() or 1
    if not 1 <= given.threads <= cores:
        raise ValueError(f"--threads must lie in 1…{cores}, the cores of this machine")
    peers = tuple(name.strip() for name in given.peers.split(",") if name.strip())
    for name in peers:
        if name not in KINDS:
            raise ValueError(f"unknown peer {name!r}; known: {', '.join(KINDS)}")
    for name in given.section or ():
        if name not in SECTIONS:
            raise ValueError(f"unknown section {name!r}; known: {', '.join(SECTIONS)}")
    if not given.report_only and not BESIDE_PEERS.isdisjoint(given.section or SECTIONS):
        _check_some_peer(peers)
    return Options(given.model, given.dtype, given.threads, lengths, repeats, peers, given.folder.resolve())


def _check_some_peer(peers: Sequence[str]) -> None:
    """Raises ValueError when no engine is there to be measured; one is enough."""
    missing = []
    for name in peers:
        try:
            find_python(KINDS[name])
            return
        except PeerFailed as error:
            missing.append(f"\n  {name}: {error}")
    raise ValueError("no engine that --peers names is installed:" + "".join(missing) if missing else "--peers names no engine")


def main() -> int:
    given = _parser().parse_args()
    try:
        options = _options(given)
    except (ValueError, ShoalError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "results.json"
    results = report.read_results(kept)
    if not given.report_only:
        bench = Bench(options)
        try:
            for name in given.section or list(SECTIONS):
                under = report.circumstances(options)
                tables = tuple(SECTIONS[name].run(bench))
                results[name] = report.SectionResult(tables, **under, about=dict(bench.about), skipped=dict(bench.skipped))
                report.write_results(kept, results)
                for table in tables:
                    print(f"\n{table.markdown()}\n", flush=True)
        finally:
            bench.close()
    page = (given.report or options.folder / "report.md").resolve()
    page.parent.mkdir(parents=True, exist_ok=True)
    try:
        pictures = plots.draw((table for result in results.values() for table in result.tables), page.with_suffix(""))
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install 'shoal[bench]')", file=sys.stderr)
        pictures = {}
    report.write_report(page, results, SECTIONS, pictures)
    print(f"report: {page}; results: {kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
