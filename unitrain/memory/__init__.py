"""`unitrain memory`: break down the memory usage of each rank, and predict the savings of each setting.

measurement     run the script with the recorder, and read the records of the ranks
record          the files of a recorded run
run_script      program of each rank: start the recorder, then execute the user's script
recorder        measure the memory of a training process with torch hooks, then end the process
saved_tensors   the tensors that autograd saves for the backward pass, and the effect of activation checkpointing
tensor_bytes    bytes of parameters, gradients and optimizer state
process_memory  current and peak memory of a process or a GPU
savings         predictions of the savings of each setting
report          tables, summary and JSON
"""
