"""`unitrain bench`: measure collectives and training on every backend, compare results, and predict more ranks.

rank_sets        start one set of ranks per backend and transport, and run one set at a time
collectives      time a collective, a memory copy or a TCP stream, in the ranks
training         time training steps and their parts, in the ranks
models           the built-in models of bench train
rounds           measure all rank sets in rounds, in random order
results          read and write results, and derived quantities such as bandwidth and efficiency
comparison       compare two results with a significance test
cost_model       cost formulas of collectives, and their calibration with measured collectives
cost_prediction  predict training steps on more ranks
tables           print results as tables
"""
