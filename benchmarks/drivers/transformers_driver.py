"""Hugging Face transformers: eager PyTorch with torch's own attention and a growing cache; prompts of equal length."""

from lines import Steps, serve


def load(options: dict):
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(options["folder"], dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> Steps:
        everyone = list(range(len(prompts)))
        out = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        yield everyone
        for _ in range(num_tokens - 1):
            out = model(ids, past_key_values=out.past_key_values, use_cache=True)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            yield everyone

    return f"transformers {transformers.__version__}, torch {torch.__version__}", generate


serve(load)
