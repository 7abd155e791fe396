"""From a batch to an update: forward, the weight of the loss, its number format, the learning rate, and the step."""
