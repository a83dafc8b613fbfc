"""Drafters, under the names that `_target_` uses."""

from duoexp.drafters.base import Drafter
from duoexp.drafters.hybrid import Hybrid
from duoexp.drafters.model import ModelDrafter
from duoexp.drafters.prompt_lookup import PromptLookup

__all__ = ["Drafter", "Hybrid", "ModelDrafter", "PromptLookup"]
