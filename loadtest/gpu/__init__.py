"""What a GPU gets out of Baton, in one command: see ``loadtest.gpu.__main__``."""
