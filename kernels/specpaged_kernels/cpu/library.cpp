// All kernels, in one library.

#include "greedy.cpp"
#include "sampling.cpp"
