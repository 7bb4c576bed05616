"""Kernels for CPUs, in C++ that the machine's own compiler builds when they are first used."""
