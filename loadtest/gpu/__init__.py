"""Baton's performance on a GPU, in two calls on a bare machine: see ``loadtest.gpu.__main__``.

Everything that runs before a part has a process of its own imports the standard library alone, so that a
package which is missing costs the parts that need it.
"""
