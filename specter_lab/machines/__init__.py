"""The owners of time: simulated, throttled and CUDA machines."""
