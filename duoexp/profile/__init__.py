"""What each pass takes on this machine: measured, kept, and looked up. `python -m duoexp.profile` prints it."""

from duoexp.profile.measure import Want, measure
from duoexp.profile.tables import Costs, Profile, Timing, key_of

__all__ = ["Costs", "Profile", "Timing", "Want", "key_of", "measure"]
