"""A page about runs, made from the record that they leave in their folders."""
