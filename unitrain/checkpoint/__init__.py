"""What a run keeps: its cursor, its checkpoints, its random numbers."""
