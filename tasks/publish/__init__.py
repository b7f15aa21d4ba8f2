"""Publishing: what a release consists of, and how it comes to stand complete at its target."""
