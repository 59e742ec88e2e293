"""Regenerates tests/data/own_goldens.json: `PYTHONPATH=src python -m tests.oracle.make_goldens` from the repository root.

The cases are those that tests/data/smollm2_visibility.json leaves out: N ≤ b, N = 1, b > 1 for each kind, more anchors than
prefill tokens, K = 1, late projection, and a prompt of 700 tokens. Shoal is used only to find and tokenise; the numbers come
from the oracle.
"""

import json
from pathlib import Path

import torch

from shoal.model_files import open_model
from shoal.model_files.tokenizer import load_tokenizer
from tests.oracle.gguf_llama import load_gguf_llama
from tests.oracle.mask_oracle import Case, MaskOracle

ROOT = Path(__file__).parents[2]
NUM_TOKENS, NUM_LONG_TOKENS = 8, 3

SHORT = {
    "plain": [
        Case("full", boundary=64),
        Case("speed", 22, anchors=1, boundary=64),
        Case("pop", 20, boundary=64),
        Case("full", boundary=3),
        Case("speed", 18, anchors=2, boundary=5),
        Case("pop", 20, boundary=4),
        Case("pop", 20, boundary=4, late=True),
        Case("speed", 24, anchors=500, boundary=2),
        Case("speed", 1, anchors=1, boundary=2),
        Case("pop", 1, boundary=2),
        Case("speed", 29, anchors=1, boundary=1),
        Case("pop", 29, boundary=1),
    ],
    "one": [Case("full"), Case("speed", 22, anchors=1), Case("pop", 20), Case("pop", 20, late=True)],
    "two": [Case("full"), Case("speed", 22, anchors=1), Case("pop", 20), Case("pop", 20, late=True)],
    "capital": [
        Case("pop", 22, boundary=6, late=True),
        Case("speed", 22, anchors=3, boundary=12),
        Case("speed", 22, anchors=0, boundary=12),
    ],
}
LONG = [
    Case("full"),
    Case("speed", 22, anchors=1, boundary=4),
    Case("speed", 20, anchors=16, boundary=1),
    Case("pop", 22, boundary=2),
    Case("pop", 22, boundary=2, late=True),
]


def main() -> None:
    model = open_model("smollm2-135m")
    prompts = {
        name: ids for name, ids in json.loads((ROOT / "tests/data/smollm2_visibility.json").read_text())["prompts"].items()
    }
    prompts["one"], prompts["two"] = prompts["plain"][-1:], prompts["plain"][:2]
    prompts["licence"] = load_tokenizer(model).encode((ROOT / "LICENSE").read_text())[:700]
    oracle, cases = MaskOracle(load_gguf_llama(model.path)), []
    for name, case in [(name, case) for name, own in SHORT.items() for case in own] + [("licence", case) for case in LONG]:
        stop = frozenset(model.config.eos_token_ids)
        greedy = oracle.greedy(prompts[name], case, NUM_LONG_TOKENS if name == "licence" else NUM_TOKENS, stop)
        top5 = [[[int(token), round(value, 5)] for token, value in step] for step in greedy.top5[:3]]
        cases.append(
            {
                "prompt": name,
                "visibility": case.text,
                "output_ids": greedy.token_ids,
                "clear_steps": greedy.num_clear_steps,
                "top5": top5,
            }
        )
        print(name, case.text, greedy.token_ids, flush=True)
    used = {case["prompt"] for case in cases}
    data = {
        "model": "SmolLM2-135M-Instruct.Q4_1 dequantised to float32",
        "source": "tests/oracle/make_goldens.py",
        "prompts": {name: ids for name, ids in prompts.items() if name in used},
        "cases": cases,
    }
    text = json.dumps(data).replace('{"prompt"', '\n  {"prompt"')
    (ROOT / "tests/data/own_goldens.json").write_text(text + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
