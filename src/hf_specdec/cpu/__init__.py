"""Kernels for forwards over few tokens on a CPU, written in C++ and compiled on first use."""
