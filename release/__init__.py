"""What makes a release of a clone: locks, wheel and sdist, Debian package, bill of materials.

Nothing here is installed; `make lock`, `make dist`, `make deb` and `make sbom` run it. It needs the
standard library only, and what is written is the same, byte for byte, whenever and wherever it is
written from the same commit.
"""
