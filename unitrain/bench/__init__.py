"""How fast collectives and training are here, on every backend in turn, and what a model says of more ranks."""
