"""`unitrain report`: an HTML page or a PNG about one or several runs, from the history in their output folders.

record         read the history of a run
figures        compute numbers from the history: best results, speed, times per rank
contents       choose the charts of a report
charts         draw charts with matplotlib, as SVG or PNG
page           write the report: render the HTML page, or draw the PNG
bench_charts   the charts and the page of `unitrain bench --output`
"""
