"""Start-up of a rank: environment variables, rendezvous, network addresses, devices and authentication.

environment         launcher and rank of this process; other modules read environment variables through it
overrides           loading of the object with which a tool such as `unitrain verify` changes a run
rendezvous          connection of the ranks of any launcher through a torch Store
responsive_store    requests to that store with a time limit
messages            signed messages between ranks in that store
authentication      signatures, and authentication of connections, with the key of the job
network             addresses and interfaces of this host, and listening sockets
rank_connections    authenticated TCP connections between ranks
devices             selection of a rank's device
memory_folder       folder in shared memory for the checkpoints of a supervised job
torchrun            program: torchrun with a rendezvous store that listens on one address
signal_forwarding   forwarding of a scheduler's warning signals from a launcher to its ranks
"""
