"""A router of several processes: one address, and one answer to whoever asks about all of it.

Each process is a router of its own, as if it were another replica. A parent holds the ports and sees to it
that all of them run; what is asked of one and known to another is asked on between them.
"""
