"""Decide which files of a release are weights, and compare rebuilt weights with those of the release."""
