"""The parts of the measurement, each with a function ``measure`` that runs in a process of its own."""
