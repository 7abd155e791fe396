"""The subcommands of `unitrain`, one file each, imported when they are called."""
