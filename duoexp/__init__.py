"""Configuration-driven experiments with heterogeneous speculative decoding."""
