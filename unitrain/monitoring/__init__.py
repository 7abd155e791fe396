"""Detection of hangs and failures: the watchdog, the liveness check between ranks, the flight recorder, and rank status."""
