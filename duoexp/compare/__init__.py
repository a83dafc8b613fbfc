"""Methods and peers in one run, on the same prompts, decoded in turns."""
