"""What this machine can run, before anything is downloaded or loaded, and what to do about what it cannot."""
