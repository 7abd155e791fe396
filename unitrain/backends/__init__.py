"""Backends: what moves tensors between ranks and makes gradients global. Read `base.py` first.

Nothing is imported here, so that a backend costs nothing until it is asked for by name (`registry.py`).
"""
