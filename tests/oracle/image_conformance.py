"""How far prompts with images are from transformers' whole model and the mask-level program: prints docs/models.md's other table.

`PYTHONPATH=src python -m tests.oracle.image_conformance`. Tiny random models, one to three images, chunks of 24 tokens, float32.
"""

import torch

from tests import engine_support as support
from tests import image_support as images
from tests.oracle.conformance import NUM_TOKENS, worst
from tests.oracle.mask_oracle import Case

CASES = {
    "full": [Case("full"), Case("full", boundary=5)],
    "speed": [Case("speed", 2, 1), Case("speed", 3, 0, 2), Case("speed", 4, 2, 3)],
    "pop": [Case("pop", 2), Case("pop", 3, boundary=3)],
    "late pop": [Case("pop", 2, boundary=4, late=True), Case("pop", 4, late=True)],
}
PATTERNS = ("4a5", "2a2b3c5")


def whole(variant: str, backend: str) -> str:
    """The largest difference from transformers' own forward pass over prompt and answer."""
    largest = 0.0
    for pattern in PATTERNS:
        request = images.greedy(variant, pattern, "full", NUM_TOKENS)
        (result,) = images.engine(variant, backend, token_budget=24).generate([request])
        ids = [*request.prompt_ids, *result.token_ids]
        scores = images.oracle(variant, pattern).whole_scores(images.text_half(variant), ids)[len(request.prompt_ids) - 1 :]
        for own, logprobs in zip(scores, result.logprobs, strict=False):
            largest = max(largest, *(abs(float(own[token]) - score) for token, score in logprobs.top))
    return f"{largest:.1e}"


def main() -> None:
    print("| model | back end | whole model | " + " | ".join(CASES) + " |\n|---|---|---|" + "---|" * len(CASES))
    for variant in images.VARIANTS:
        expected = {
            name: [
                images.oracle(variant, pattern).greedy(list(images.prompt(variant, pattern)[0]), case, NUM_TOKENS)
                for pattern in PATTERNS
                for case in cases
            ]
            for name, cases in CASES.items()
        }
        for backend in ["torch"] if support.NATIVE_MISSING else ["torch", "native"]:
            cells = [whole(variant, backend)]
            for name, cases in CASES.items():
                requests = [images.greedy(variant, pattern, case.text, NUM_TOKENS) for pattern in PATTERNS for case in cases]
                difference, is_equal = worst(images.engine(variant, backend, token_budget=24).generate(requests), expected[name])
                cells.append(f"{difference:.1e}" if is_equal else "tokens differ")
            print(f"| {variant} | {backend} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
