"""`unitrain tune`: find settings that make a training faster and change its numbers by rounding only.

tuning          run the script repeatedly, search for faster settings, and report the result
search          the search and the statistics of a gain, independent of what is measured
trial           the request to a timed run, and its result
timer           time the steps of a run, in the training processes
tuned_settings  the file with the settings that were found, which `unitrain launch` reads
"""
