"""Checks and times the engine on one GPU, without Ray: `python -m benchmarks.gpu_check`. One short table comes last.

1. Tokens: small models in float32 on the device against torch's plain operations on the CPU, under every visibility.
2. Peaks of the device: matrix products and copies, measured here; what follows is compared with them.
3. A random-weight model of Llama-3.1-8B's shape in bfloat16: prefill, and decode with the KV filled directly.

It ends within `--seconds`: what there was no time for is named. Without a GPU a tiny model runs through the same code.
"""

import argparse
import sys
import time

import torch

from benchmarks.gpu import peaks, sizes, speed, tokens
from benchmarks.gpu.report import Line, show


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=450.0, help="stop starting new measurements after so long")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: this process sees no GPU, or torch is a CPU build; use --device cpu")
    device = torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")
    deadline = time.monotonic() + options.seconds
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, a tiny model: nothing here says how fast a GPU is"
    )
    print(f"torch {torch.__version__} on {name}", flush=True)
    lines: list[Line] = []
    for step in (tokens.check, peaks.measure, speed.measure):
        for line in step(device, sizes.for_device(device), deadline):
            print(line, flush=True)
            lines.append(line)
    show(lines)
    return 0 if all(line.is_met is not False for line in lines if line.must) else 1


if __name__ == "__main__":
    sys.exit(main())
