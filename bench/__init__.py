"""Measurements behind the numbers in the README; `make bench` prints them."""
