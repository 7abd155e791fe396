"""Detection and reporting of failures and hangs. Backends use `FailureMonitor`; it combines the other modules.

monitor             FailureMonitor: waits for collectives, reports timeouts and failures
watchdog            Watchdog thread: detects failures of other ranks and missed deadlines, and terminates the process
deadlines           time limits of waits of the training thread
liveness            LivenessCheck: connections on which rank 0 and the other ranks detect that a process was killed
failure_store       first failure, rank statuses and shutdowns, exchanged through the rendezvous store
flight_recorder     history of this rank's recent collectives and backward passes
rank_status         RankStatus: position and activity of a rank, as data; and its text
stack_inspection    user's line, DataLoader worker and function, read from a stack
loop_counters       numbers of backward passes and steps, compared between ranks
peer_connection     connection that distinguishes an orderly exit of the peer from a crash
supervisor_client   a rank's connection to the `unitrain launch` that restarts its job
"""
