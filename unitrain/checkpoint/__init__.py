"""Checkpoints: saving, loading and converting the state of a run.

checkpointer    Checkpointer: saves and loads the checkpoints of a run
files           the format of checkpoints written by rank 0; finding, checking and replacing checkpoints
sharded_files   the format of checkpoints written by all ranks in parallel
tensor_files    safetensors files that contain parts of tensors
loading         loading either format into a model, an optimizer and a scheduler
writer          background writing, and retention of checkpoints
memory          checkpoints in the memory of this host, for restarts
state_copy      copies of state in host memory, in types that torch.load(weights_only=True) accepts
folder_lock     the lock that lets only one job at a time write to the output folder
output_folder   file accesses with errors that all ranks raise, and the record of the job that owns the output folder
conversion      reading checkpoints of other programs
consolidation   writing the model of a checkpoint to one file
"""
