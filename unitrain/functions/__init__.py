"""A function on several ranks, from a notebook or a script: who starts them, and what each of them does."""
