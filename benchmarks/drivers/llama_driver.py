"""llama.cpp through its own C interface (llama-cpp-python carries it), several sequences in one batch."""

from lines import Steps, serve


def load(options: dict):
    import llama_cpp as api
    import numpy as np

    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    is_packed = not options["gguf"].endswith("bf16.gguf")
    if is_packed:  # weights repacked for the tile unit crash it (Q4_1, AMX): the plain layout does not
        model_params.use_extra_bufts = False
    model = api.llama_model_load_from_file(options["gguf"].encode(), model_params)
    assert model, f"llama.cpp cannot load {options['gguf']}"
    params = api.llama_context_default_params()
    params.n_ctx = options["max_tokens"]
    params.n_batch = max(options["max_context"], 2048)
    params.n_seq_max = max(16, options["max_streams"])
    params.n_threads = params.n_threads_batch = options["threads"]
    params.kv_unified = True
    context = api.llama_init_from_model(model, params)
    assert context, "llama.cpp cannot make a context"
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(params.n_batch, 0, 1)
    memory = api.llama_get_memory(context)

    def run(rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, scored) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, scored
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        assert api.llama_decode(context, batch) == 0

    def best(row: int) -> int:
        return int(np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), (vocab_size,)).argmax())

    def generate(prompts: list[list[int]], num_tokens: int) -> Steps:
        api.llama_memory_clear(memory, True)
        tokens = []
        for sequence, ids in enumerate(prompts):
            run([(token, at, sequence, at == len(ids) - 1) for at, token in enumerate(ids)])
            tokens.append(best(len(ids) - 1))
            yield [sequence]
        for step in range(num_tokens - 1):
            run([(token, len(prompts[s]) + step, s, True) for s, token in enumerate(tokens)])
            tokens = [best(row) for row in range(len(prompts))]
            yield list(range(len(prompts)))
        api.llama_memory_clear(memory, True)

    layout = ", weights not repacked" if is_packed else ""
    return f"llama-cpp-python {api.__version__}{layout}", generate


serve(load)
