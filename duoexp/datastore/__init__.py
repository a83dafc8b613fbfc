"""Text to draft from, indexed on disk: the datastore of REST (He et al., 2311.08252). Needs no model."""

from duoexp.datastore.store import Datastore, build

__all__ = ["Datastore", "build"]
