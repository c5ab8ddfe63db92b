"""The same job done by what a user would pick instead of portranger; `make bench-peers` prints it.

The job: forward TCP and UDP 1000-8000 from a pod's eth0 to its guest, move the end of the TCP range
to 8001, remove it all. Every peer does it in namespaces of its own, and packets prove each step.
"""
