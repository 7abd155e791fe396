"""`unitrain memory`: report what fills the memory of each rank, and what each setting would save.

measurement     run the script with recording on, and read the records of the ranks
record          the files of a recorded run
run_script      program of each rank: start the recorder, then execute the user's script
recorder        measure the memory of a training process with hooks of torch, then end the process
saved_tensors   the tensors that autograd saves for the backward pass, and the effect of activation checkpointing
tensor_bytes    bytes of parameters, gradients and optimizer state
process_memory  current and peak memory of a process or a GPU
savings         predictions of what each setting saves
report          tables, summary and JSON
"""
