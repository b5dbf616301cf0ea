"""A router of several processes, with one address, and one answer to questions about the whole router.

Each process is a router of its own, like another replica. A parent holds the ports and keeps the processes
running. A process asked about what another process knows forwards the question.
"""
