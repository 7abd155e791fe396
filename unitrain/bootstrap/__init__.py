"""Start-up of a rank: the environment that its launcher set, devices, addresses, and the rendezvous."""
