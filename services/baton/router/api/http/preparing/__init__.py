"""From the bytes of a body to a request that only has to be let in, or to the error that its client gets.

Pure: it needs no event loop, no worker and no other request, and imports no web server. Small bodies are
read so on the event loop, large ones by the same code in a process (``baton.router.preparation``).
"""
