"""The live page of a router: its data, and the page itself."""
