"""Detection of hangs and failures: watchdog, liveness check between ranks, flight recorder, and rank status."""
