"""One model in several processes: the part of each rank, the messages between ranks, and their lives."""
