"""`unitrain report`: create an HTML or PNG report of one or several runs, from the history in their output folders.

record         read the history of a run
run_statistics compute statistics from the history: best results, throughput, times per rank
contents       select the charts of a report
charts         draw charts with matplotlib, as SVG or PNG
page           write the report: render the HTML page, or draw the PNG
goodput        describe the goodput of runs as text
bench_charts   the charts and the HTML page of `unitrain bench --output`
"""
