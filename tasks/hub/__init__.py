"""The Hugging Face Hub as every stage sees it: how to reach it, what a commit lists, headers without weights."""
