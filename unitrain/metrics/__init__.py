"""Numbers that are exact over ranks."""
