"""The pure core: manifests become a model, the model becomes rules, rules become a plan.

Nothing in here performs I/O or imports anything outside the standard library.
"""
