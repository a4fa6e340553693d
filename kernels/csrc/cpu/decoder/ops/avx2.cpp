/* The decoder's operations with AVX2; none where the compiler does not know it. */
#include "ops.h"

#if defined(__AVX2__)
#include "table.h"

const trirun::DecoderOps* const trirun::kDecoderAvx2 = &kDecoderOps;
#else
const trirun::DecoderOps* const trirun::kDecoderAvx2 = nullptr;
#endif
