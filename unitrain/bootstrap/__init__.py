"""Start-up of a rank: environment variables, rendezvous, network addresses, devices and authentication.

environment         launcher and rank of this process; the only module that reads environment variables
rendezvous          connects the ranks of any launcher through a torch Store
messages            signed messages between ranks in that store
authentication      signatures, and authentication of connections, with the key of the job
network             addresses and interfaces of this host, and listening sockets
devices             device of a rank
torchrun            program: torchrun with a rendezvous that listens on one address
signal_forwarding   forwards a scheduler's warning signals from these launchers to their ranks
"""
