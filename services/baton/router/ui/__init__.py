"""The live page of a router: what it shows, and the page itself."""
