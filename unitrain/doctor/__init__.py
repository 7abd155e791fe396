"""What is wrong with a machine, or between the ranks of a job: facts of each rank, probes between them, findings."""
