"""Models on disk and on the Hub: references, pins, downloads, and the processes that load models."""
