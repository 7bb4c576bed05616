// All kernels, in one library.

#include "heads.cpp"
#include "rounds.cpp"
#include "sampling.cpp"

#include "lookup.cpp"
#include "ngram_index.cpp"
#include "suffix_index.cpp"
