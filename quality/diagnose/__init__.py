"""Which layers a prompt needs: virtual gates, attention mass, drift, and the depth they recommend."""

from shoal.quality.diagnose.layers import LayerDiagnosis, diagnose_layers
from shoal.quality.diagnose.plot import draw
from shoal.quality.diagnose.recommend import Recommendation, recommend
from shoal.quality.diagnose.report import Diagnosis, diagnose

__all__ = ["Diagnosis", "LayerDiagnosis", "Recommendation", "diagnose", "diagnose_layers", "draw", "recommend"]
