"""Images to what the decoder takes in their tokens' place. Importing it loads neither transformers nor Pillow."""

from shoal.engine.vision.encoder import VisionEncoder
from shoal.engine.vision.prompt_images import ImageFeatures, PromptImages

__all__ = ["ImageFeatures", "PromptImages", "VisionEncoder"]
