"""`unitrain tune`: search for settings that reduce the step time and change results only by rounding errors.

tuning          run the script repeatedly, search for faster settings, and report the result
search          the search algorithm and the significance test, independent of the measurement
trial           the request that is passed to a timed run, and the result that the run returns
timer           time the steps of a run (runs in the training processes)
tuned_settings  the file of tuned settings, which `unitrain launch` reads
"""
