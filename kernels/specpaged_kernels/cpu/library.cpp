// All kernels, in one library.

#include "rounds.cpp"
#include "sampling.cpp"
