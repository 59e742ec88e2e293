"""What an answer may be held to: JSON schema, regular expression, grammar, choices; compiled by llguidance for a vocabulary.

The router has them checked in a process apart (vetting.py); decode compiles (compiler.py) and masks (matcher.py). Knows
tokenizers and texts; knows no scores, no requests and no transport.
"""

from shoal.constraints.compiler import ConstraintCompiler
from shoal.constraints.grammar import MAX_CHARACTERS, MAX_CHOICES
from shoal.constraints.matcher import AnswerConstraint
from shoal.constraints.vetting import ConstraintVetter

__all__ = ["MAX_CHARACTERS", "MAX_CHOICES", "AnswerConstraint", "ConstraintCompiler", "ConstraintVetter"]
