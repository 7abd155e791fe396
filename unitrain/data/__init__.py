"""This rank's share of the data: how it is cut up, and how its batches are fetched."""
