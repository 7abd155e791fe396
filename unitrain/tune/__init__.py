"""Finding settings that make a training faster, which change no number beyond rounding: `unitrain tune`."""
