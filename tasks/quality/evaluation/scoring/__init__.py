"""Load the documents of tasks, score models on them, and describe the scores. Most of it runs in the model process."""
