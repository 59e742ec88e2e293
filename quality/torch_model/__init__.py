"""A plain differentiable decoder under the exact serving visibility: the model that is diagnosed, evaluated and tuned.

It reads the same files as the engine and gives the same log-probabilities (tests/unit/test_quality_torch_model.py holds it to
the engine and to the goldens, 1e-3 in float32), but keeps no cache, so that gradients flow through one forward pass in which
prompt tokens are shallow and decode tokens deep. How to train with it:

    files = open_model("smollm2-135m")
    model = TorchDecoder.load(files)                       # float32 parameters, named as in Hugging Face's checkpoints
    model.requires_grad_(False)                            # then wrap what is trained, e.g. LoRA around these nn.Linear:
    layer = model.model.layers[25].self_attn               # layer.q_proj = Lora(layer.q_proj, rank=16)
    visibility = Visibility.parse("speed:22:boundary=4").resolve(files.config.shape.num_layers)
    batch = make_batch([Example(prompt_ids, response_ids), ...], visibility)
    with torch.autocast("cpu", torch.bfloat16):            # optional; norms, rotations and residuals stay float32
        hidden = model(batch, checkpoint=True)             # [B, D, h] of decode tokens; layers are recomputed in backward
    at = batch.targets != IGNORED                          # decode tokens whose next token belongs to the response
    logits = model.logits(hidden[at])                      # [n, V] float32; only rows with a loss pass through the LM head
    loss = F.cross_entropy(logits, batch.targets[at])      # supervised
    # distillation: teacher logits of the same rows from `make_batch(examples, full)` with the same boundary
    loss.backward()

`full:boundary=b` with the visibility's own b gives a teacher batch whose decode rows are those of the student.
"""

from shoal.quality.torch_model.batch import IGNORED, Batch, Example, make_batch
from shoal.quality.torch_model.decoder import Gates, LayerTrace, Start, TorchDecoder
from shoal.quality.torch_model.layer import Attention, DecoderLayer, Mlp, RmsNorm

__all__ = [
    "IGNORED",
    "Attention",
    "Batch",
    "DecoderLayer",
    "Example",
    "Gates",
    "LayerTrace",
    "Mlp",
    "RmsNorm",
    "Start",
    "TorchDecoder",
    "make_batch",
]
