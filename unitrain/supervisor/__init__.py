"""Supervision of a job: restarts after failures, changes of its hosts, and the output of its ranks."""
