"""What becomes of a loss: its weight, its number format, the learning rate, and the update."""
