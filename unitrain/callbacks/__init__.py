"""Side effects of a run: what is called while it goes on, and those that ship with unitrain."""
