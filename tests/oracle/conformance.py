"""How far each family's engine is from the mask-level program: `PYTHONPATH=src python -m tests.oracle.conformance` prints
docs/models.md's table. Tiny random models, all visibilities, prompts beyond the sliding window, float32.
"""

import torch

from shoal.engine.local import LocalResult
from tests import engine_support as support
from tests.oracle.mask_oracle import Case, Greedy, MaskOracle

CASES = {
    "full": [Case("full"), Case("full", boundary=5)],
    "speed": [Case("speed", 1, 1), Case("speed", 2, 3, 4), Case("speed", 3, 0, 2), Case("speed", 2, 2, 3, sink=True)],
    "pop": [Case("pop", 1), Case("pop", 3, boundary=3)],
    "late pop": [Case("pop", 2, boundary=4, late=True), Case("pop", 3, late=True)],
}
LENGTHS, NUM_TOKENS = (5, 19), 4


def worst(results: list[LocalResult], expected: list[Greedy]) -> tuple[float, bool]:
    """The largest difference of the top five log-probabilities, and whether all tokens are equal where the top two are clear."""
    largest, is_equal = 0.0, True
    for result, other in zip(results, expected, strict=True):
        clear = other.num_clear_steps
        is_equal &= list(result.token_ids[:clear]) == other.token_ids[:clear]
        for own, top in zip(result.logprobs[:clear], other.top5, strict=False):
            largest = max(largest, *(abs(a[1] - b[1]) for a, b in zip(own.top, top, strict=True)))
    return largest, is_equal


def main() -> None:
    backends = ["torch"] if support.NATIVE_MISSING else ["torch", "native"]
    print("| model | back end | " + " | ".join(CASES) + " |\n|---|---|" + "---|" * len(CASES))
    for variant in support.VARIANTS:
        oracle = MaskOracle(support.reference(variant))
        prompts = [support.prompt(length) for length in LENGTHS]
        expected = {
            name: [oracle.greedy(list(ids), case, NUM_TOKENS) for ids in prompts for case in cases]
            for name, cases in CASES.items()
        }
        for backend in backends:
            cells = []
            for name, cases in CASES.items():
                requests = [support.greedy(ids, case.text, NUM_TOKENS) for ids in prompts for case in cases]
                results = support.engine(support.decoder(variant, backend=backend), token_budget=24).generate(requests)
                difference, is_equal = worst(results, expected[name])
                cells.append(f"{difference:.1e}" if is_equal else "tokens differ")
            print(f"| {variant} | {backend} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
