"""Supervision of a job: `unitrain launch` starts it again when it fails and when its hosts change, and keeps what its ranks print."""
