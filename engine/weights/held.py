"""Which weights a worker holds (design §5, "who holds what"). Knows no tensors."""

from dataclasses import dataclass
from typing import Self

from shoal.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class HeldLayers:
    """Layers held in full, layers of which only norm and K/V projection are held (`pop`), and the two ends."""

    full: range
    kv_only: range
    embedding: bool
    head: bool  # the final norm and the LM head

    @classmethod
    def everything(cls, num_layers: int) -> Self:
        """A decode worker, or a single process."""
        return cls(range(num_layers), range(num_layers, num_layers), embedding=True, head=True)

    def check(self, num_layers: int) -> None:
        """Raises InvalidConfig when the model lacks such layers or a layer is asked for twice."""
        for name, layers in (("full", self.full), ("kv_only", self.kv_only)):
            if layers.step != 1 or (len(layers) and not 0 <= layers.start < layers.stop <= num_layers):
                raise InvalidConfig(f"cannot hold layers {layers} ({name}) of a model of {num_layers} layers")
        if set(self.full) & set(self.kv_only):
            raise InvalidConfig(f"layers {self.kv_only} are held in full already")
