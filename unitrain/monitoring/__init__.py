"""Detection and reporting of failures and hangs. Backends use `FailureMonitor`, which combines the other modules.

monitor             FailureMonitor: waits for collectives, and reports timeouts and failures
watchdog            Watchdog: thread that detects failures of other ranks and timeouts, and terminates the process
deadlines           time limits for waits of the training thread
liveness            LivenessCheck: connections between rank 0 and the other ranks, which detect killed processes
failure_store       first failure, rank statuses and shutdowns, exchanged through the rendezvous store
flight_recorder     history of this rank's recent collectives and backward passes
flight_record_file  this history as a file for torch's analyzer
rank_status         RankStatus: activity and source line of a rank, as data and as text
stack_inspection    the user's line, the awaited DataLoader worker and the executed functions in a stack
stalled_ranks       detection of ranks that wait for each other in different operations
loop_counters       counts of backward passes and steps, compared between ranks
peer_connection     connection that distinguishes a normal exit of the peer from a crash
supervisor_client   a rank's connection to the `unitrain launch` that restarts its job
"""
