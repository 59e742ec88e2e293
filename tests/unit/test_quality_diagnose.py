"""Virtual gates, attention mass and drift of tiny models; the depth they recommend; the command, its files and its refusals."""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.errors import InvalidConfig
from shoal.model_files import write_random_model
from shoal.quality.diagnose import diagnose_layers, recommend
from shoal.quality.diagnose.recommend import depths_to_measure, predicted_depth
from shoal.quality.torch_model import Example, Gates, TorchDecoder, make_batch
from shoal.visibility import Visibility, VisibilityKind
from tests import engine_support as support


def examples(count: int) -> list[Example]:
    return [Example(support.prompt(20, seed), support.prompt(6, 50 + seed)) for seed in range(count)]


def test_importance_is_what_small_changes_of_a_gate_cost() -> None:
    """Near g = 1 the expected loss under the model's own labels is KL = ½ · importance · (1 − g)² · 2, layer by layer."""
    own, given = TorchDecoder.load(support.model_files()), examples(60)
    found = diagnose_layers(own, given)
    batch = make_batch(given, Visibility.parse("full").resolve(4))
    at, step = batch.targets != -100, 0.05
    with torch.inference_mode():
        whole = own.logits(own(batch)[at]).log_softmax(-1)
        for layer in range(4):
            for phase in ("prefill", "decode"):
                gate = torch.ones(len(given), 4, 2)
                gate[:, layer] = 1 - step
                changed = own.logits(own(batch, gates=Gates(**{phase: gate}))[at]).log_softmax(-1)
                cost = float((whole.exp() * (whole - changed)).sum(-1).mean()) / step**2
                estimate = getattr(found[layer], phase).layer
                assert estimate == pytest.approx(cost, rel=0.6, abs=1e-3), (layer, phase)


@pytest.mark.parametrize("variant", ["llama", "gemma2-caps-window"])
def test_the_last_layer_of_prompts_and_what_is_seen(variant: str) -> None:
    found = diagnose_layers(TorchDecoder.load(support.model_files(variant)), examples(3))
    assert found[-1].prefill.layer == 0, "what prefill tokens leave in the last layer, nobody reads"
    assert all(layer.decode.layer > 0 and layer.sight > 0 for layer in found)
    for layer in found:
        shares = (layer.mass_on_anchor, layer.mass_on_prompt, layer.mass_on_decode)
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        assert 0 <= layer.prefill_drift <= 2 and 0 <= layer.decode_drift <= 2
    assert found[-1].prefill_to_last == pytest.approx(1)


def test_gates_do_not_change_what_they_measure() -> None:
    own = TorchDecoder.load(support.model_files())
    batch = make_batch(examples(2), Visibility.parse("full").resolve(4))
    gates = Gates(torch.ones(2, 4, 2), torch.ones(2, 4, 2), torch.ones(2, 4))
    with torch.inference_mode():
        assert torch.allclose(own(batch, gates=gates), own(batch), atol=1e-5)
        blind = own(batch, gates=Gates(sight=torch.cat([torch.ones(2, 2), torch.zeros(2, 2)], 1)))
        speed = own(make_batch(examples(2), Visibility.parse("speed:2").resolve(4)))
    at = batch.targets != -100
    assert torch.allclose(blind[at], speed[at], atol=1e-5), "blind above K is speed at K"


def test_the_rule() -> None:
    assert predicted_depth((1.0, 0.5, 0.04, 0.01, 0.0), 1.05) == 2
    assert predicted_depth((9.0, 9.0, 9.0), 1.05) == 2
    assert depths_to_measure(3, 30)[0] == 1 and depths_to_measure(28, 30)[-1] == 29
    measured = {1: 1.5, 2: 1.04, 3: 1.06, 4: 1.03, 5: 1.01}
    assert recommend(VisibilityKind.POP, (1.0, 0.0), measured, 1.05).text == "pop:4", "from there on every one holds"
    assert recommend(VisibilityKind.SPEED, (1.0, 0.0), {5: 1.2}, 1.05).text == "full"


def test_what_cannot_be_diagnosed() -> None:
    own = TorchDecoder.load(support.model_files())
    for given, words in (
        ([], "no example"),
        ([Example((1, 2, 3), ())], "no response"),
        ([Example((1, 2), (3,))], "fewer than three"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            diagnose_layers(own, given)
    own.model.layers[1].mlp.down_proj.weight.data.fill_(math.nan)
    with pytest.raises(InvalidConfig, match="no finite numbers"):
        diagnose_layers(own, examples(1))


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[quality]'")
    model = write_random_model(tmp_path / "model", vocab_size=300)
    arguments = ["diagnose", str(model), "--examples", "2", "--prompt-tokens", "16", "--response-tokens", "4", "--threads", "1"]
    paths = {name: tmp_path / f"found.{name}" for name in ("json", "svg")}
    done = CliRunner().invoke(cli, [*arguments, "--json", str(paths["json"]), "--plot", str(paths["svg"])])
    assert done.exit_code == 0, done.output
    assert "recommended" in done.output or "serve full" in done.output
    found = json.loads(paths["json"].read_text())
    assert len(found["layers"]) == 4 and {entry["kind"] for entry in found["recommendations"]} == {"pop", "speed"}
    assert "ln(tolerance)" in found["rule"] and paths["svg"].read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tolerance", "0.9"], "must be above 1"),
        (["--plot", "found.gif"], "as .png, .svg or .pdf"),
        (["--threads", "0"], "--threads must be"),
        (["--device", "abacus"], "cannot be used here"),
        (["--data", "nowhere.jsonl"], "does not exist"),
        (["--examples", "0"], "max_examples must be"),
        (["--json", "/nowhere/found.json", "--examples", "1", "--prompt-tokens", "8"], "cannot write '/nowhere/found.json'"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], words: str) -> None:
    done = CliRunner().invoke(cli, ["diagnose", str(support.model_files().path), *flags])
    assert done.exit_code == 2 and words in done.output, done.output
