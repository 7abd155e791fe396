"""Showing and recording how a run goes."""
