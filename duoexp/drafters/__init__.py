"""Drafters, under the names that `_target_` uses."""

from duoexp.drafters.base import Drafter
from duoexp.drafters.hybrid import Hybrid
from duoexp.drafters.lookahead import Lookahead
from duoexp.drafters.model import ModelDrafter
from duoexp.drafters.prompt_lookup import PromptLookup
from duoexp.drafters.rest import Rest

__all__ = ["Drafter", "Hybrid", "Lookahead", "ModelDrafter", "PromptLookup", "Rest"]
