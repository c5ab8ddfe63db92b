"""What each command does, without knowing how its options were read; one module a command.

A command writes to a console and returns its exit code. Each imports only what it needs: the dry
run of a pipeline starts without the kernel's libraries.
"""
