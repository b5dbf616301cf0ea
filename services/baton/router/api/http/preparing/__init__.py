"""The reading of bodies: from bytes to a request that is ready for admission, or to its client's error.

Pure: the code needs no event loop, no worker and no other request, and imports no web server. It reads small
bodies on the event loop and large ones in a process (``baton.router.preparation``).
"""
