"""Parts that decide on a merge: scores, perplexity, the gate, the judge, the smoke test, and quantized variants."""
