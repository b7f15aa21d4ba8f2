"""Parts of a release: documents, signatures, publish targets, reports, explanations and metrics."""
