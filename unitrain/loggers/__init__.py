"""Where the numbers of a run can go."""
