"""`unitrain bench`: benchmark collectives and training on every backend, compare results, and predict scaling.

rank_sets          start one set of ranks per backend and transport, and run one set at a time
collectives        time a collective, a memory copy or a TCP stream (runs on the ranks)
training           time training steps and their phases (runs on the ranks)
models             the built-in models of bench train
rounds             measure all rank sets in rounds, in random order
results            read and write results; derive metrics such as bandwidth and efficiency
comparison         compare two results with a significance test
cost_model         cost formulas of collectives, calibrated with measured collectives
cost_prediction    predict the step time on more ranks
method_prediction  predict the step time and the traffic of gradient compression and local steps
tables             print results as tables
"""
