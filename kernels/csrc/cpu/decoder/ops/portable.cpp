/* The decoder's operations in plain C++, for any processor: the reference of the other two. */
#include "table.h"

const trirun::DecoderOps* const trirun::kDecoderPortable = &kDecoderOps;
