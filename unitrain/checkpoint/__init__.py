"""Checkpoints: saving, loading and converting the state of a run.

checkpointer    Checkpointer: saves and loads the checkpoints of a run
files           the format of a checkpoint that rank 0 writes; finding, checking and replacing checkpoints
sharded_files   the format of a checkpoint that all ranks write, each its part
tensor_files    safetensors files that contain parts of tensors
loading         loading of both formats into a model, an optimizer and a scheduler
writer          background writing, and retention of checkpoints
state_copy      copies of state in host memory, in types that load safely
folder_lock     the lock on the folder: one job at a time may write to it
output_folder   file accesses of rank 0 in the folder, and the record of the job that owns it
conversion      reading of other programs' checkpoints
consolidation   writing of the model of a checkpoint to one file
"""
