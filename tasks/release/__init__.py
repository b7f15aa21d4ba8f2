"""What leaves the house: documents, signatures, publish targets, reports, explanations and metrics."""
