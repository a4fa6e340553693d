/* The decoder's operations with AVX-512; none where the compiler does not know it. */
#include "ops.h"

#if defined(__AVX512F__)
#include "table.h"

const trirun::DecoderOps* const trirun::kDecoderAvx512 = &kDecoderOps;
#else
const trirun::DecoderOps* const trirun::kDecoderAvx512 = nullptr;
#endif
