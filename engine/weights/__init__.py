"""A model's weights as tensors: only the layers a worker holds, fused the way the decoder multiplies them."""

from shoal.engine.weights.held import HeldLayers
from shoal.engine.weights.layers import KvWeights, LayerWeights, ModelWeights
from shoal.engine.weights.load import LoadReport, load_weights

__all__ = ["HeldLayers", "KvWeights", "LayerWeights", "LoadReport", "ModelWeights", "load_weights"]
