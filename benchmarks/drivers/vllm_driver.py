"""vLLM in one process, compiled mode, prefix cache off, whole prompts in one step as Shoal runs them here."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lines import Steps, serve


def load(options: dict):
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    import torch
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    torch.set_num_threads(options["threads"])
    llm = LLM(
        model=options["folder"],
        dtype=options["dtype"],
        max_model_len=options["max_context"],
        max_num_batched_tokens=options["max_context"],
        max_num_seqs=max(16, options["max_streams"]),
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    calls = iter(range(1 << 62))

    def generate(prompts: list[list[int]], num_tokens: int) -> Steps:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        names = {}
        for index, ids in enumerate(prompts):
            name = str(next(calls))
            names[name] = index
            engine.add_request(name, TokensPrompt(prompt_token_ids=ids), sampling)
        seen = [0] * len(prompts)
        while engine.has_unfinished_requests():
            got = []
            for output in engine.step():
                index = names[output.request_id.split("-")[0]]
                count = len(output.outputs[0].token_ids)
                got += [index] * (count - seen[index])
                seen[index] = count
            yield got

    return f"vLLM {vllm.__version__}, torch {torch.__version__}", generate


serve(load)
